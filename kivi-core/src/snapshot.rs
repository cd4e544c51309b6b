//! One sequence of a cache in a file, to be loaded on any backend.
//!
//! A snapshot holds the [canonical form](CanonicalLayer) of every layer, the ids of the tokens and
//! what the contents depend on: the model, the rotary embedding, the formats and lengths of the
//! cache. Reading verifies all of it before anything touches a pool. The bytes are specified in
//! `docs/src/reference/snapshot-format.md`.

mod error;
mod header;
mod read;
mod sequence;
mod write;

pub use error::SnapshotError;

use crate::{
    CacheConfig, CanonicalLayer, Error, FullTokens, KeyValue, LayerSpec, PackedValues, PoolSpec,
    Result, Rope, SequenceLayout, StoreDtype, words_for,
};

/// The first bytes of a file. The first one is no text, and what a transfer as text would change
/// follows.
const MAGIC: [u8; 8] = *b"\x89KIVI\r\n\x1a";

/// The version of the format this program writes, and the only one it reads.
const VERSION: u32 = 1;

/// Layers of a snapshot; with the limit of `head_dim` it bounds the header.
const MOST_LAYERS: usize = 4096;

/// What cached keys and values depend on besides the tokens and the cache itself.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelIdentity {
    /// Digest of the weights, however the caller makes it: equal only for equal models.
    pub fingerprint: [u8; 32],
    /// How keys are rotated.
    pub rope: Rope,
    /// Per layer, whether the cached keys lack the [key bias](crate::KeyBias) of the model.
    pub key_bias_beside: Vec<bool>,
}

/// What a snapshot is of.
#[derive(Clone, Debug, PartialEq)]
pub struct SnapshotHeader {
    /// The model that computed the keys and values.
    pub model: ModelIdentity,
    /// The configuration of the cache. Pages leave no trace in the contents.
    pub config: CacheConfig,
    /// Every layer, with the formats it really uses ([`PoolSpec::layers`]).
    pub layers: Vec<LayerSpec>,
    /// Ids of the cached tokens.
    pub tokens: Vec<u32>,
    /// First position that is not quantized.
    pub packed: KeyValue<usize>,
    /// First position with a full-precision copy.
    pub kept: KeyValue<usize>,
}

impl SnapshotHeader {
    /// Pool and layout that the contents must fit; everything about the header is checked.
    fn shape(&self) -> Result<(PoolSpec, SequenceLayout)> {
        let refuse = |reason: String| Err(Error::request("snapshot", reason));
        let (layers, tokens) = (self.layers.len(), self.tokens.len());
        if layers > MOST_LAYERS {
            return refuse(format!("{layers} layers, more than {MOST_LAYERS}"));
        }
        if tokens == 0 || tokens >= u32::MAX as usize {
            return refuse(format!("{tokens} tokens, not 1 to {}", u32::MAX - 1));
        }
        if self.model.key_bias_beside.len() != layers {
            let found = self.model.key_bias_beside.len();
            return refuse(format!("key biases of {found} layers, and {layers} layers"));
        }
        let pool = PoolSpec::for_context(self.config.clone(), self.layers.clone(), 1, tokens)?;
        if pool.layers() != self.layers {
            return refuse("a layer within the residual has codes".into());
        }
        for layer in &self.layers {
            self.model.rope.validate(layer.head_dim)?;
        }
        let (sinks, group) = (self.config.sink_length(), self.config.group_size());
        for (kept, packed, grouped) in [
            (self.kept.keys, self.packed.keys, true),
            (self.kept.values, self.packed.values, false),
        ] {
            let ordered = sinks <= kept && kept <= packed && packed <= tokens.max(sinks);
            let whole = |end: usize| !grouped || (end - sinks).is_multiple_of(group);
            if !ordered || !whole(kept) || !whole(packed) {
                return refuse(format!(
                    "boundaries {kept} and {packed} of {tokens} tokens with {sinks} sinks in groups \
                     of {group}"
                ));
            }
        }
        let layout = SequenceLayout {
            tokens,
            packed: self.packed,
            kept: self.kept,
            tables: vec![Vec::new(); pool.group_count()],
            ..SequenceLayout::default()
        };
        Ok((pool, layout))
    }
}

