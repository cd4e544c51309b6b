//! The same requests computed alone: what every row's answers are compared with, and what a batch of
//! one would do.

use super::{serve::Measured, workload::Planned};
use crate::cli::cache::Cache;
use anyhow::{Result, bail};
use kivi::{
    DecoderBackend,
    models::{
        Llama,
        sampling::{Sampler, SamplerConfig},
    },
};
use std::time::Instant;

/// Requests that are computed alone for each cache.
const CHECKED: usize = 3;

/// Answers of a plain session with one sequence.
pub(super) struct Alone {
    /// By the request's index.
    answers: Vec<(usize, Vec<u32>)>,
    /// Generated tokens per second, if any answer has more than the token that its prompt brings.
    pub(super) rate: Option<f64>,
}

impl Alone {
    /// Computes some of the requests: the first, the last, and one between.
    pub(super) fn compute<B: DecoderBackend>(
        llama: &Llama<B>,
        cache: &Cache,
        requests: &[Planned],
        forbidden: &[u32],
    ) -> Result<Self> {
        let (mut answers, mut tokens, mut seconds) = (Vec::new(), 0, 0.0);
        for index in chosen(requests.len()) {
            let Planned { prompt, output, .. } = &requests[index];
            let mut session = cache.session(llama, 1, requests[index].tokens())?;
            let sequence = session.create_sequence()?;
            let mut logits = session.prompt(sequence, prompt)?;
            let mut sampler = Sampler::new(SamplerConfig::default())?;
            let (mut history, start) = (prompt.clone(), Instant::now());
            loop {
                for &token in forbidden {
                    if let Some(logit) = logits.get_mut(token as usize) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
                let token = sampler.sample(&mut logits, &history)?;
                history.push(token);
                if history.len() == prompt.len() + output {
                    break;
                }
                logits = session.generate_step(&[(sequence, &[token])])?;
            }
            seconds += start.elapsed().as_secs_f64();
            tokens += output - 1;
            answers.push((index, history.split_off(prompt.len())));
        }
        Ok(Self { answers, rate: (tokens > 0).then(|| tokens as f64 / seconds) })
    }

    /// How many answers are compared.
    pub(super) fn count(&self) -> usize {
        self.answers.len()
    }

    /// Fails with the first token that differs.
    pub(super) fn check(&self, name: &str, measured: &Measured) -> Result<()> {
        for (index, expected) in &self.answers {
            let found = &measured.answers[*index];
            if let Some(at) = difference(expected, found) {
                let token = |tokens: &[u32]| tokens.get(at).map_or("none".into(), u32::to_string);
                bail!(
                    "wrong answer for {name}: token {} of {} of request {index} is {}, and {} when \
                     the request is computed alone",
                    at + 1,
                    expected.len(),
                    token(found),
                    token(expected),
                );
            }
        }
        Ok(())
    }
}

/// Where two texts begin to differ.
fn difference(a: &[u32], b: &[u32]) -> Option<usize> {
    let at = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (at < a.len().max(b.len())).then_some(at)
}

/// Indices of up to [`CHECKED`] of `count` requests, evenly spread.
fn chosen(count: usize) -> Vec<usize> {
    let last = count.saturating_sub(1);
    let mut chosen: Vec<_> = (0..CHECKED).map(|i| i * last / (CHECKED - 1)).collect();
    chosen.dedup();
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_found_wherever_it_is() {
        assert_eq!(difference(&[1, 2, 3], &[1, 2, 3]), None);
        assert_eq!(difference(&[1, 2, 3], &[1, 5, 3]), Some(1));
        assert_eq!(difference(&[1, 2, 3], &[1, 2]), Some(2));
        assert_eq!(difference(&[], &[7]), Some(0));
    }

    #[test]
    fn the_chosen_requests_are_the_first_the_last_and_one_between() {
        assert_eq!(chosen(1), [0]);
        assert_eq!(chosen(2), [0, 1]);
        assert_eq!(chosen(64), [0, 31, 63]);
    }
}
