//! What a model looks like: sizes and switches of a decoder of the Llama family.
//!
//! The same [`ModelConfig`] comes out of a Hugging Face `config.json` and of GGUF metadata, and it
//! is checked in one place, [`ModelConfig::validate`], before anyone sees it.

mod generation;
mod gguf;
mod hugging_face;
mod rope;
#[cfg(test)]
mod tests;

pub use generation::GenerationDefaults;
pub use kivi_core::RopeStyle;

use crate::{Error, Result};

/// The rotary base of a file that gives none.
const DEFAULT_THETA: f64 = 10_000.0;

/// The decoder architectures this crate can run.
///
/// GGUF files call Mistral models `llama`; the two differ only where a sliding window is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Architecture {
    /// Llama (arXiv 2302.13971, 2307.09288, 2407.21783) and models of its shape, SmolLM2 and TinyLlama among them.
    Llama,
    /// Mistral (arXiv 2310.06825) without a sliding window.
    Mistral,
}

impl Architecture {
    /// The name in `model_type` of a `config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
        }
    }
}

impl std::fmt::Display for Architecture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The non-linearity of the gated MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x · sigmoid(x)`.
    Silu,
}

/// How the rotation frequencies are changed to reach a longer context.
///
/// `f_i = theta^(−2i / rotary_dim)` is the unscaled frequency of pair `i`, in radians per token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// `f_i` as it is.
    None,
    /// `f_i / factor`.
    Linear {
        /// At least 1 in practice; any positive number is accepted.
        factor: f64,
    },
    /// The smooth scheme of Llama 3.1: with the wave length `w = 2π / f_i` in tokens, `f_i` where
    /// `w < original_context / high_freq_factor`, `f_i / factor` where
    /// `w > original_context / low_freq_factor`, and in between
    /// `(1 − s) · f_i / factor + s · f_i` with
    /// `s = (original_context / w − low_freq_factor) / (high_freq_factor − low_freq_factor)`.
    Llama3 {
        /// By how much long waves are stretched.
        factor: f64,
        /// Divides `original_context` to give the wave length above which waves are stretched fully.
        low_freq_factor: f64,
        /// Divides `original_context` to give the wave length below which waves stay as they are.
        high_freq_factor: f64,
        /// Context length of the pre-training, in tokens.
        original_context: usize,
    },
    /// `f_i / factors[i]`, one per pair: `rope_freqs.weight` of a GGUF file. Llama 3.1's scheme
    /// arrives in this form there.
    Factors(Vec<f32>),
}

/// Rotary position embedding (arXiv 2104.09864).
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// How the frequencies are scaled.
    pub scaling: RopeScaling,
    /// How many leading elements of a head are rotated; even, at most `head_dim`.
    pub rotary_dim: usize,
}

/// Sizes and switches of a decoder, all of them checked; see [`ModelConfig::validate`].
///
/// Every layer is the same: RMS norm, grouped-query attention with rotary positions, residual add,
/// RMS norm, gated MLP, residual add. `q = query_heads · head_dim` and `kv = kv_heads · head_dim`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The architecture.
    pub architecture: Architecture,
    /// The model's own name for itself, or the name of its file or directory.
    pub name: String,
    /// Rows of the embedding, the number of logits.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of layers.
    pub layers: usize,
    /// Query heads per layer; a multiple of `kv_heads`.
    pub query_heads: usize,
    /// Key and value heads per layer.
    pub kv_heads: usize,
    /// Elements of a head, of queries, keys and values alike; even.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub norm_eps: f64,
    /// Longest sequence the model was made for, in tokens.
    pub context_length: usize,
    /// Rotary position embedding.
    pub rope: RopeConfig,
    /// Whether the logits are computed with the embedding matrix instead of `output.weight`.
    pub tied_embeddings: bool,
    /// Whether the four projections of the attention have biases.
    pub attention_bias: bool,
    /// Whether the three projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Non-linearity of the MLP.
    pub activation: Activation,
    /// How many of the newest tokens a query sees, itself included; `None` is all of them, and the
    /// only value accepted for now.
    pub sliding_window: Option<usize>,
}

/// Largest values accepted, each well above any published model. They keep every product of two
/// sizes that belong together below 2⁵³, and with it what a damaged file can make us allocate.
mod limit {
    pub(super) const VOCABULARY: usize = 1 << 24;
    pub(super) const WIDTH: usize = 1 << 20;
    pub(super) const LAYERS: usize = 1 << 12;
    pub(super) const HEADS: usize = 1 << 12;
    pub(super) const HEAD_DIM: usize = 1 << 10;
    pub(super) const CONTEXT: usize = 1 << 30;
}

impl ModelConfig {
    /// Checks every value against what the architecture allows and this crate implements.
    ///
    /// All constructors call it; call it again after changing a field.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] for values no model can have, [`Error::UnsupportedFeature`] for a
    /// sliding window shorter than the context.
    pub fn validate(&self) -> Result<()> {
        for (name, value, most) in [
            ("vocabulary size", self.vocab_size, limit::VOCABULARY),
            ("hidden size", self.hidden_size, limit::WIDTH),
            ("intermediate size", self.intermediate_size, limit::WIDTH),
            ("number of layers", self.layers, limit::LAYERS),
            ("number of query heads", self.query_heads, limit::HEADS),
            ("number of kv heads", self.kv_heads, limit::HEADS),
            ("head dimension", self.head_dim, limit::HEAD_DIM),
            ("context length", self.context_length, limit::CONTEXT),
        ] {
            if !(1..=most).contains(&value) {
                return Err(Error::config(format!("{name} is {value}, not 1 to {most}")));
            }
        }
        if !self.query_heads.is_multiple_of(self.kv_heads) {
            return Err(Error::config(format!(
                "{} query heads cannot share {} kv heads evenly",
                self.query_heads, self.kv_heads
            )));
        }
        if self.query_size() > limit::WIDTH {
            return Err(Error::config(format!(
                "{} query heads of {} elements are more than {}",
                self.query_heads,
                self.head_dim,
                limit::WIDTH
            )));
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return Err(Error::config(format!(
                "the norm's epsilon is {}, not between 0 and 1",
                self.norm_eps
            )));
        }
        self.rope.validate(self.head_dim)?;
        match self.sliding_window {
            Some(0) => Err(Error::config("the sliding window is 0 tokens")),
            Some(window) => Err(Error::unsupported(
                format!(
                    "a sliding window of {window} tokens in a context of {}",
                    self.context_length
                ),
                "none, or one that holds the context",
            )),
            None => Ok(()),
        }
    }

    /// `query_heads · head_dim`, the width of the queries.
    pub fn query_size(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// `kv_heads · head_dim`, the width of the keys and of the values.
    pub fn kv_size(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl RopeConfig {
    fn validate(&self, head_dim: usize) -> Result<()> {
        if !(2..=head_dim).contains(&self.rotary_dim) || !self.rotary_dim.is_multiple_of(2) {
            return Err(Error::config(format!(
                "{} of {head_dim} elements of a head are rotated, not an even number up to it",
                self.rotary_dim
            )));
        }
        let positive = |name: &str, value: f64| {
            if value.is_finite() && value > 0.0 {
                Ok(())
            } else {
                Err(Error::config(format!("{name} is {value}, not a positive number")))
            }
        };
        positive("rope theta", self.theta)?;
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope factor", *factor),
            &RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => {
                positive("rope factor", factor)?;
                positive("rope low_freq_factor", low_freq_factor)?;
                positive("rope high_freq_factor", high_freq_factor)?;
                if high_freq_factor <= low_freq_factor {
                    return Err(Error::config(format!(
                        "rope high_freq_factor {high_freq_factor} is not above low_freq_factor \
                         {low_freq_factor}"
                    )));
                }
                if !(1..=limit::CONTEXT).contains(&original_context) {
                    return Err(Error::config(format!(
                        "rope original context is {original_context}, not 1 to {}",
                        limit::CONTEXT
                    )));
                }
                Ok(())
            }
            RopeScaling::Factors(factors) => {
                if factors.len() != self.rotary_dim / 2 {
                    return Err(Error::config(format!(
                        "{} rope factors for {} pairs",
                        factors.len(),
                        self.rotary_dim / 2
                    )));
                }
                factors.iter().try_for_each(|&factor| positive("a rope factor", factor.into()))
            }
        }
    }
}

/// The window a model really needs: none if it covers the whole context.
fn effective_window(window: Option<usize>, context_length: usize) -> Option<usize> {
    window.filter(|&window| window < context_length)
}

/// The head dimension of a file that gives none.
fn derived_head_dim(hidden_size: usize, query_heads: usize) -> Result<usize> {
    if query_heads == 0 || !hidden_size.is_multiple_of(query_heads) {
        return Err(Error::config(format!(
            "hidden size {hidden_size} cannot be divided among {query_heads} query heads"
        )));
    }
    Ok(hidden_size / query_heads)
}
