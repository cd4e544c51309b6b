//! Beam search.

use crate::{Result, session::Session};
use kivi_core::{DecoderBackend, Error, SequenceId};
use std::cmp::Ordering;

/// Options of a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct BeamOptions {
    /// Beams, and answers.
    pub beams: usize,
    /// At most so many tokens in an answer.
    pub max_tokens: usize,
    /// Tokens that end an answer.
    pub stop_tokens: Vec<u32>,
    /// The exponent of the length that a score is divided by: 1 is the mean log-probability, 0 the sum.
    pub length_penalty: f32,
}

/// An answer of a beam search.
#[derive(Clone, Debug, PartialEq)]
pub struct Beam {
    /// The tokens, without the one that ended it.
    pub tokens: Vec<u32>,
    /// The sum of the log-probabilities, that of the stop token included, over the number of these
    /// tokens to the power of the length penalty.
    pub score: f32,
}

/// A beam that goes on.
#[derive(Clone, Debug)]
struct Running {
    tokens: Vec<u32>,
    /// Sum of the log-probabilities.
    total: f32,
}

/// One token more for a beam.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    parent: usize,
    token: u32,
    total: f32,
}

impl Candidate {
    /// Most likely first, ties to the earlier beam and the lower token.
    fn rank(&self, other: &Self) -> Ordering {
        let order = other.total.total_cmp(&self.total);
        order.then(self.parent.cmp(&other.parent)).then(self.token.cmp(&other.token))
    }
}

impl<B: DecoderBackend> Session<B> {
    /// Makes `sequences[i]` continue what `sequences[parents[i]]` holds; those that no parent names are
    /// removed. Copy-on-write: a sequence moves to its first child and is forked for the others, so no
    /// more slots are needed than there are sequences.
    ///
    /// # Errors
    /// When the lengths differ, a parent does not exist or a sequence is unknown; nothing is changed
    /// then. When the backend fails, the sequences must be removed.
    pub fn reorder(&mut self, sequences: &mut [SequenceId], parents: &[usize]) -> Result<()> {
        let count = sequences.len();
        kivi_core::expect_len("reorder", "parents", parents.len(), count)?;
        if let Some(parent) = parents.iter().find(|&&parent| parent >= count) {
            return Err(Error::request("reorder", format!("parent {parent} of {count}")).into());
        }
        for &sequence in &*sequences {
            self.state().tokens(sequence)?;
        }
        let old = sequences.to_vec();
        let named = |index: &usize| parents.contains(index);
        for index in (0..count).filter(|index| !named(index)) {
            self.state_mut().remove(old[index])?;
        }
        for (index, &parent) in parents.iter().enumerate() {
            let first = parents[..index].iter().all(|&earlier| earlier != parent);
            sequences[index] = if first { old[parent] } else { self.fork(old[parent])? };
        }
        Ok(())
    }

    /// The most likely answers to a prompt, best first, as many as there are beams. The session needs a
    /// slot for each, and is left without them.
    ///
    /// As Hugging Face transformers searches with `early_stopping = False`: of the best `2 · beams` (or
    /// `(1 + stop tokens) · beams`) candidates of a step those that end are answers if they are among
    /// the best `beams`, and the others go on, until no beam can beat the worst answer at its present
    /// length.
    ///
    /// # Errors
    /// When there is no beam or token to generate, the prompt is empty, the pool is full or the backend
    /// fails.
    pub fn beam_search(&mut self, prompt: &[u32], options: &BeamOptions) -> Result<Vec<Beam>> {
        if options.beams == 0 || options.max_tokens == 0 {
            let reason = format!("{} beams of {} tokens", options.beams, options.max_tokens);
            return Err(Error::request("beam search", reason).into());
        }
        let mut sequences = vec![self.create_sequence()?];
        let found = self.search(&mut sequences, prompt, options);
        for sequence in sequences {
            // Where a reorder failed, some are gone already.
            let _ = self.state_mut().remove(sequence);
        }
        found
    }

    fn search(
        &mut self,
        sequences: &mut Vec<SequenceId>,
        prompt: &[u32],
        options: &BeamOptions,
    ) -> Result<Vec<Beam>> {
        let beams = options.beams;
        let mut logits = self.prompt(sequences[0], prompt)?;
        let mut running = vec![Running { tokens: Vec::new(), total: 0.0 }];
        let mut answers: Vec<Beam> = Vec::new();
        for length in 1..=options.max_tokens {
            let kept = beams * (1 + options.stop_tokens.len()).max(2);
            let candidates = candidates(&running, &mut logits, kept);
            let is_last = length == options.max_tokens;
            let ends = |c: &Candidate| is_last || options.stop_tokens.contains(&c.token);
            let score = |total: f32| total / (length as f32).powf(options.length_penalty);
            for c in candidates.iter().take(beams).filter(|c| ends(c)) {
                let mut tokens = running[c.parent].tokens.clone();
                if !options.stop_tokens.contains(&c.token) {
                    tokens.push(c.token);
                }
                answers.push(Beam { tokens, score: score(c.total) });
            }
            // A stable sort: of equals the earlier stays.
            answers.sort_by(|a, b| b.score.total_cmp(&a.score));
            answers.truncate(beams);
            let going: Vec<_> = candidates.iter().filter(|c| !ends(c)).take(beams).collect();
            let worst = answers.last().filter(|_| answers.len() == beams);
            let hopeless =
                |c: &&Candidate| worst.is_some_and(|worst| score(c.total) <= worst.score);
            if going.first().is_none_or(hopeless) {
                break;
            }
            let parents: Vec<_> = going.iter().map(|c| c.parent).collect();
            // The first step has one sequence for all beams.
            while sequences.len() < going.len() {
                sequences.push(self.fork(sequences[0])?);
            }
            self.reorder(sequences, &parents)?;
            let next = |c: &&Candidate| {
                let mut tokens = running[c.parent].tokens.clone();
                tokens.push(c.token);
                Running { tokens, total: c.total }
            };
            running = going.iter().map(next).collect();
            let newest: Vec<_> = going.iter().map(|c| [c.token]).collect();
            let steps = sequences.iter().zip(&newest).map(|(&id, token)| (id, &token[..]));
            logits = self.generate_step(&steps.collect::<Vec<_>>())?;
        }
        Ok(answers)
    }
}

/// The best tokens over all beams, `logits` being `[beams, vocab_size]`.
fn candidates(running: &[Running], logits: &mut [f32], kept: usize) -> Vec<Candidate> {
    let vocabulary = logits.len() / running.len();
    let mut all = Vec::with_capacity(logits.len());
    for (parent, row) in logits.chunks_exact_mut(vocabulary).enumerate() {
        let largest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = row.iter().map(|&x| (x - largest).exp()).sum();
        let log_sum = largest + sum.ln();
        let beam = running[parent].total;
        let of = |(token, &x): (usize, &f32)| Candidate {
            parent,
            token: token as u32,
            total: beam + (x - log_sum),
        };
        all.extend(row.iter().enumerate().map(of));
    }
    let kept = kept.min(all.len());
    if kept < all.len() {
        all.select_nth_unstable_by(kept, Candidate::rank);
        all.truncate(kept);
    }
    all.sort_unstable_by(Candidate::rank);
    all
}