/// One sequence of a cache, with everything needed to go on from it elsewhere. Valid by
/// construction.
///
/// [`Snapshot::of_sequence`] takes it from a cache, [`Snapshot::restore`] puts it into one.
#[derive(Clone, Debug, PartialEq)]
pub struct Snapshot {
    header: SnapshotHeader,
    layers: Vec<CanonicalLayer>,
}

impl Snapshot {
    /// Bytes of the arrays in host memory; full-precision tokens take 4 per element here.
    pub fn host_bytes(&self) -> usize {
        4 * self.tokens().len() + self.layers.iter().map(CanonicalLayer::host_bytes).sum::<usize>()
    }

    /// A snapshot of contents in canonical form.
    ///
    /// # Errors
    /// When the header contradicts itself, a layer does not have the shape the header says, or a
    /// full-precision element is not a value of its store type.
    pub fn new(header: SnapshotHeader, layers: Vec<CanonicalLayer>) -> Result<Self> {
        let (pool, layout) = header.shape()?;
        let snapshot = Self { header, layers };
        snapshot.check_shapes(&pool, &layout)?;
        for (index, layer) in snapshot.layers.iter().enumerate() {
            let store = snapshot.header.layers[index].format.map(|format| format.store);
            for (name, tokens, store) in [
                ("keys of the sinks", &layer.sinks.keys, store.keys),
                ("values of the sinks", &layer.sinks.values, store.values),
                ("keys", &layer.full.keys, store.keys),
                ("values", &layer.full.values, store.values),
            ] {
                if let Some(x) = tokens.data.iter().find(|&&x| !is_stored(store, x)) {
                    let reason = format!(
                        "layer {index} has {x:e} among the full-precision {name}, which is no {}",
                        store.name()
                    );
                    return Err(Error::request("snapshot", reason));
                }
            }
        }
        Ok(snapshot)
    }

    fn check_shapes(&self, pool: &PoolSpec, layout: &SequenceLayout) -> Result<()> {
        let (found, expected) = (self.layers.len(), pool.layers().len());
        crate::expect_len("snapshot", "layers", found, expected)?;
        for (layer, spec) in self.layers.iter().zip(pool.layers()) {
            layer.check(pool, spec, layout)?;
            if let Some(values) = &layer.packed_values {
                check_padding(values)?;
            }
        }
        Ok(())
    }

    /// What this is a snapshot of.
    pub fn header(&self) -> &SnapshotHeader {
        &self.header
    }

    /// The contents, layer by layer.
    pub fn layers(&self) -> &[CanonicalLayer] {
        &self.layers
    }

    /// Ids of the cached tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.header.tokens
    }
}

/// Checks that the last word of every row is filled up with zero bits.
fn check_padding(values: &PackedValues) -> Result<()> {
    let (per_word, words) = (values.bits.codes_per_word(), words_for(values.bits, values.head_dim));
    let used = values.head_dim % per_word;
    let last = values.codes.chunks_exact(words).filter_map(<[u32]>::last);
    if used > 0 && last.into_iter().any(|word| word >> (used * values.bits.get()) != 0) {
        let reason = format!("values of {} channels have more codes", values.head_dim);
        return Err(Error::request("snapshot", reason));
    }
    Ok(())
}

/// Whether storing `x` loses nothing.
fn is_stored(store: StoreDtype, x: f32) -> bool {
    store.round(x).to_bits() == x.to_bits()
}

/// The arrays of full-precision tokens from position `first` on.
fn from_position(tokens: &FullTokens, first: usize, head_dim: usize) -> FullTokens {
    let skipped = first.saturating_sub(tokens.first).min(tokens.tokens);
    let row = tokens.tokens * head_dim;
    let heads = tokens.data.chunks_exact(row.max(1));
    FullTokens {
        first: tokens.first + skipped,
        tokens: tokens.tokens - skipped,
        data: heads.flat_map(|head| &head[skipped * head_dim..]).copied().collect(),
    }
}

/// The first eight bytes of a digest, enough to tell two apart.
fn hex(digest: &[u8; 32]) -> String {
    digest[..8].iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "…"
}
