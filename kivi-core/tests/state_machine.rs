//! The state machine against the rules it implements, for arbitrary cuts of the work.

use kivi_core::{
    CacheConfig, CachePolicy, CacheState, Error, Format, KeyValue, KiviPolicy, LayerSpec, PageId,
    PoolSpec, Result, SequenceId, StepPlan, StepRequest, ValueResidual,
};
use proptest::prelude::*;
use std::{collections::BTreeSet, ops::Range, sync::Arc};

/// A run of tokens that were prompt or generated, and how it is cut into steps.
#[derive(Clone, Debug)]
enum Run {
    Prompt { tokens: usize, chunk: usize },
    Generated { tokens: usize, chunk: usize },
}

fn runs() -> impl Strategy<Value = Vec<Run>> {
    let run = (any::<bool>(), 1usize..300, 1usize..200).prop_map(|(prompt, tokens, chunk)| {
        if prompt { Run::Prompt { tokens, chunk } } else { Run::Generated { tokens, chunk } }
    });
    prop::collection::vec(run, 1..5)
}

fn configs() -> impl Strategy<Value = CacheConfig> {
    let sizes = prop::sample::select(vec![(16, 16), (16, 48), (32, 32), (32, 64), (32, 128)]);
    let modes = prop::sample::select(vec![ValueResidual::Window, ValueResidual::Block]);
    let sinks = prop::sample::select(vec![0, 1, 4, 32, 50]);
    (sizes, sinks, modes, 0usize..40, prop::option::of(1usize..4)).prop_map(
        |((g, r), sinks, mode, rollback, segments)| {
            let builder = CacheConfig::builder().group_size(g).residual_length(r);
            let builder = builder.sink_length(sinks).value_residual(mode);
            let builder = builder.segment_tokens(segments.map(|n| n * r));
            builder.rollback_length(rollback).build().unwrap()
        },
    )
}

fn state(config: &CacheConfig, tokens: usize) -> CacheState {
    let layers = vec![
        LayerSpec::new(config, 2, 64),
        LayerSpec {
            format: KeyValue::new(Format::KIVI2, Format::F16),
            ..LayerSpec::new(config, 2, 64)
        },
    ];
    CacheState::new(PoolSpec::for_context(config.clone(), layers, 4, tokens + 128).unwrap())
}

/// Keys `S ≤ j < S + ⌊max(0, n−S)/R⌋·R`; values `S ≤ j < n − R`, or like the keys.
fn rule(config: &CacheConfig, n: usize) -> KeyValue<usize> {
    let (s, r) = (config.sink_length(), config.residual_length());
    let mut keys = s;
    while keys + r <= n {
        keys += r;
    }
    let values = match config.value_residual() {
        ValueResidual::Window => s.max(n - r.min(n)),
        ValueResidual::Block => keys,
    };
    KeyValue::new(keys, values)
}

/// The state a token sees: that of its own position, or of the start of its segment.
fn seen(config: &CacheConfig, prompts: &[Range<usize>], t: usize) -> usize {
    let Some(prompt) = prompts.iter().find(|prompt| prompt.contains(&t)) else { return t };
    let mut start = prompt.start;
    if let Some(c) = config.segment_tokens() {
        let mut boundary = config.sink_length();
        while boundary <= t {
            start = start.max(boundary);
            boundary += c;
        }
    }
    start
}

struct Step {
    plan: StepPlan,
    prompts: Vec<Range<usize>>,
}

/// Executes the runs and hands every step to `check`.
fn drive(
    state: &mut CacheState,
    sequence: SequenceId,
    runs: &[Run],
    mut check: impl FnMut(&Step) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut step = Step { plan: StepPlan::default(), prompts: Vec::new() };
    for run in runs {
        let (Run::Prompt { tokens, chunk } | Run::Generated { tokens, chunk }) = *run;
        let begin = state.tokens(sequence).unwrap();
        if matches!(run, Run::Prompt { .. }) {
            state.begin_prompt(sequence, tokens).unwrap();
            step.prompts.push(begin..begin + tokens);
        }
        let mut done = 0;
        while done < tokens {
            let count = chunk.min(tokens - done);
            state.plan(&[StepRequest { sequence, tokens: count }], &mut step.plan).unwrap();
            check(&step)?;
            done += count;
        }
    }
    Ok(())
}

