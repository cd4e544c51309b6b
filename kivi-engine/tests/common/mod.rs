//! A tiny model, and answers computed without an engine.
#![allow(dead_code)] // every test file uses a part

use kivi_core::{CacheConfig, CacheConfigBuilder, DecoderBackend, LayerSpec};
use kivi_cpu::Cpu;
use kivi_engine::{Completion, FinishReason, Request};
use kivi_models::{Checkpoint, Llama, Session, sampling::Sampler, sampling::SamplerConfig};
use rand_chacha::{ChaCha8Rng, rand_core::RngCore};
use std::path::Path;

/// The context of the tiny model.
pub(crate) const CONTEXT: usize = 512;
pub(crate) const VOCABULARY: u32 = 264;

/// A random Llama 3 of two layers (`tools/golden_models.py`).
pub(crate) fn model(threads: usize) -> Llama<Cpu> {
    model_on(Cpu::new(threads).unwrap(), "llama3-tiny")
}

/// Another of the tiny models, or on another backend.
pub(crate) fn model_on<B: DecoderBackend>(backend: B, name: &str) -> Llama<B> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let path = root.join("../kivi-models/tests/golden/models").join(name);
    Llama::load(backend, &Checkpoint::open(path).unwrap()).unwrap()
}

/// `kivi2`, `G = 16`, `R = 32`, segments of 64.
pub(crate) fn small() -> CacheConfigBuilder {
    let builder = CacheConfig::builder().group_size(16).residual_length(32);
    builder.segment_tokens(Some(64))
}

pub(crate) fn layers(model: &Llama<Cpu>, config: &CacheConfig) -> Vec<LayerSpec> {
    model.cache_layers(config)
}

/// The answers to a request, one after the other, each with a pool of its own.
pub(crate) fn alone(
    model: &Llama<Cpu>,
    config: &CacheConfig,
    request: &Request,
) -> Vec<Completion> {
    (0..request.samples).map(|sample| answer(model, config, request, sample)).collect()
}

fn answer(
    model: &Llama<Cpu>,
    config: &CacheConfig,
    request: &Request,
    sample: usize,
) -> Completion {
    let mut session = Session::new(model, config.clone(), 1, CONTEXT).unwrap();
    let sequence = session.create_sequence().unwrap();
    let mut logits = session.prompt(sequence, &request.prompt).unwrap();
    let seed = request.sampling.seed + sample as u64;
    let mut sampler = Sampler::new(SamplerConfig { seed, ..request.sampling.clone() }).unwrap();
    let (mut history, mut tokens) = (request.prompt.clone(), Vec::new());
    let reason = loop {
        for &token in &request.forbidden {
            logits[token as usize] = f32::NEG_INFINITY;
        }
        let token = sampler.sample(&mut logits, &history).unwrap();
        if request.stop_tokens.contains(&token) {
            break FinishReason::StopToken;
        }
        tokens.push(token);
        history.push(token);
        if tokens.len() == request.max_tokens {
            break FinishReason::Length;
        }
        if history.len() == CONTEXT {
            break FinishReason::Context;
        }
        logits = session.generate_step(&[(sequence, &[token])]).unwrap();
    };
    Completion { tokens, text: String::new(), reason }
}

/// Random numbers of a seed.
pub(crate) struct Random(pub(crate) ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        use rand_chacha::rand_core::SeedableRng;
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self(ChaCha8Rng::from_seed(key))
    }

    /// Below `n`.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.0.next_u64() % n as u64) as usize
    }

    pub(crate) fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(VOCABULARY as usize) as u32).collect()
    }
}
