//! Model configuration from the metadata of a GGUF file.
//!
//! Keys and default values follow the section on `llama` in `docs/gguf.md` of the ggml repository.

use super::{
    Activation, Architecture, DEFAULT_THETA, GenerationDefaults, ModelConfig, RopeConfig,
    RopeScaling, RopeStyle, derived_head_dim, effective_window,
};
use crate::checkpoint::{Gguf, TensorType, Value};
use crate::error::quoted;
use crate::{Error, Result};
use kivi_core::WeightFormat;

/// Keys of architecture `llama`, without the prefix, that are read or that only inform.
const KNOWN_KEYS: [&str; 20] = [
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.sliding_window",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "vocab_size",
];

impl ModelConfig {
    /// Reads the metadata of a GGUF file of architecture `llama`.
    ///
    /// # Errors
    /// [`Error::UnsupportedArchitecture`] and [`Error::UnsupportedFeature`] for what this crate does
    /// not run, [`Error::InvalidGguf`] for keys of the wrong type, and those of
    /// [`ModelConfig::validate`].
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        match gguf.string("general.architecture")? {
            Some("llama") => {}
            Some(other) => {
                return Err(Error::UnsupportedArchitecture {
                    name: quoted(other),
                    supported: "llama",
                });
            }
            None => return Err(Error::config("general.architecture is missing")),
        }
        let keys = Keys(gguf);
        keys.refuse()?;

        let hidden_size = keys.required("embedding_length")?;
        let query_heads = keys.required("attention.head_count")?;
        let head_dim = keys.head_dim(hidden_size, query_heads)?;
        let context_length = keys.required("context_length")?;
        let config = Self {
            architecture: Architecture::Llama,
            name: gguf.string("general.name")?.unwrap_or_default().to_owned(),
            vocab_size: keys.vocab_size()?,
            hidden_size,
            intermediate_size: keys.required("feed_forward_length")?,
            layers: keys.required("block_count")?,
            query_heads,
            kv_heads: keys.uniform("attention.head_count_kv")?.unwrap_or(query_heads),
            head_dim,
            norm_eps: keys
                .float("attention.layer_norm_rms_epsilon")?
                .ok_or_else(|| missing("attention.layer_norm_rms_epsilon"))?,
            context_length,
            rope: keys.rope(head_dim)?,
            tied_embeddings: gguf.tensor("output.weight").is_none(),
            attention_bias: keys.has_bias(&["attn_q", "attn_k", "attn_v", "attn_output"]),
            mlp_bias: keys.has_bias(&["ffn_gate", "ffn_up", "ffn_down"]),
            activation: Activation::Silu,
            sliding_window: effective_window(
                keys.uniform("attention.sliding_window")?.filter(|&window| window > 0),
                context_length,
            ),
        };
        config.validate()?;
        Ok(config)
    }
}

impl GenerationDefaults {
    /// The tokens that start and end a text, from the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] for keys of the wrong type.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let id = |name: &str| {
            let id = gguf.integer::<u32>(&format!("tokenizer.ggml.{name}_token_id"))?;
            // −1, stored unsigned, is ggml's "there is none".
            Ok::<_, Error>(id.filter(|&id| id != u32::MAX))
        };
        let mut eos_token_ids = Vec::new();
        for name in ["eos", "eot", "eom"] {
            eos_token_ids.extend(id(name)?.filter(|id| !eos_token_ids.contains(id)));
        }
        Ok(Self {
            eos_token_ids,
            bos_token_id: id("bos")?,
            pad_token_id: id("padding")?,
            ..Self::default()
        })
    }
}

/// The keys that start with `llama.`.
struct Keys<'a>(&'a Gguf);

