//! What is asked of an engine.

use kivi_models::sampling::SamplerConfig;
use std::time::Duration;

/// A prompt to continue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Request {
    /// The prompt; not empty.
    pub prompt: Vec<u32>,
    /// At most so many tokens in each answer; at least 1.
    pub max_tokens: usize,
    /// Answers to the same prompt, which is computed once; 1 to 1,024. Sample `i` draws from the seed
    /// plus `i`.
    pub samples: usize,
    /// How tokens are chosen; greedy by default.
    pub sampling: SamplerConfig,
    /// Tokens that end an answer and are not part of it.
    pub stop_tokens: Vec<u32>,
    /// Texts that end an answer and are not part of it. They need an engine with a tokenizer.
    pub stop_strings: Vec<String>,
    /// Tokens that are never chosen.
    pub forbidden: Vec<u32>,
    /// How long after it was submitted the request may take, waiting included.
    pub deadline: Option<Duration>,
}

impl Request {
    /// One greedy answer of at most `max_tokens` tokens.
    pub fn new(prompt: Vec<u32>, max_tokens: usize) -> Self {
        Self {
            prompt,
            max_tokens,
            samples: 1,
            sampling: SamplerConfig::default(),
            stop_tokens: Vec::new(),
            stop_strings: Vec::new(),
            forbidden: Vec::new(),
            deadline: None,
        }
    }
}
