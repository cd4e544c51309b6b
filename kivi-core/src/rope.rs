//! Rotary position embedding.

use crate::{Error, Result, StepPlan};

/// Which channels form the rotated pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RopeStyle {
    /// Channel `i` with `i + rotary_dim/2` (Hugging Face, GPT-NeoX).
    Halves,
    /// Channel `2i` with `2i + 1` (the paper of RoPE; llama weights in GGUF files).
    Interleaved,
}

/// A rotary embedding: pair `i` of a row at position `p` is turned by the angle
/// `p · frequencies[i]`, both in f32, and scaled by `attention_factor`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Which channels form pairs.
    pub style: RopeStyle,
    /// One frequency per pair; `rotary_dim` is twice their number, and channels beyond it pass
    /// unchanged.
    pub frequencies: Vec<f32>,
    /// Factor of sine and cosine (YaRN); 1 for most models.
    pub attention_factor: f32,
}

impl Rope {
    /// Channels that are rotated.
    pub fn rotary_dim(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The two channels of pair `i`.
    pub fn pair(&self, i: usize) -> (usize, usize) {
        match self.style {
            RopeStyle::Halves => (i, i + self.frequencies.len()),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        }
    }

    /// Cosines and sines of every row of a step: `[rows, 2, rotary_dim / 2]`.
    pub fn angles(&self, plan: &StepPlan) -> Vec<f32> {
        let mut out = Vec::with_capacity(plan.rows * self.rotary_dim());
        for position in plan.positions() {
            let angle = |frequency: &f32| position as f32 * frequency;
            let factor = self.attention_factor;
            out.extend(self.frequencies.iter().map(|f| angle(f).cos() * factor));
            out.extend(self.frequencies.iter().map(|f| angle(f).sin() * factor));
        }
        out
    }

    /// Checks that the rotated channels fit in a head.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when there are more of them than `head_dim`.
    pub fn validate(&self, head_dim: usize) -> Result<()> {
        if self.rotary_dim() > head_dim {
            let reason = format!("{} rotated channels of {head_dim}", self.rotary_dim());
            return Err(Error::request("rotate", reason));
        }
        Ok(())
    }
}
