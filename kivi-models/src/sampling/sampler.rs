//! The sampler itself.

use super::SamplerConfig;
use crate::{Error, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::cmp::Ordering;

/// Draws tokens for one sequence; keeps the random state and its work buffers between calls.
///
/// The random numbers are those of ChaCha with 8 rounds, keyed with the seed as a little-endian
/// integer: a published cipher, so a seed means the same tokens in every version and on every
/// machine.
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    rng: ChaCha8Rng,
    /// Tokens still in the race, most likely first once sorted; reused from call to call.
    candidates: Vec<Candidate>,
    /// Sorted distinct tokens of the repetition window; reused from call to call.
    recent: Vec<u32>,
}

/// A token with its logit after the penalty, or later with its unnormalised probability.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    weight: f32,
}

impl Candidate {
    /// Most likely first, ties to the lower id. A total order: weights are never NaN.
    fn rank(&self, other: &Self) -> Ordering {
        other.weight.total_cmp(&self.weight).then(self.id.cmp(&other.id))
    }
}

impl Sampler {
    /// A sampler at the start of its random stream.
    ///
    /// # Errors
    /// Those of [`SamplerConfig::validate`].
    pub fn new(config: SamplerConfig) -> Result<Self> {
        config.validate()?;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&config.seed.to_le_bytes());
        let rng = ChaCha8Rng::from_seed(key);
        Ok(Self { config, rng, candidates: Vec::new(), recent: Vec::new() })
    }

    /// The options it was made with.
    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    /// The next token.
    ///
    /// `logits` holds one value per token of the vocabulary; `-inf` masks a token. The repetition
    /// penalty is applied to it in place, nothing else is changed. `history` are the tokens so far,
    /// oldest first, prompt included.
    ///
    /// # Errors
    /// [`Error::InvalidLogits`] when `logits` is empty, holds NaN or `+inf`, or masks every token;
    /// no random number is used then.
    pub fn sample(&mut self, logits: &mut [f32], history: &[u32]) -> Result<u32> {
        check(logits)?;
        self.penalise(logits, history);
        if self.config.temperature == 0.0 {
            return Ok(argmax(logits));
        }
        self.collect(logits);
        self.keep_top_k();
        self.weigh();
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw())
    }

    /// Step 1: the repetition penalty, once per distinct token.
    fn penalise(&mut self, logits: &mut [f32], history: &[u32]) {
        let penalty = self.config.repetition_penalty;
        if penalty == 1.0 {
            return;
        }
        let start = history.len().saturating_sub(self.config.repetition_window);
        self.recent.clear();
        self.recent.extend_from_slice(&history[start..]);
        self.recent.sort_unstable();
        self.recent.dedup();
        for &id in &self.recent {
            if let Some(logit) = logits.get_mut(id as usize) {
                let scaled = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                // A finite logit stays finite: an overflow must not look like a masked token.
                *logit = if logit.is_finite() { scaled.clamp(f32::MIN, f32::MAX) } else { *logit };
            }
        }
    }

    /// Every token that is not masked. Adding 0 turns −0 into 0, so that the two are a tie.
    fn collect(&mut self, logits: &[f32]) {
        let allowed = (0..).zip(logits).filter(|(_, logit)| logit.is_finite());
        self.candidates.clear();
        self.candidates.extend(allowed.map(|(id, &logit)| Candidate { id, weight: logit + 0.0 }));
    }

    /// Step 3. It commutes with the temperature, which does not change the order.
    fn keep_top_k(&mut self) {
        let k = self.config.top_k;
        if k > 0 && k < self.candidates.len() {
            self.sort_head(k);
            self.candidates.truncate(k);
        }
    }

    /// Step 2: logits to `exp((logit − max) / temperature)`; the largest becomes exactly 1.
    fn weigh(&mut self) {
        let max = self.candidates.iter().map(|c| c.weight).fold(f32::MIN, f32::max);
        let temperature = f64::from(self.config.temperature);
        for candidate in &mut self.candidates {
            let scaled = (f64::from(candidate.weight) - f64::from(max)) / temperature;
            candidate.weight = scaled.exp() as f32;
        }
    }

    /// Step 4. The nucleus is nearly always small, so a growing head is sorted, not everything.
    fn keep_top_p(&mut self) {
        if self.config.top_p >= 1.0 {
            return;
        }
        let target = f64::from(self.config.top_p) * self.total();
        let mut head = 256;
        loop {
            self.sort_head(head);
            let mut sum = 0.0;
            let reached = self.candidates.iter().take(head).position(|c| {
                sum += f64::from(c.weight);
                sum >= target
            });
            if let Some(last) = reached {
                return self.candidates.truncate(last + 1);
            }
            if head >= self.candidates.len() {
                return;
            }
            head *= 8;
        }
    }

    /// Step 5; the most likely token weighs exactly 1.
    fn keep_min_p(&mut self) {
        let min_p = self.config.min_p;
        if min_p > 0.0 {
            self.candidates.retain(|c| c.weight >= min_p);
        }
    }

    /// Moves the `n` most likely candidates to the front, in order.
    fn sort_head(&mut self, n: usize) {
        if n < self.candidates.len() {
            self.candidates.select_nth_unstable_by(n - 1, Candidate::rank);
        }
        let n = n.min(self.candidates.len());
        self.candidates[..n].sort_unstable_by(Candidate::rank);
    }

    /// Step 6: inverts the cumulative distribution at one uniform number of 53 bits.
    fn draw(&mut self) -> u32 {
        let uniform = (self.rng.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut left = uniform * self.total();
        let mut chosen = 0;
        for candidate in &self.candidates {
            if candidate.weight > 0.0 {
                chosen = candidate.id;
                left -= f64::from(candidate.weight);
                if left < 0.0 {
                    break;
                }
            }
        }
        chosen
    }

    fn total(&self) -> f64 {
        self.candidates.iter().map(|c| f64::from(c.weight)).sum()
    }
}

fn check(logits: &[f32]) -> Result<()> {
    let fail = |reason| Err(Error::InvalidLogits { reason });
    if u32::try_from(logits.len()).is_err() {
        return fail(format!("{} logits, token ids have 32 bits", logits.len()));
    }
    // In chunks without a branch, which the compiler turns into vectors.
    let bad = |l: &f32| l.is_nan() || *l == f32::INFINITY;
    if logits.chunks(CHUNK).any(|chunk| chunk.iter().fold(false, |any, l| any | bad(l)))
        && let Some(id) = logits.iter().position(bad)
    {
        return fail(format!("the logit of token {id} is {}", logits[id]));
    }
    if !logits.iter().any(|l| l.is_finite()) {
        return fail(format!("none of {} tokens is allowed", logits.len()));
    }
    Ok(())
}

/// Logits that are looked through at once, and maxima that are kept apart.
const CHUNK: usize = 64;
const LANES: usize = 16;

/// The lowest id among the largest logits; 0 for none.
fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    let mut max = f32::NEG_INFINITY;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        let mut largest = [f32::NEG_INFINITY; LANES];
        for chunk in chunk.chunks(LANES) {
            for (largest, &logit) in largest.iter_mut().zip(chunk) {
                *largest = if logit > *largest { logit } else { *largest };
            }
        }
        let largest = largest.into_iter().fold(f32::NEG_INFINITY, f32::max);
        if largest > max {
            (best, max) = (index * CHUNK, largest);
        }
    }
    let within = logits.iter().skip(best).position(|&logit| logit == max).unwrap_or(0);
    (best + within) as u32
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
