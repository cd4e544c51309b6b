//! `config.json` of a Hugging Face model directory.
//!
//! Field names and default values are those of `LlamaConfig` and `MistralConfig` in transformers;
//! sizes, whose defaults there describe one particular model, must be given.

use super::{
    Activation, Architecture, DEFAULT_THETA, ModelConfig, RopeConfig, RopeScaling, RopeStyle,
    derived_head_dim, effective_window,
};
use crate::error::quoted;
use crate::{Error, Result};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

/// `sliding_window` of `MistralConfig` when a file does not mention it.
const MISTRAL_DEFAULT_WINDOW: usize = 4096;
/// `rms_norm_eps` of both architectures when a file does not mention it.
const DEFAULT_NORM_EPS: f64 = 1e-6;

#[derive(Deserialize)]
struct Raw {
    architectures: Option<Vec<String>>,
    model_type: Option<String>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<usize>,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    max_position_embeddings: Option<usize>,
    original_max_position_embeddings: Option<usize>,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RawRope>,
    rope_parameters: Option<RawRope>,
    #[serde(default, deserialize_with = "present")]
    sliding_window: Option<Option<usize>>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// `rope_scaling`, or `rope_parameters` since transformers 5.
#[derive(Deserialize)]
struct RawRope {
    rope_type: Option<String>,
    /// What `rope_type` was called at first.
    r#type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Tells a field that is null (`Some(None)`) from one that is absent (`None`).
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

impl ModelConfig {
    /// Parses a `config.json`. The name is left empty: the file does not have one.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] when it does not parse, [`Error::UnsupportedArchitecture`] and
    /// [`Error::UnsupportedFeature`] for what this crate does not run, and those of
    /// [`ModelConfig::validate`].
    pub fn from_hf_json(json: &[u8]) -> Result<Self> {
        let raw: Raw = serde_json::from_slice(json).map_err(|error| Error::json(&error))?;
        let architecture = raw.architecture()?;
        refuse(&raw.rest)?;
        let activation = match raw.hidden_act.as_deref() {
            None | Some("silu" | "swish") => Activation::Silu,
            Some(other) => {
                return Err(Error::unsupported(format!("activation {}", quoted(other)), "silu"));
            }
        };

        let hidden_size = required(raw.hidden_size, "hidden_size")?;
        let query_heads = required(raw.num_attention_heads, "num_attention_heads")?;
        let head_dim = match raw.head_dim {
            Some(head_dim) => head_dim,
            None => derived_head_dim(hidden_size, query_heads)?,
        };
        let kv_heads = match (raw.num_key_value_heads, architecture) {
            (Some(kv_heads), _) => kv_heads,
            (None, Architecture::Mistral) => required(None, "num_key_value_heads")?,
            (None, _) => query_heads,
        };
        let context_length = required(raw.max_position_embeddings, "max_position_embeddings")?;
        let window = match (raw.sliding_window, architecture) {
            (Some(window), _) => window,
            (None, Architecture::Mistral) => Some(MISTRAL_DEFAULT_WINDOW),
            (None, _) => None,
        };

        let config = Self {
            architecture,
            name: String::new(),
            vocab_size: required(raw.vocab_size, "vocab_size")?,
            hidden_size,
            intermediate_size: required(raw.intermediate_size, "intermediate_size")?,
            layers: required(raw.num_hidden_layers, "num_hidden_layers")?,
            query_heads,
            kv_heads,
            head_dim,
            norm_eps: raw.rms_norm_eps.unwrap_or(DEFAULT_NORM_EPS),
            context_length,
            rope: raw.rope(head_dim, context_length)?,
            tied_embeddings: raw.tie_word_embeddings.unwrap_or(false),
            attention_bias: raw.attention_bias.unwrap_or(false),
            mlp_bias: raw.mlp_bias.unwrap_or(false),
            activation,
            sliding_window: effective_window(window, context_length),
        };
        config.validate()?;
        Ok(config)
    }
}

impl Raw {
    /// `model_type` decides; `architectures`, where present, must be its causal language model.
    fn architecture(&self) -> Result<Architecture> {
        let unsupported = |name: &str| Error::UnsupportedArchitecture {
            name: quoted(name),
            supported: "LlamaForCausalLM, MistralForCausalLM",
        };
        let class = match self.architectures.as_deref() {
            None | Some([]) => None,
            Some([class]) => Some(class.as_str()),
            Some(several) => return Err(unsupported(&several.join(", "))),
        };
        let architecture = match (self.model_type.as_deref(), class) {
            (Some("llama"), _) | (None, Some("LlamaForCausalLM")) => Architecture::Llama,
            (Some("mistral"), _) | (None, Some("MistralForCausalLM")) => Architecture::Mistral,
            (Some(other), _) | (None, Some(other)) => return Err(unsupported(other)),
            (None, None) => return Err(Error::config("model_type is missing")),
        };
        let expected = match architecture {
            Architecture::Llama => "LlamaForCausalLM",
            Architecture::Mistral => "MistralForCausalLM",
        };
        match class {
            Some(class) if class != expected => Err(unsupported(class)),
            _ => Ok(architecture),
        }
    }

