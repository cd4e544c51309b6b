//! The books of a pool against a model of it that counts everything anew after each operation.

use kivi_core::{
    CacheConfig, CacheState, Error, Format, KeyValue, LayerSpec, PageId, PageRef, PoolSpec, Result,
    SequenceId, StepPlan, StepRequest, ValueResidual,
};
use proptest::prelude::*;
use std::collections::HashSet;

#[derive(Clone, Debug)]
enum Operation {
    Create { prompt: usize },
    Adopt { tokens: usize },
    Step { tokens: Vec<usize> },
    Fork { which: usize, compact: bool },
    Truncate { which: usize, back: usize },
    Remove { which: usize },
}

fn operations() -> impl Strategy<Value = Vec<Operation>> {
    use Operation::*;
    let operation = prop_oneof![
        (0usize..120).prop_map(|prompt| Create { prompt }),
        (0usize..150).prop_map(|tokens| Adopt { tokens }),
        prop::collection::vec(0usize..50, 1..5).prop_map(|tokens| Step { tokens }),
        prop::collection::vec(0usize..50, 1..5).prop_map(|tokens| Step { tokens }),
        (any::<usize>(), any::<bool>()).prop_map(|(which, compact)| Fork { which, compact }),
        (any::<usize>(), 0usize..20).prop_map(|(which, back)| Truncate { which, back }),
        any::<usize>().prop_map(|which| Remove { which }),
    ];
    prop::collection::vec(operation, 1..60)
}

fn pool(mode: ValueResidual, sinks: usize, window: Option<usize>) -> CacheState {
    let builder = CacheConfig::builder().group_size(16).residual_length(32).page_tokens(16);
    let builder = builder.value_residual(mode).sink_length(sinks).rollback_length(5);
    let config = builder.segment_tokens(Some(64)).build().unwrap();
    let plain = LayerSpec::new(&config, 2, 64);
    let full = LayerSpec { format: KeyValue::both(Format::F16), ..plain.clone() };
    let windowed = LayerSpec { window, ..plain.clone() };
    let layers = vec![plain.clone(), full, plain, windowed];
    CacheState::new(PoolSpec::new(config, layers, 40, 6).unwrap())
}

/// A sequence that has made a step, or was made with contents, has a slot.
struct Known {
    id: SequenceId,
    has_slot: bool,
}

/// Bytes of the slots and pages of one sequence that shares nothing.
fn alone(state: &CacheState, known: &Known) -> usize {
    count(state, std::slice::from_ref(known)).1
}

/// Counts pages, slots and bytes from the layouts of all sequences.
fn count(state: &CacheState, known: &[Known]) -> (Vec<HashSet<PageId>>, usize) {
    let spec = state.spec();
    let mut pages = vec![HashSet::new(); spec.group_count()];
    let mut bytes = 0;
    for known in known {
        let layout = state.layout(known.id).unwrap();
        for (pages, table) in pages.iter_mut().zip(&layout.tables) {
            pages.extend(table.iter().copied().filter(|&page| page != PageId::DROPPED));
        }
        if known.has_slot {
            for layer in spec.layers() {
                let packs = layer.packs();
                let room = layout.capacity.zip(packs).map(|(n, packs)| if packs { n } else { 0 });
                let room = room.map(|room| room + spec.config().sink_length());
                bytes += 2 * layer.kv_heads * layer.head_dim * (room.keys + room.values);
            }
        }
    }
    for (group, pages) in pages.iter().enumerate() {
        let layer = spec.group_layer(group);
        let (tokens, elements) = (spec.config().page_tokens(), layer.kv_heads * layer.head_dim);
        // Two bits for each code and two f16 for 16 elements, keys and values.
        let packed = 2 * (tokens * elements / 4 + tokens * elements / 16 * 4);
        let page = if layer.packs().keys { packed } else { 2 * tokens * elements * 2 };
        bytes += pages.len() * page * spec.group_layers(group);
    }
    (pages, bytes)
}

