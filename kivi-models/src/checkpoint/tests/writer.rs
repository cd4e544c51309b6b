//! A GGUF writer for tests, after `docs/gguf.md` of the ggml repository, that can also be made to
//! write nonsense.

/// Tensor type numbers of `ggml.h`.
pub(super) const F32: u32 = 0;
pub(super) const F16: u32 = 1;
pub(super) const Q8_0: u32 = 8;
pub(super) const Q4_K: u32 = 12;
pub(super) const IQ4_XS: u32 = 23;

pub(super) fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// The value of a key: its type number and its bytes.
pub(super) type Value = (u32, Vec<u8>);

pub(super) fn text(value: &str) -> Value {
    (8, string(value))
}

pub(super) fn u32(value: u32) -> Value {
    (4, value.to_le_bytes().to_vec())
}

pub(super) fn f32(value: f32) -> Value {
    (6, value.to_le_bytes().to_vec())
}

pub(super) fn boolean(value: bool) -> Value {
    (7, vec![value.into()])
}

/// An array of `count` elements of type `kind`, encoded in `elements`.
pub(super) fn array(kind: u32, count: u64, elements: &[u8]) -> Value {
    (9, [&kind.to_le_bytes()[..], &count.to_le_bytes(), elements].concat())
}

pub(super) fn texts(values: &[&str]) -> Value {
    array(
        8,
        values.len() as u64,
        &values.iter().flat_map(|value| string(value)).collect::<Vec<_>>(),
    )
}

#[derive(Clone)]
pub(super) struct Tensor {
    pub(super) name: String,
    /// Fastest first, as in the file.
    pub(super) dimensions: Vec<u64>,
    pub(super) kind: u32,
    pub(super) bytes: Vec<u8>,
    /// Written instead of the true offset.
    pub(super) offset: Option<u64>,
}

#[derive(Clone)]
pub(super) struct Writer {
    pub(super) version: u32,
    pub(super) alignment: usize,
    pub(super) keys: Vec<(String, Value)>,
    pub(super) tensors: Vec<Tensor>,
    /// Written instead of the true counts.
    pub(super) counts: Option<[u64; 2]>,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self { version: 3, alignment: 32, keys: Vec::new(), tensors: Vec::new(), counts: None }
    }

    pub(super) fn key(mut self, key: &str, value: Value) -> Self {
        self.keys.retain(|(other, _)| other != key);
        self.keys.push((key.to_owned(), value));
        self
    }

    pub(super) fn without(mut self, name: &str) -> Self {
        self.keys.retain(|(key, _)| key != name);
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// A tensor with the bytes 1, 2, 3 ….
    pub(super) fn tensor(
        mut self,
        name: &str,
        kind: u32,
        dimensions: &[u64],
        bytes: usize,
    ) -> Self {
        self.tensors.push(Tensor {
            name: name.to_owned(),
            dimensions: dimensions.to_vec(),
            kind,
            bytes: (1..=bytes).map(|byte| byte as u8).collect(),
            offset: None,
        });
        self
    }

    pub(super) fn build(&self) -> Vec<u8> {
        let [tensors, keys] =
            self.counts.unwrap_or([self.tensors.len() as u64, self.keys.len() as u64]);
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(tensors.to_le_bytes());
        file.extend(keys.to_le_bytes());
        for (key, (kind, value)) in &self.keys {
            file.extend(string(key));
            file.extend(kind.to_le_bytes());
            file.extend(value);
        }
        let mut data: Vec<u8> = Vec::new();
        for tensor in &self.tensors {
            data.resize(data.len().next_multiple_of(self.alignment), 0);
            file.extend(string(&tensor.name));
            file.extend((tensor.dimensions.len() as u32).to_le_bytes());
            file.extend(tensor.dimensions.iter().flat_map(|dimension| dimension.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&tensor.bytes);
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        file.extend(data);
        file
    }

    /// A whole model: 2 layers, width 32, 4 query heads and 2 kv heads of 8 elements, MLP 64, six
    /// tokens, tied embeddings. Matrices are Q8_0 (34 bytes per 32 elements), norms F32.
    pub(super) fn model() -> Self {
        let mut writer = Self::new()
            .key("general.architecture", text("llama"))
            .key("general.name", text("Test"))
            .key("llama.context_length", u32(128))
            .key("llama.embedding_length", u32(32))
            .key("llama.block_count", u32(2))
            .key("llama.feed_forward_length", u32(64))
            .key("llama.attention.head_count", u32(4))
            .key("llama.attention.head_count_kv", u32(2))
            .key("llama.attention.layer_norm_rms_epsilon", f32(0.5))
            .key("llama.rope.freq_base", f32(1000.0))
            .key("tokenizer.ggml.model", text("gpt2"))
            .key("tokenizer.ggml.pre", text("llama-bpe"))
            .key("tokenizer.ggml.tokens", texts(&["a", "b", "ab", "<s>", "</s>", "é"]))
            .key("tokenizer.ggml.token_type", array(5, 6, &[1u8, 0, 0, 0].repeat(6)))
            .key("tokenizer.ggml.merges", texts(&["a b"]))
            .key("tokenizer.ggml.bos_token_id", u32(3))
            .key("tokenizer.ggml.eos_token_id", u32(4))
            .key("tokenizer.ggml.padding_token_id", u32(u32::MAX))
            .key("tokenizer.ggml.add_bos_token", boolean(true))
            .key("tokenizer.chat_template", text("{{ bos_token }}"))
            .tensor("token_embd.weight", Q8_0, &[32, 6], 6 * 34)
            .tensor("output_norm.weight", F32, &[32], 128);
        for layer in 0..2 {
            for (name, dimensions) in [
                ("attn_q", [32, 32]),
                ("attn_k", [32, 16]),
                ("attn_v", [32, 16]),
                ("attn_output", [32, 32]),
                ("ffn_gate", [32, 64]),
                ("ffn_up", [32, 64]),
                ("ffn_down", [64, 32]),
            ] {
                let bytes = (dimensions[0] / 32 * dimensions[1] * 34) as usize;
                writer =
                    writer.tensor(&format!("blk.{layer}.{name}.weight"), Q8_0, &dimensions, bytes);
            }
            for name in ["attn_norm", "ffn_norm"] {
                writer = writer.tensor(&format!("blk.{layer}.{name}.weight"), F32, &[32], 128);
            }
        }
        writer
    }
}