    fn rope(&self, head_dim: usize, context_length: usize) -> Result<RopeConfig> {
        // transformers lets the older field win when a file has both.
        let raw = self.rope_scaling.as_ref().or(self.rope_parameters.as_ref());
        let scaling = match raw {
            Some(raw) => {
                let original_context = self
                    .original_max_position_embeddings
                    .or(raw.original_max_position_embeddings)
                    .unwrap_or(context_length);
                raw.scaling(original_context)?
            }
            None => RopeScaling::None,
        };
        let theta = raw.and_then(|raw| raw.rope_theta).or(self.rope_theta);
        Ok(RopeConfig {
            theta: theta.unwrap_or(DEFAULT_THETA),
            style: RopeStyle::Halves,
            scaling,
            rotary_dim: head_dim,
        })
    }
}

impl RawRope {
    fn scaling(&self, original_context: usize) -> Result<RopeScaling> {
        if let Some((layers, _)) = self.rest.iter().find(|(_, value)| value.is_object()) {
            return Err(Error::unsupported(
                format!("rotary embedding of its own for {}", quoted(layers)),
                "one for all layers",
            ));
        }
        if let Some(factor) = self.rest.get("partial_rotary_factor")
            && !(factor.is_null() || factor.as_f64() == Some(1.0))
        {
            return Err(Error::unsupported(format!("partial_rotary_factor {factor}"), "1"));
        }
        match self.rope_type.as_deref().or(self.r#type.as_deref()) {
            None if self.factor.is_some() => Err(Error::config("rope_type is missing")),
            None | Some("default") => Ok(RopeScaling::None),
            Some("linear") => {
                Ok(RopeScaling::Linear { factor: required(self.factor, "rope factor")? })
            }
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: required(self.factor, "rope factor")?,
                low_freq_factor: required(self.low_freq_factor, "rope low_freq_factor")?,
                high_freq_factor: required(self.high_freq_factor, "rope high_freq_factor")?,
                original_context,
            }),
            Some(other) => Err(Error::unsupported(
                format!("rope type {}", quoted(other)),
                "default, linear, llama3",
            )),
        }
    }
}

fn required<T>(value: Option<T>, name: &str) -> Result<T> {
    value.ok_or_else(|| Error::config(format!("{name} is missing")))
}

/// Refuses fields that change what the model computes, unless they hold the value that changes
/// nothing. All other unknown fields (training, library versions) are of no concern here.
fn refuse(rest: &Map<String, Value>) -> Result<()> {
    /// Fields that must be absent, null, `false`, 0, or `full_attention` for every layer.
    const OFF: [&str; 17] = [
        "quantization_config",
        "compression_config",
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "clip_qkv",
        "qk_norm",
        "use_qk_norm",
        "use_sliding_window",
        "layer_types",
        "no_rope_layers",
        "alibi",
        "use_parallel_residual",
        "rope_interleaved",
        "attention_multiplier",
    ];
    /// Fields that must be absent, null or 1.
    const ONE: [&str; 5] = [
        "partial_rotary_factor",
        "logit_scale",
        "logits_scaling",
        "embedding_multiplier",
        "residual_multiplier",
    ];
    let off = |value: &Value| match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(0.0),
        Value::Array(layers) => layers.iter().all(|layer| layer == "full_attention"),
        _ => false,
    };
    let one = |value: &Value| value.is_null() || value.as_f64() == Some(1.0);
    let changed = |names: &[&'static str], accepts: &dyn Fn(&Value) -> bool| {
        names.iter().copied().find(|&name| rest.get(name).is_some_and(|value| !accepts(value)))
    };
    let unsupported = |name: &str, supported| {
        Err(Error::unsupported(format!("{name} in config.json"), supported))
    };
    if let Some(name) = changed(&OFF, &off) {
        return unsupported(name, "absent, null, false, 0 or full_attention");
    }
    match changed(&ONE, &one) {
        Some(name) => unsupported(name, "absent, null or 1"),
        None => Ok(()),
    }
}
