//! The reference against itself where no other backend may run the case yet: outputs, bytes and the
//! memory model must not depend on how the work is cut up.

use kivi_core::{CacheBackend, CacheState, PromotedKeys, SequenceLayout, memory::MeasuredBytes};
use kivi_cpu_ref::{
    Cache, CpuRef,
    parity::{Case, Cut, Report, RunResult, SequenceData, basic_cases, check, run},
};

fn promoted_cases() -> impl Iterator<Item = Case> {
    basic_cases().into_iter().filter(|case| case.config.key().promoted.is_some())
}

#[test]
fn promoted_cases_do_not_depend_on_the_cut() {
    let mut total = Report::default();
    for case in promoted_cases() {
        total += check(&CpuRef, &case, 0.0).unwrap_or_else(|error| panic!("{error}\n{case:#?}"));
    }
    assert_eq!((total.cases, total.skipped), (promoted_cases().count(), 0));
    assert!(total.cases >= 80 && total.rows > 10_000, "{total:?}");
    // Rows are computed alone, in the same order.
    assert_eq!(total.worst, 0.0);
}

/// The state and an empty pool for a case, with its first sequence adopted.
fn adopt(case: &Case) -> (SequenceLayout, Cache) {
    let mut state = CacheState::new(case.pool().unwrap());
    let cache = CpuRef.create_cache(state.spec()).unwrap();
    let tokens = case.sequences[0].prompt + case.sequences[0].generated;
    let id = state.adopt_sequence(tokens).unwrap();
    (state.layout(id).unwrap(), cache)
}

fn exported(case: &Case) -> RunResult {
    let data = SequenceData::new(case, 0, case.sequences[0]);
    run(&CpuRef, case, &[data], Cut::PLAIN).unwrap()
}

/// What one pool exports another imports, where it measures and exports the same.
#[test]
fn promoted_layers_move_between_pools() {
    for mut case in promoted_cases().filter(|case| case.window.is_none()) {
        case.sequences.truncate(1);
        let result = exported(&case);
        let (layout, mut cache) = adopt(&case);
        CpuRef.import(&mut cache, 0, &layout, &result.layers[0]).unwrap();
        assert_eq!(CpuRef.export(&cache, 0, &layout).unwrap(), result.layers[0]);
        assert_eq!(CpuRef.measure(&cache), result.measured);
        assert_eq!(CpuRef.measure(&cache), MeasuredBytes::from(result.predicted));
    }
}

/// A damaged second plane is refused with a message that names the part.
#[test]
fn damaged_masks_are_refused() {
    let partial = |case: &Case| case.head_dim == 72 && case.config.group_size() == 32;
    let mut case = promoted_cases().find(partial).unwrap();
    case.sequences.truncate(1);
    let contents = exported(&case).layers.remove(0);
    let (layout, mut cache) = adopt(&case);
    let mut message = |change: &dyn Fn(&mut Option<PromotedKeys>)| {
        let mut contents = contents.clone();
        change(&mut contents.packed_keys.as_mut().unwrap().promoted);
        CpuRef.import(&mut cache, 0, &layout, &contents).unwrap_err().to_string()
    };
    let changed = |change: fn(&mut PromotedKeys)| {
        move |promoted: &mut Option<PromotedKeys>| change(promoted.as_mut().unwrap())
    };
    assert!(message(&|promoted| *promoted = None).contains("promoted key channels"));
    assert!(message(&changed(|p| p.count += 1)).contains("19 promoted key channels, not 18"));
    let bits = "does not have 18 bits, all below channel 72";
    assert!(message(&changed(|p| p.mask[2] ^= 1)).contains(bits));
    // As many bits as there should be, one of them at channel 95.
    let beyond = changed(|p| {
        p.mask[0] &= p.mask[0] - 1;
        p.mask[2] |= 1 << 31;
    });
    assert!(message(&beyond).contains(bits));
    assert!(message(&changed(|p| p.mask.truncate(3))).contains("key mask has 3 elements"));
    assert!(message(&changed(|p| p.lo.push(0))).contains("promoted key codes has"));
}