proptest! {
    /// Every row sees what the rule says; what it sees exists; every token is quantized once.
    #[test]
    fn views_follow_the_rule(config in configs(), runs in runs()) {
        let total: usize = runs.iter().map(|run| match run {
            Run::Prompt { tokens, .. } | Run::Generated { tokens, .. } => *tokens,
        }).sum();
        let mut state = state(&config, total);
        let sequence = state.create_sequence().unwrap();
        let sinks = config.sink_length();
        let mut quantized = KeyValue::both(sinks);
        drive(&mut state, sequence, &runs, |step| {
            let plan = &step.plan.sequences[0];
            prop_assert_eq!(plan.rows.clone(), 0..step.plan.rows);
            for (row, view) in plan.views.iter().enumerate() {
                let t = plan.before.tokens + row;
                let expected = rule(&config, seen(&config, &step.prompts, t));
                prop_assert_eq!(*view, expected, "row at {}", t);
                // Codes exist below the boundary, full-precision copies from it on.
                prop_assert!(view.keys <= plan.quantize.keys.end);
                prop_assert!(view.values <= plan.quantize.values.end);
                prop_assert!(plan.before.kept.keys <= view.keys);
                prop_assert!(plan.before.kept.values <= view.values);
            }
            // The copies to quantize from exist, and nothing is quantized twice or left out.
            prop_assert!(plan.before.kept.keys <= plan.quantize.keys.start);
            prop_assert!(plan.before.kept.values <= plan.quantize.values.start);
            prop_assert_eq!(plan.quantize.keys.start, quantized.keys);
            prop_assert_eq!(plan.quantize.values.start, quantized.values);
            quantized = KeyValue::new(plan.quantize.keys.end, plan.quantize.values.end);
            // All of it fits in the residual, during the step and after.
            let after = plan.tokens_after();
            prop_assert!(after.saturating_sub(plan.before.kept.keys) <= plan.before.capacity.keys);
            prop_assert!(
                after.saturating_sub(plan.before.kept.values) <= plan.before.capacity.values
            );
            prop_assert!(after.saturating_sub(plan.kept.keys) <= plan.capacity.keys);
            prop_assert!(after.saturating_sub(plan.kept.values) <= plan.capacity.values);
            // And the pages are there.
            let end = plan.quantize.keys.end.max(plan.quantize.values.end);
            let pages = |end: usize| end.saturating_sub(sinks).div_ceil(config.page_tokens());
            prop_assert_eq!(plan.before.tables[0].len(), pages(end));
            prop_assert_eq!(plan.before.tables[1].len(), pages(end.max(after)));
            Ok(())
        })?;
        // A closed state is the rule's state.
        let layout = state.layout(sequence).unwrap();
        prop_assert_eq!(layout.packed, rule(&config, total));
    }

    /// Taking tokens back and adding others equals never having had them.
    #[test]
    fn rollback_is_exact(
        config in configs(), first in 1usize..400, back in 0usize..60, again in 1usize..100,
    ) {
        let mut state = state(&config, first + again);
        let sequence = state.create_sequence().unwrap();
        let generated = |tokens| vec![Run::Generated { tokens, chunk: 1 }];
        drive(&mut state, sequence, &generated(first), |_| Ok(()))?;
        let target = first.saturating_sub(back);
        let kept = state.layout(sequence).unwrap().kept;
        let wanted = rule(&config, target);
        let exact = kept.keys <= wanted.keys && kept.values <= wanted.values;
        let result = state.truncate(sequence, target);
        prop_assert_eq!(result.is_ok(), exact, "{:?}", result);
        prop_assert!(exact || back > config.rollback_length());
        if exact {
            prop_assert_eq!(state.layout(sequence).unwrap().packed, wanted);
            let mut quantized = wanted;
            drive(&mut state, sequence, &generated(again), |step| {
                let plan = &step.plan.sequences[0];
                prop_assert_eq!(plan.views[0], rule(&config, plan.before.tokens));
                prop_assert_eq!(plan.quantize.keys.start, quantized.keys);
                prop_assert_eq!(plan.quantize.values.start, quantized.values);
                prop_assert!(plan.before.kept.keys <= plan.views[0].keys);
                prop_assert!(plan.before.kept.values <= plan.views[0].values);
                quantized = KeyValue::new(plan.quantize.keys.end, plan.quantize.values.end);
                Ok(())
            })?;
        }
    }

    /// Whatever is done to sequences, every page is free or belongs to someone, and a page that is
    /// written to belongs to one sequence only.
    #[test]
    fn pages_balance(
        config in configs(),
        actions in prop::collection::vec((0usize..5, 0usize..4, 1usize..90), 1..60),
    ) {
        let mut state = state(&config, 300);
        let total = state.spec().max_pages();
        let mut sequences: Vec<SequenceId> = Vec::new();
        let mut plan = StepPlan::default();
        for (action, which, count) in actions {
            let chosen = sequences.get(which % sequences.len().max(1)).copied();
            match (action, chosen) {
                (0, _) => sequences.extend(state.create_sequence().ok()),
                (1, Some(id)) => sequences.extend(state.fork(id).ok()),
                (2, Some(id)) => {
                    state.remove(id).unwrap();
                    sequences.retain(|&other| other != id);
                    prop_assert!(state.tokens(id).is_err());
                }
                (3, Some(id)) => {
                    let tokens = state.tokens(id).unwrap();
                    let _ = state.truncate(id, tokens.saturating_sub(count % 8));
                }
                (_, Some(id)) => {
                    let before = state.layout(id).unwrap();
                    let request = [StepRequest { sequence: id, tokens: count }];
                    match state.plan(&request, &mut plan) {
                        Ok(()) => {
                            let own = &plan.sequences[0].before.tables;
                            for range in [&plan.sequences[0].quantize.keys] {
                                for position in range.clone() {
                                    let index = (position - config.sink_length()) / config.page_tokens();
                                    for other in sequences.iter().filter(|&&other| other != id) {
                                        let theirs = state.layout(*other).unwrap().tables;
                                        prop_assert!(!theirs[0].contains(&own[0][index]));
                                    }
                                }
                            }
                        }
                        Err(Error::PoolExhausted { .. }) => {
                            prop_assert_eq!(state.layout(id).unwrap(), before);
                        }
                        Err(error) => return Err(TestCaseError::fail(error.to_string())),
                    }
                }
                _ => {}
            }
            for group in 0..state.spec().group_count() {
                let tables = sequences.iter().map(|&id| state.layout(id).unwrap().tables);
                let used: BTreeSet<PageId> =
                    tables.flat_map(|tables| tables[group].clone()).collect();
                prop_assert_eq!(state.used_pages(group), used.len());
                prop_assert_eq!(state.free_pages(group) + used.len(), total);
            }
        }
    }
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let config = CacheConfig::builder().build().unwrap();
    let mut state = state(&config, 300);
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    let request = |tokens| StepRequest { sequence, tokens };
    assert!(state.begin_prompt(sequence, 0).is_err());
    assert!(state.begin_prompt(sequence, 1 << 50).is_err());
    assert!(state.plan(&[request(0)], &mut plan).is_err());
    assert!(state.plan(&[request(1), request(1)], &mut plan).is_err());
    assert!(state.plan(&[request(usize::MAX)], &mut plan).is_err());
    let full = state.plan(&[request(100_000)], &mut plan).unwrap_err();
    assert!(matches!(full, Error::PoolExhausted { .. }), "{full}");
    state.begin_prompt(sequence, 10).unwrap();
    state.plan(&[request(4)], &mut plan).unwrap();
    let unfinished = state.begin_prompt(sequence, 5).unwrap_err().to_string();
    assert!(unfinished.contains("6 tokens"), "{unfinished}");
    assert!(state.truncate(sequence, 5).is_err());
    state.remove(sequence).unwrap();
    assert!(state.plan(&[request(1)], &mut plan).is_err());
    assert!(state.remove(sequence).is_err());
}