fn apply(
    operation: &Operation,
    state: &mut CacheState,
    known: &mut Vec<Known>,
    plan: &mut StepPlan,
) -> Result<()> {
    let pick = |which: &usize, known: &[Known]| which % known.len().max(1);
    match operation {
        Operation::Create { prompt } => {
            let id = state.create_sequence()?;
            known.push(Known { id, has_slot: false });
            if *prompt > 0 {
                state.begin_prompt(id, *prompt)?;
            }
        }
        Operation::Adopt { tokens } => {
            let id = state.adopt_sequence(*tokens)?;
            known.push(Known { id, has_slot: true });
        }
        Operation::Step { tokens } => {
            let requests: Vec<_> = known
                .iter()
                .zip(tokens.iter().cycle())
                .map(|(known, &tokens)| StepRequest { sequence: known.id, tokens })
                .filter(|request| request.tokens > 0)
                .collect();
            let before = state.allocated_bytes();
            let expected = requests.iter().map(|request| state.step_bytes(request));
            let expected: Vec<_> = expected.collect::<Result<_>>()?;
            state.plan(&requests, plan)?;
            for request in &requests {
                let stepped = known.iter_mut().find(|known| known.id == request.sequence);
                stepped.unwrap().has_slot = true;
            }
            let growth: usize = expected.iter().map(|bytes| bytes.growth()).sum();
            assert!(state.allocated_bytes() <= before + growth);
            let windowed = state.spec().layers().iter().any(|layer| layer.window.is_some());
            if let ([bytes], false) = (&expected[..], windowed) {
                let after = before + bytes.pages + bytes.slot_after - bytes.slot_before;
                assert_eq!(state.allocated_bytes(), after, "{bytes:?}");
            }
            // What was given up has no user, unless it is in use again.
            let (pages, _) = count(state, known);
            let copied = |freed: &PageRef| plan.copies.iter().any(|copy| copy.to == freed.page);
            for freed in plan.freed.iter().filter(|freed| !copied(freed)) {
                let new = plan
                    .sequences
                    .iter()
                    .any(|sequence| sequence.before.tables[freed.group].contains(&freed.page));
                assert!(new || !pages[freed.group].contains(&freed.page));
            }
        }
        Operation::Fork { which, compact } if !known.is_empty() => {
            let Known { id, has_slot } = known[pick(which, known)];
            let fork = if *compact { state.fork_compact(id)? } else { state.fork(id)? };
            known.push(Known { id: fork, has_slot });
            let (layout, from) = (state.layout(fork)?, state.layout(id)?);
            assert_eq!((layout.tokens, &layout.tables), (from.tokens, &from.tables));
            if *compact {
                let held = layout.kept.map(|kept| layout.tokens.saturating_sub(kept));
                assert_eq!(layout.capacity.values, held.values);
                assert_eq!(layout.capacity.keys, held.keys.next_multiple_of(16));
            }
        }
        Operation::Truncate { which, back } if !known.is_empty() => {
            let id = known[pick(which, known)].id;
            let tokens = state.tokens(id)?.saturating_sub(*back);
            state.truncate(id, tokens)?;
        }
        Operation::Remove { which } if !known.is_empty() => {
            let removed = known.remove(pick(which, known));
            state.remove(removed.id)?;
            assert!(state.layout(removed.id).is_err());
        }
        _ => {}
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn the_books_balance(
        operations in operations(),
        mode in prop::sample::select(vec![ValueResidual::Window, ValueResidual::Block]),
        sinks in prop::sample::select(vec![0, 16, 20]),
        window in prop::sample::select(vec![None, Some(50)]),
    ) {
        let mut state = pool(mode, sinks, window);
        let (mut known, mut plan) = (Vec::new(), StepPlan::default());
        for operation in &operations {
            let before: Vec<_> = known.iter().map(|known: &Known| state.layout(known.id)).collect();
            let before: Vec<_> = before.into_iter().map(Result::unwrap).collect();
            if let Err(error) = apply(operation, &mut state, &mut known, &mut plan) {
                let refused = matches!(error, Error::PoolExhausted { .. } | Error::InvalidRequest { .. });
                prop_assert!(refused, "{error}");
                // Nothing was changed, but for pages that no query sees any more.
                for (known, layout) in known.iter().zip(before) {
                    let now = state.layout(known.id).unwrap();
                    prop_assert_eq!((now.tokens, now.capacity), (layout.tokens, layout.capacity));
                }
            }
            let (pages, bytes) = count(&state, &known);
            prop_assert_eq!(state.sequence_count(), known.len());
            prop_assert_eq!(state.allocated_bytes(), bytes);
            for known in &known {
                prop_assert_eq!(state.sequence_bytes(known.id).unwrap(), alone(&state, known));
            }
            for (group, pages) in pages.iter().enumerate() {
                prop_assert_eq!(state.used_pages(group), pages.len());
                prop_assert_eq!(state.free_pages(group), 40 - pages.len());
            }
        }
    }
}
