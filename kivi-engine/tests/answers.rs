//! Every answer equals the one computed alone, and the pool's accounting balances after each step.

mod common;

use common::{CONTEXT, Random, alone, layers, model, small};
use kivi_core::{CacheConfig, Format, ValueResidual};
use kivi_cpu::Cpu;
use kivi_engine::{
    Admission, Completion, Engine, Error, Events, FinishReason, Lookup, Preemption, Request,
};
use kivi_models::{Llama, sampling::SamplerConfig};
use std::{collections::HashMap, time::Duration};

/// A request, what it must answer, when it comes and when its reader goes.
struct Case {
    request: Request,
    expected: Vec<Completion>,
    arrival: usize,
    cancelled: Option<usize>,
}

/// Requests of random lengths, arrivals, cancellations and stop conditions; many begin alike.
fn cases(model: &Llama<Cpu>, config: &CacheConfig, seed: u64, count: usize) -> Vec<Case> {
    let mut random = Random::new(seed);
    let openings: Vec<_> = [70, 130, 200].map(|n| random.tokens(n)).into();
    let mut arrival = 0;
    let mut known: HashMap<String, Vec<Completion>> = HashMap::new();
    let mut case = || {
        let mut prompt = match random.below(5) {
            opening @ 0..3 => openings[opening].clone(),
            _ => Vec::new(),
        };
        let longest = if random.below(8) == 0 { 200 } else { 60 };
        let own = 1 + random.below(longest);
        prompt.extend(random.tokens(own));
        let mut request = Request::new(prompt, 1 + random.below(50));
        match random.below(6) {
            0 => request.stop_tokens = random.tokens(20),
            1 => request.forbidden = random.tokens(100),
            2 => {
                let seed = random.below(3) as u64;
                let config =
                    SamplerConfig { temperature: 1.5, top_k: 40, seed, ..SamplerConfig::default() };
                (request.sampling, request.samples) = (config, 1 + random.below(3));
            }
            _ => {}
        }
        arrival += [0, 0, 0, 1, 2, 9][random.below(6)];
        let cancelled = (random.below(10) == 0).then(|| arrival + random.below(20));
        let key = format!("{request:?}");
        let expected = known.entry(key).or_insert_with(|| alone(model, config, &request)).clone();
        Case { request, expected, arrival, cancelled }
    };
    (0..count).map(|_| case()).collect()
}

/// Runs the cases and compares; returns the engine, idle.
fn serve(mut engine: Engine<Cpu>, cases: &[Case]) -> Engine<Cpu> {
    let mut next = 0;
    let mut open: Vec<(usize, Events)> = Vec::new();
    for now in 0.. {
        while next < cases.len() && cases[next].arrival <= now {
            open.push((next, engine.submit(cases[next].request.clone()).unwrap()));
            next += 1;
        }
        open.retain(|&(case, _)| cases[case].cancelled != Some(now));
        engine.step().unwrap();
        engine.audit().unwrap();
        if engine.is_idle() && next == cases.len() {
            break;
        }
        assert!(now < 100_000, "no end: {:?}", engine.stats());
    }
    for (case, events) in open {
        let found = events.collect_now().unwrap();
        assert_eq!(found, cases[case].expected, "request {case}: {:?}", cases[case].request);
    }
    engine
}

/// Bytes of a sequence of some length, to size pools by.
fn bytes(model: &Llama<Cpu>, config: &CacheConfig, tokens: usize) -> usize {
    let layers = layers(model, config);
    let spec = kivi_core::PoolSpec::for_context(config.clone(), layers, 1, CONTEXT).unwrap();
    kivi_core::memory::predict(&spec, &kivi_core::KiviPolicy::new(config), tokens).allocated()
}

fn engine(model: &Llama<Cpu>, config: &CacheConfig) -> kivi_engine::EngineBuilder<Cpu> {
    // The longest request needs 450 tokens; about three of the usual ones fit.
    let memory = bytes(model, config, 512) + bytes(model, config, 100);
    Engine::builder(model)
        .cache(config.clone(), layers(model, config))
        .kv_memory(memory)
        .step_tokens(48)
}

#[test]
fn five_hundred_requests_over_a_small_pool() {
    let model = model(2);
    let config = small().build().unwrap();
    let cases = cases(&model, &config, 1, 500);
    let engine = serve(engine(&model, &config).build().unwrap(), &cases);
    let stats = engine.stats();
    println!("{stats:?}");
    assert!(
        stats.swapped_out > 20 && stats.reused_tokens > 1000 && stats.evicted > 20,
        "{stats:?}"
    );
    assert!(stats.peak_bytes <= bytes(&model, &config, 512) + bytes(&model, &config, 100));
    assert!(stats.abandoned > 10);
}