/// A policy of another kind: a few first tokens and the newest ones, everything between given up
/// (attention sinks, arXiv 2309.17453).
#[derive(Debug)]
struct Streaming {
    kivi: KiviPolicy,
    recent: usize,
}

impl CachePolicy for Streaming {
    fn packed(&self, tokens: usize) -> KeyValue<usize> {
        self.kivi.packed(tokens)
    }

    fn kept(&self, tokens: usize) -> KeyValue<usize> {
        self.kivi.kept(tokens)
    }

    fn residual_capacity(&self) -> KeyValue<usize> {
        self.kivi.residual_capacity()
    }

    fn needs_page(&self, _: &LayerSpec, page: Range<usize>, tokens: usize) -> bool {
        page.end + self.recent > tokens
    }
}

#[test]
fn another_policy_gives_pages_up() {
    let config = CacheConfig::builder().sink_length(4).build().unwrap();
    let layer = LayerSpec::new(&config, 1, 64);
    let policy = Streaming { kivi: KiviPolicy::new(&config), recent: 512 };
    // Room for far fewer pages than 10,000 tokens would fill.
    let spec = PoolSpec::new(config, vec![layer], 12, 1).unwrap();
    let mut state = CacheState::with_policy(spec, Arc::new(policy));
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    for _ in 0..10_000 {
        state.plan(&[StepRequest { sequence, tokens: 1 }], &mut plan).unwrap();
    }
    let table = state.layout(sequence).unwrap().tables.remove(0);
    let live = table.iter().filter(|&&page| page != PageId::DROPPED).count();
    // 512 recent tokens are eight or nine pages of 64, the residual part of them not yet in one.
    assert!((6..=9).contains(&live), "{live}");
    assert!(table[..table.len() - live].iter().all(|&page| page == PageId::DROPPED));
}

