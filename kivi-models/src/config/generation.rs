//! What a model suggests for generating: `generation_config.json`.

use crate::{Error, Result};
use serde::Deserialize;

/// A model's own suggestions for sampling, and the tokens that start and end its texts.
///
/// `None` means that the model says nothing. A GGUF file only ever has the tokens.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationDefaults {
    /// Whether to sample; Hugging Face decodes greedily unless this is `Some(true)`.
    pub do_sample: Option<bool>,
    /// Divides the logits; not negative.
    pub temperature: Option<f64>,
    /// How many of the likeliest tokens are kept; 0 is all of them.
    pub top_k: Option<usize>,
    /// Probability mass of the likeliest tokens that are kept, in (0, 1].
    pub top_p: Option<f64>,
    /// Probability, as a fraction of the likeliest token's, below which tokens are dropped, in [0, 1].
    pub min_p: Option<f64>,
    /// Divides positive and multiplies negative logits of tokens already seen; positive.
    pub repetition_penalty: Option<f64>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The token that starts a text.
    pub bos_token_id: Option<u32>,
    /// The token that fills up batches; it never reaches the cache.
    pub pad_token_id: Option<u32>,
}

/// The fields of a `generation_config.json` (and, the token ids, of a `config.json`).
#[derive(Deserialize)]
struct Raw {
    do_sample: Option<bool>,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    eos_token_id: Option<OneOrMany>,
    bos_token_id: Option<OneOrMany>,
    pad_token_id: Option<OneOrMany>,
}

/// A token id or a list of them; −1 stands for none in some files.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a token id or a list of them")]
enum OneOrMany {
    One(i64),
    Many(Vec<i64>),
}

impl OneOrMany {
    fn ids(id: Option<Self>, field: &str) -> Result<Vec<u32>> {
        let ids = match id {
            None | Some(Self::One(-1)) => Vec::new(),
            Some(Self::One(id)) => vec![id],
            Some(Self::Many(ids)) => ids,
        };
        ids.into_iter()
            .map(|id| {
                u32::try_from(id)
                    .map_err(|_| Error::config(format!("{field} is {id}, not a token")))
            })
            .collect()
    }
}

impl GenerationDefaults {
    /// These suggestions, with the tokens of `other` where these have none.
    pub(crate) fn with_tokens_of(mut self, other: Self) -> Self {
        if self.eos_token_ids.is_empty() {
            self.eos_token_ids = other.eos_token_ids;
        }
        self.bos_token_id = self.bos_token_id.or(other.bos_token_id);
        self.pad_token_id = self.pad_token_id.or(other.pad_token_id);
        self
    }

    /// Parses a `generation_config.json`, or the token ids of a `config.json`.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] when it does not parse, [`Error::InvalidConfig`] for values out of
    /// their range.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let raw: Raw = serde_json::from_slice(json).map_err(|error| Error::json(&error))?;
        let defaults = Self {
            do_sample: raw.do_sample,
            temperature: raw.temperature,
            top_k: raw.top_k,
            top_p: raw.top_p,
            min_p: raw.min_p,
            repetition_penalty: raw.repetition_penalty,
            eos_token_ids: OneOrMany::ids(raw.eos_token_id, "eos_token_id")?,
            bos_token_id: OneOrMany::ids(raw.bos_token_id, "bos_token_id")?.first().copied(),
            pad_token_id: OneOrMany::ids(raw.pad_token_id, "pad_token_id")?.first().copied(),
        };
        for (name, value, allowed, accepts) in [
            ("temperature", defaults.temperature, "0 or more", 0.0..=f64::MAX),
            ("top_p", defaults.top_p, "above 0, at most 1", f64::MIN_POSITIVE..=1.0),
            ("min_p", defaults.min_p, "0 to 1", 0.0..=1.0),
            (
                "repetition_penalty",
                defaults.repetition_penalty,
                "above 0",
                f64::MIN_POSITIVE..=f64::MAX,
            ),
        ] {
            if let Some(value) = value.filter(|value| !accepts.contains(value)) {
                return Err(Error::config(format!("{name} is {value} ({allowed})")));
            }
        }
        Ok(defaults)
    }
}