#[test]
fn every_way_to_run_an_engine() {
    let model = model(2);
    let lookup = Lookup { draft_tokens: 6, max_match: 3, min_match: 1 };
    let plain = small().build().unwrap();
    let block = small().value_residual(ValueResidual::Block).build().unwrap();
    let sinks =
        small().sink_length(20).residual_length(64).segment_tokens(Some(64)).build().unwrap();
    let rollback = small().rollback_length(6).build().unwrap();
    let f16 = small().key(Format::F16).value(Format::F16).rollback_length(6).build().unwrap();
    let promoted = Format::KIVI2.promote(0.25).unwrap();
    let promoted = small().key(promoted).rollback_length(20).build().unwrap();
    let start = |config: &CacheConfig| engine(&model, config);
    let engines = [
        (&plain, start(&plain).preemption(Preemption::Recompute)),
        (&plain, start(&plain).swap_memory(20_000).step_tokens(1)),
        (&plain, start(&plain).admission(Admission::WholeAnswer)),
        (&plain, start(&plain).prefix_sharing(false).step_tokens(1000)),
        (&plain, start(&plain).max_running(1)),
        (&block, start(&block)),
        (&sinks, start(&sinks)),
        (&rollback, start(&rollback).lookup(lookup)),
        (&f16, start(&f16).lookup(lookup).preemption(Preemption::Recompute)),
        (&promoted, start(&promoted).lookup(lookup)),
    ];
    for (index, (config, builder)) in engines.into_iter().enumerate() {
        let cases = cases(&model, config, 100 + index as u64, 60);
        let stats = serve(builder.build().unwrap(), &cases).stats();
        println!("engine {index}: {stats:?}");
        match index {
            0 => assert!(stats.forgotten > 0 && stats.swapped_out == 0, "{stats:?}"),
            2 => assert_eq!((stats.forgotten, stats.swapped_out), (0, 0), "{stats:?}"),
            3 => assert_eq!(stats.reused_tokens, 0, "{stats:?}"),
            4 => assert_eq!(stats.max_running, 1, "{stats:?}"),
            7..=9 => assert!(stats.accepted_tokens > 0, "{stats:?}"),
            _ => {}
        }
    }
}

/// All at once, with prompts that take more room while they are computed than their answers at the
/// end: the sequences that begin together must leave room for each other.
#[test]
fn nothing_gives_way_to_whole_answers_that_were_promised_room() {
    let model = model(1);
    let config = small().segment_tokens(Some(256)).build().unwrap();
    let mut random = Random::new(9);
    let requests: Vec<_> = (0..16).map(|_| Request::new(random.tokens(150), 60)).collect();
    let whole = bytes(&model, &config, 210);
    for sequences in [3, 5, 8] {
        let builder = engine(&model, &config).kv_memory(sequences * whole + whole / 2);
        let mut engine =
            builder.admission(Admission::WholeAnswer).step_tokens(512).build().unwrap();
        let events: Vec<_> =
            requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        while engine.step().unwrap() {
            engine.audit().unwrap();
        }
        let stats = engine.stats();
        assert_eq!((stats.swapped_out, stats.forgotten), (0, 0), "{sequences}: {stats:?}");
        assert!((2..=sequences).contains(&stats.max_running), "{sequences}: {stats:?}");
        for (request, events) in requests.iter().zip(events) {
            assert_eq!(events.collect_now().unwrap(), alone(&model, &config, request));
        }
    }
}

#[test]
fn a_shared_prefix_is_computed_once() {
    let model = model(1);
    for sinks in [0, 20] {
        let config = small().sink_length(sinks).build().unwrap();
        let mut engine = engine(&model, &config).kv_memory(1 << 24).build().unwrap();
        let mut random = Random::new(5);
        let opening = random.tokens(300);
        let request =
            |random: &mut Random| Request::new([opening.clone(), random.tokens(10)].concat(), 20);
        let requests: Vec<_> = (0..4).map(|_| request(&mut random)).collect();
        // All at once: the first computes, the others wait for it.
        let events: Vec<_> =
            requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
        engine.run().unwrap();
        engine.audit().unwrap();
        for (request, events) in requests.iter().zip(events) {
            assert_eq!(events.collect_now().unwrap(), alone(&model, &config, request));
        }
        // Four whole segments of 64 after the sinks.
        assert_eq!(engine.stats().reused_tokens as usize, 3 * (sinks + 256));
        assert_eq!(engine.stats().prefixes, 4);
    }
}