#[test]
fn pages_behind_a_window_limit_what_can_be_taken_back() {
    let config = CacheConfig::builder().rollback_length(8).build().unwrap();
    // Uncompressed, so that only pages matter.
    let format = KeyValue::both(Format::F16);
    let layer = LayerSpec { window: Some(200), format, ..LayerSpec::new(&config, 1, 64) };
    let mut state = CacheState::new(PoolSpec::for_context(config, vec![layer], 1, 1000).unwrap());
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    // At 271 tokens no query can come before 263, whose window starts at 64: page 0 goes.
    for n in 0..272 {
        let table = state.layout(sequence).unwrap().tables.remove(0);
        assert!(!table.contains(&PageId::DROPPED), "given up before the step at {n}");
        state.plan(&[StepRequest { sequence, tokens: 1 }], &mut plan).unwrap();
    }
    assert_eq!(state.layout(sequence).unwrap().tables[0][0], PageId::DROPPED);
    // Eight tokens can be taken back, once: those before would see the page again.
    state.truncate(sequence, 264).unwrap();
    state.truncate(sequence, 263).unwrap();
    let error = state.truncate(sequence, 262).unwrap_err().to_string();
    assert!(error.contains("271"), "{error}");
}

/// A pool that is just large enough for a window stays large enough.
#[test]
fn a_window_needs_no_more_pages_than_it_spans() {
    let config = CacheConfig::builder().build().unwrap();
    let layer = LayerSpec { window: Some(256), ..LayerSpec::new(&config, 1, 64) };
    // The window may touch five pages of 64, and a key block brings two.
    let mut state = CacheState::new(PoolSpec::new(config, vec![layer], 5, 1).unwrap());
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    for _ in 0..2000 {
        state.plan(&[StepRequest { sequence, tokens: 1 }], &mut plan).unwrap();
    }
}

#[derive(Debug)]
struct Broken;

impl CachePolicy for Broken {
    fn packed(&self, tokens: usize) -> KeyValue<usize> {
        KeyValue::both(tokens + 1)
    }

    fn kept(&self, _: usize) -> KeyValue<usize> {
        KeyValue::both(0)
    }

    fn residual_capacity(&self) -> KeyValue<usize> {
        KeyValue::both(1)
    }

    fn needs_page(&self, _: &LayerSpec, _: Range<usize>, _: usize) -> bool {
        true
    }
}

#[test]
fn a_policy_that_breaks_its_contract_is_refused() {
    let config = CacheConfig::builder().build().unwrap();
    let layer = LayerSpec::new(&config, 1, 64);
    let spec = PoolSpec::for_context(config, vec![layer], 1, 100).unwrap();
    let mut state = CacheState::with_policy(spec, Arc::new(Broken));
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    let error = state.plan(&[StepRequest { sequence, tokens: 1 }], &mut plan).unwrap_err();
    assert!(error.to_string().contains("contract"), "{error}");
}
