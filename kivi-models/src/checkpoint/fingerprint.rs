//! Telling models apart without reading all of their weights.

use super::Checkpoint;
use crate::ModelConfig;
use kivi_core::RopeStyle;
use sha2::{Digest, Sha256};

/// Bytes that are hashed at either end of a weight.
const END_BYTES: usize = 4096;

impl Checkpoint {
    /// A SHA-256 that differs for models whose caches differ: over the sizes and switches of the
    /// configuration, the rotary frequencies, and of every weight its name, format, shape and the first
    /// and last 4 KiB of its bytes.
    ///
    /// It takes milliseconds for a model of any size, and so it does not see a change inside a weight
    /// that leaves both of its ends, in every weight, as they were; training changes all of them. The
    /// name of the file and of the model do not matter. A model converted to another file format or
    /// quantized otherwise is another model: its keys and values are other numbers.
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = Sha256::new();
        put(&mut hash, b"kivi model 1");
        hash_config(&mut hash, &self.config);
        for name in self.config.weight_names() {
            let Some(weight) = self.weight(name) else { continue };
            put(&mut hash, name.to_string().as_bytes());
            put(&mut hash, weight.format().name().as_bytes());
            weight.shape().into_iter().for_each(|size| put_number(&mut hash, size));
            let bytes = weight.bytes();
            put_number(&mut hash, bytes.len());
            hash.update(&bytes[..END_BYTES.min(bytes.len())]);
            hash.update(&bytes[bytes.len().saturating_sub(END_BYTES)..]);
        }
        hash.finalize().into()
    }
}

/// Everything that a key or value may depend on; a new field has to be decided about.
fn hash_config(hash: &mut Sha256, config: &ModelConfig) {
    let ModelConfig {
        architecture,
        name: _,
        vocab_size,
        hidden_size,
        intermediate_size,
        layers,
        query_heads,
        kv_heads,
        head_dim,
        norm_eps,
        context_length: _,
        rope,
        tied_embeddings,
        attention_bias,
        mlp_bias,
        activation: crate::config::Activation::Silu,
        sliding_window,
    } = config;
    put(hash, architecture.name().as_bytes());
    for &size in
        [vocab_size, hidden_size, intermediate_size, layers, query_heads, kv_heads, head_dim]
    {
        put_number(hash, size);
    }
    hash.update(norm_eps.to_le_bytes());
    for &switch in [tied_embeddings, attention_bias, mlp_bias] {
        hash.update([u8::from(switch)]);
    }
    put_number(hash, sliding_window.unwrap_or(0));
    let rope = rope.frequencies();
    hash.update([u8::from(rope.style == RopeStyle::Interleaved)]);
    hash.update(rope.attention_factor.to_le_bytes());
    put_number(hash, rope.frequencies.len());
    rope.frequencies.iter().for_each(|frequency| hash.update(frequency.to_le_bytes()));
}

/// Bytes after their number, so that no two lists of them look the same.
fn put(hash: &mut Sha256, bytes: &[u8]) {
    put_number(hash, bytes.len());
    hash.update(bytes);
}

fn put_number(hash: &mut Sha256, number: usize) {
    hash.update((number as u64).to_le_bytes());
}
