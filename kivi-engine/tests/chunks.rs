//! The bytes of a cache and the tokens that follow do not depend on how a prompt was cut, nor on batch
//! mates.

mod common;

use common::{CONTEXT, Random, layers, model};
use kivi_core::{CacheConfig, Format, Snapshot, ValueResidual};
use kivi_cpu::Cpu;
use kivi_models::{Llama, Session, sampling::Sampler, sampling::SamplerConfig};

const G: usize = 32;
const R: usize = 64;

/// A sequence beside the one that matters, and how far its prompt goes in a step.
struct Mate {
    prompt: Vec<u32>,
    chunk: usize,
}

/// Computes a prompt in chunks beside mates, then 40 greedy tokens; returns what the
/// cache holds after the prompt and at the end, with the tokens.
fn run(
    model: &Llama<Cpu>,
    config: &CacheConfig,
    prompt: &[u32],
    chunk: usize,
    mates: &[Mate],
) -> [Snapshot; 2] {
    let mut session = Session::new(model, config.clone(), 1 + mates.len(), CONTEXT).unwrap();
    let mut begin = |prompt: &[u32]| {
        let id = session.create_sequence().unwrap();
        session.state_mut().begin_prompt(id, prompt.len()).unwrap();
        id
    };
    let others: Vec<_> = mates.iter().map(|mate| begin(&mate.prompt)).collect();
    let id = begin(prompt);
    let mut parts: Vec<_> = mates.iter().map(|mate| mate.prompt.chunks(mate.chunk)).collect();
    // Mates that have ended their prompt go on with single tokens.
    let mut batch = |session: &mut Session<Cpu>, own: &[u32]| {
        let mut steps = Vec::new();
        for (mate, (&id, parts)) in mates.iter().zip(others.iter().zip(&mut parts)) {
            steps.push((id, parts.next().unwrap_or(&mate.prompt[..1])));
        }
        steps.push((id, own));
        let logits = session.generate_step(&steps).unwrap();
        logits[logits.len() - model.config().vocab_size..].to_vec()
    };
    let mut logits = Vec::new();
    for part in prompt.chunks(chunk) {
        logits = batch(&mut session, part);
    }
    let after_prompt = session.snapshot(id, prompt).unwrap();
    let mut sampler = Sampler::new(SamplerConfig::default()).unwrap();
    let mut tokens = prompt.to_vec();
    for _ in 0..40 {
        let token = sampler.sample(&mut logits, &[]).unwrap();
        tokens.push(token);
        logits = batch(&mut session, &[token]);
    }
    [after_prompt, session.snapshot(id, &tokens).unwrap()]
}

#[test]
fn chunks_and_batch_mates_change_nothing() {
    let model = model(2);
    let mut random = Random::new(11);
    let promoted = Format::KIVI2.promote(0.25).unwrap();
    for (key, value, sinks, residual, segment) in [
        (Format::KIVI2, Format::KIVI2, 0, ValueResidual::Window, Some(2 * R)),
        (Format::KIVI4, Format::KIVI2, 0, ValueResidual::Block, Some(R)),
        (promoted, Format::KIVI2, 20, ValueResidual::Window, None),
        (Format::F16, Format::F16, 0, ValueResidual::Window, Some(2 * R)),
    ] {
        let builder = CacheConfig::builder().key(key).value(value).group_size(G);
        let builder = builder.residual_length(R).sink_length(sinks).segment_tokens(segment);
        let config = builder.value_residual(residual).build().unwrap();
        assert_eq!(layers(&model, &config).len(), 2);
        let prompt = random.tokens(3 * R + 17);
        let expected = run(&model, &config, &prompt, prompt.len(), &[]);
        for chunk in [1, 2, G - 1, G, R - 1, R, R + 1, prompt.len()] {
            let alone = run(&model, &config, &prompt, chunk, &[]);
            assert!(alone == expected, "{key}, {value}: chunks of {chunk}");
            let mates = [(1, 1), (40, 7), (R + 1, R), (150, 150)];
            let mates = mates.map(|(length, chunk)| Mate { prompt: random.tokens(length), chunk });
            let beside = run(&model, &config, &prompt, chunk, &mates);
            assert!(beside == expected, "{key}, {value}: chunks of {chunk} beside others");
        }
    }
}
