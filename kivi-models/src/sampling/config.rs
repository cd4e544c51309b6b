//! Options of the sampler.

use crate::{Error, Result};

/// Options of a [`Sampler`](super::Sampler); the default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerConfig {
    /// Divides the logits; 0 takes the most likely token and never draws a random number.
    pub temperature: f32,
    /// Keep only the `top_k` most likely tokens; 0 is off.
    pub top_k: usize,
    /// Keep the smallest set of most likely tokens whose probabilities reach `top_p`; 1 is off.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the most likely one; 0 is off.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in the window; 1 is off.
    pub repetition_penalty: f32,
    /// How many of the newest tokens of the history the penalty looks at.
    pub repetition_window: usize,
    /// Seed of the random numbers.
    pub seed: u64,
}

impl Default for SamplerConfig {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            repetition_window: 64,
            seed: 0,
        }
    }
}

impl SamplerConfig {
    /// Checks every option.
    ///
    /// # Errors
    /// [`Error::InvalidSampling`] for the first value outside its range; NaN is outside every range.
    pub fn validate(&self) -> Result<()> {
        let checks = [
            ("temperature", self.temperature, (0.0..=1e4).contains(&self.temperature), "0 … 10000"),
            (
                "top_p",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
                "above 0, at most 1 (1 is off)",
            ),
            ("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "0 … 1 (0 is off)"),
            (
                "repetition_penalty",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty <= 1e4,
                "above 0, at most 10000 (1 is off)",
            ),
        ];
        for (name, value, valid, allowed) in checks {
            if !valid {
                return Err(Error::InvalidSampling {
                    reason: format!("{name} is {value}, allowed: {allowed}"),
                });
            }
        }
        Ok(())
    }
}