/// 2,000 tokens with drafts, most of them wrong, across every boundary of key blocks and pages.
#[test]
fn drafts_change_nothing_but_the_number_of_steps() {
    let model = model(1);
    let lookup = Lookup { draft_tokens: 8, max_match: 3, min_match: 1 };
    let (mut tokens, mut steps, mut accepted) = (0, 0, 0);
    for seed in 0..5 {
        let config = small().rollback_length(8 + seed as usize).build().unwrap();
        let builder = engine(&model, &config).kv_memory(1 << 24).lookup(lookup);
        let mut engine = builder.build().unwrap();
        // A prompt that repeats itself, and an answer that does too: this model has little to say.
        let request = Request::new(Random::new(seed).tokens(7).repeat(5), 410);
        let events = engine.submit(request.clone()).unwrap();
        while engine.step().unwrap() {
            engine.audit().unwrap();
        }
        assert_eq!(events.collect_now().unwrap(), alone(&model, &config, &request));
        let stats = engine.stats();
        (tokens, steps) = (tokens + stats.generated_tokens, steps + stats.steps);
        accepted += stats.accepted_tokens;
    }
    println!("{tokens} tokens in {steps} steps, {accepted} of them drafted");
    assert!(tokens == 2050 && accepted > 0 && steps + accepted == tokens);
}

#[test]
fn samples_share_their_prompt() {
    let model = model(1);
    let config = small().build().unwrap();
    let mut engine = engine(&model, &config).kv_memory(1 << 24).build().unwrap();
    let mut request = Request::new(Random::new(8).tokens(200), 60);
    request.sampling.temperature = 1.0;
    request.samples = 5;
    let events = engine.submit(request.clone()).unwrap();
    engine.run().unwrap();
    engine.audit().unwrap();
    let found = events.collect_now().unwrap();
    assert_eq!(found, alone(&model, &config, &request));
    assert!(found[1..].iter().any(|sample| sample.tokens != found[0].tokens));
    assert_eq!(engine.stats().computed_tokens, 200 + 5 * 59);
}

#[test]
fn wrong_requests_are_refused() {
    let model = model(1);
    let config = small().build().unwrap();
    let mut engine = engine(&model, &config).max_waiting(1).build().unwrap();
    let mut message = |request| engine.submit(request).map(|_| ()).unwrap_err().to_string();
    let empty = "invalid request: prompt, max_tokens and samples must not be empty or 0";
    assert_eq!(message(Request::new(vec![], 5)), empty);
    assert_eq!(message(Request::new(vec![1], 0)), empty);
    let long = "invalid request: a prompt of 512 tokens in a context of 512";
    assert_eq!(message(Request::new(vec![1; 512], 5)), long);
    let unknown = "invalid request: token 264 of a vocabulary of 264";
    assert_eq!(message(Request::new(vec![1, 264], 5)), unknown);
    let mut request = Request::new(vec![1], 5);
    request.samples = 1025;
    assert_eq!(message(request), "invalid request: 1025 samples, more than 1024");
    let mut request = Request::new(vec![1], 5);
    request.stop_strings = vec!["x".into()];
    let stop = "invalid request: stop strings need an engine with a tokenizer";
    assert_eq!(message(request), stop);
    engine.submit(Request::new(vec![1], 5)).unwrap();
    let error = engine.submit(Request::new(vec![1], 5)).unwrap_err();
    assert!(matches!(error, Error::QueueFull { waiting: 1 }), "{error}");

    let mut tiny = self::engine(&model, &config).kv_memory(10_000).build().unwrap();
    let error = tiny.submit(Request::new(vec![1; 100], 300)).unwrap_err();
    assert!(matches!(error, Error::TooLarge { tokens: 400, budget: 10_000, .. }), "{error}");
}

#[test]
fn deadlines_end_answers() {
    let model = model(1);
    let config = small().build().unwrap();
    let mut engine = engine(&model, &config).build().unwrap();
    let mut request = Request::new(vec![1, 2, 3], 400);
    request.deadline = Some(Duration::ZERO);
    let events = engine.submit(request).unwrap();
    engine.run().unwrap();
    let found = events.collect_now().unwrap();
    assert_eq!((found[0].reason, found[0].tokens.len()), (FinishReason::Deadline, 0));
    engine.audit().unwrap();
}