impl Keys<'_> {
    fn float(&self, key: &str) -> Result<Option<f64>> {
        self.0.float(&format!("llama.{key}"))
    }

    fn required(&self, key: &str) -> Result<usize> {
        self.uniform(key)?.ok_or_else(|| missing(key))
    }

    /// A size that some files give once and others once per layer.
    fn uniform(&self, key: &str) -> Result<Option<usize>> {
        let key = format!("llama.{key}");
        let Some(Value::Array(array)) = self.0.metadata().get(&key) else {
            return self.0.integer(&key);
        };
        let mut sizes = array.iter().map(|value| match value {
            Value::Integer(size) => usize::try_from(size).ok(),
            _ => None,
        });
        let first = sizes
            .next()
            .flatten()
            .ok_or_else(|| Error::gguf(format!("{key} is not a size or a list of sizes")))?;
        if sizes.all(|size| size == Some(first)) {
            Ok(Some(first))
        } else {
            Err(Error::unsupported(
                format!("{key} that differs between layers"),
                "the same for all layers",
            ))
        }
    }

    /// The embedding's rows where there is an embedding, since they are what the logits have.
    fn vocab_size(&self) -> Result<usize> {
        let tokens = self.0.array("tokenizer.ggml.tokens")?.map(|tokens| tokens.len());
        let rows = match self.0.tensor("token_embd.weight").map(|tensor| tensor.shape.as_slice()) {
            Some([rows, _]) => Some(*rows),
            _ => None,
        };
        let size =
            rows.or(self.uniform("vocab_size")?).or(tokens).ok_or_else(|| missing("vocab_size"))?;
        match tokens {
            Some(tokens) if tokens > size => {
                Err(Error::config(format!("{tokens} tokens for an embedding of {size} rows")))
            }
            _ => Ok(size),
        }
    }

    fn head_dim(&self, hidden_size: usize, query_heads: usize) -> Result<usize> {
        let head_dim = match self.uniform("attention.key_length")? {
            Some(head_dim) => head_dim,
            None => derived_head_dim(hidden_size, query_heads)?,
        };
        match self.uniform("attention.value_length")? {
            Some(value) if value != head_dim => Err(Error::unsupported(
                format!("value heads of {value} elements beside key heads of {head_dim}"),
                "the same for both",
            )),
            _ => Ok(head_dim),
        }
    }

    fn rope(&self, head_dim: usize) -> Result<RopeConfig> {
        let linear = |factor: f64| {
            if factor == 1.0 { RopeScaling::None } else { RopeScaling::Linear { factor } }
        };
        let scaling = match self.0.string("llama.rope.scaling.type")? {
            Some("none") => RopeScaling::None,
            // `scale_linear` is what the factor was called before there were types.
            None | Some("linear") => {
                let factor = match self.float("rope.scaling.factor")? {
                    // 0 is llama.cpp's "not given".
                    None | Some(0.0) => self.float("rope.scale_linear")?,
                    factor => factor,
                };
                factor.map_or(RopeScaling::None, linear)
            }
            Some(other) => {
                return Err(Error::unsupported(
                    format!("rope type {}", quoted(other)),
                    "none, linear",
                ));
            }
        };
        let scaling = match (self.rope_factors()?, scaling) {
            (None, scaling) => scaling,
            (Some(factors), RopeScaling::None) => RopeScaling::Factors(factors),
            (Some(_), _) => {
                return Err(Error::unsupported(
                    "rope_freqs.weight together with a rope factor",
                    "either alone",
                ));
            }
        };
        Ok(RopeConfig {
            theta: self.float("rope.freq_base")?.unwrap_or(DEFAULT_THETA),
            style: RopeStyle::Interleaved,
            scaling,
            rotary_dim: self.uniform("rope.dimension_count")?.unwrap_or(head_dim),
        })
    }

    /// `rope_freqs.weight`: one f32 per rotated pair.
    fn rope_factors(&self) -> Result<Option<Vec<f32>>> {
        let Some(tensor) = self.0.tensor("rope_freqs.weight") else {
            return Ok(None);
        };
        if tensor.kind != TensorType::Weight(WeightFormat::F32) || tensor.shape.len() != 1 {
            return Err(Error::unsupported(
                format!(
                    "tensor rope_freqs.weight of type {} and shape {:?}",
                    tensor.kind.name(),
                    tensor.shape
                ),
                "a vector of F32",
            ));
        }
        let (factors, _) = tensor.bytes.as_chunks::<4>();
        Ok(Some(factors.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
    }

    /// Whether the first layer has any of these biases; the others are then required like weights.
    fn has_bias(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.0.tensor(&format!("blk.0.{name}.bias")).is_some())
    }

    /// Refuses what could change the computation, unknown keys included.
    fn refuse(&self) -> Result<()> {
        if self.0.integer::<u64>("split.count")?.unwrap_or(0) > 1 {
            return Err(Error::unsupported(
                "a GGUF model that is split over several files",
                "all in one file",
            ));
        }
        if let Some(experts @ 1..) = self.uniform("expert_count")? {
            return Err(Error::unsupported(
                format!("a mixture of {experts} experts"),
                "dense models",
            ));
        }
        for (key, value) in self.0.metadata() {
            let Some(short) = key.strip_prefix("llama.") else {
                continue;
            };
            if !KNOWN_KEYS.contains(&short) && !changes_nothing(short, value) {
                return Err(Error::unsupported(
                    format!("key {} in the metadata", quoted(key)),
                    "absent, or the value without effect",
                ));
            }
        }
        Ok(())
    }
}

/// Whether a key that this crate does not implement holds the value at which it has no effect.
fn changes_nothing(key: &str, value: &Value) -> bool {
    match key {
        "attention.causal" => *value == Value::Bool(true),
        "logit_scale" | "embedding_scale" | "residual_scale" | "rope.scaling.attn_factor" => {
            *value == Value::Float(1.0)
        }
        "tensor_data_layout" => *value == Value::String("Meta AI original pth".to_owned()),
        _ => matches!(value, Value::Bool(false) | Value::Integer(0) | Value::Float(0.0)),
    }
}

fn missing(key: &str) -> Error {
    Error::config(format!("llama.{key} is missing"))
}
