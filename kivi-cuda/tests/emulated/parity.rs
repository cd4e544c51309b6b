//! The whole backend, as it is compiled for NVIDIA devices, against the reference: cases of the parity
//! suite that are small enough for an emulator, with each routine.

use super::cache::client;
use kivi_core::{CacheConfig, Format};
use kivi_cpu_ref::parity::{Case, Cut, Report, Sequence, check};
use kivi_kernels::{Gpu, GpuOptions, Routine};
use std::io::Write;

/// Operands of codes are rounded to f16: by half a unit of 11 bits.
const ROUNDING: f32 = 1.0 / 2048.0;

/// A block of keys and the values that are codes by then, a ragged batch, sinks, a window, and formats.
fn cases(head_group: usize) -> Vec<Case> {
    let mut cases = Vec::new();
    for (format, head_dim, sinks, window) in
        [(Format::KIVI2, 64, 4, None), (Format::KIVI4, 64, 0, Some(50))]
    {
        let builder = CacheConfig::builder().key(format).value(format).sink_length(sinks);
        let mut case = Case::new(builder.residual_length(32).build().unwrap());
        (case.kv_heads, case.head_group, case.head_dim) = (1, head_group, head_dim);
        case.window = window;
        case.sequences =
            vec![Sequence { prompt: 2, generated: 131 }, Sequence { prompt: 1, generated: 70 }];
        case.cut = Cut { batched: true, ..Cut::PLAIN };
        case.seed = cases.len() as u64;
        cases.push(case);
    }
    cases
}

fn run(routine: Routine, head_group: usize, rounding: f32) {
    let Some(client) = client() else { return };
    let options = GpuOptions { routine: Some(routine), ..GpuOptions::default() };
    let backend = Gpu::new("cuda", "emulated", client, options).unwrap();
    let limits = backend.limits();
    assert!(limits.pairs && limits.denormals && limits.matrix && limits.plane == Some(32));
    let mut total = Report::default();
    for case in cases(head_group) {
        let report = check(&backend, &case, rounding);
        total += report.unwrap_or_else(|error| panic!("{routine:?}: {error}\n{case:?}"));
    }
    let _shown = writeln!(
        std::io::stderr(),
        "emulated, {routine:?}, {head_group} query heads per kv head: {} cases run, {} skipped, {} \
         rows; largest error {:.1} % of what is tolerated",
        total.cases,
        total.skipped,
        total.rows,
        100.0 * total.worst
    );
}

#[test]
fn pairs_of_halves_agree_with_the_reference() {
    run(Routine::Plane, 1, ROUNDING);
}

#[test]
fn matrix_units_agree_with_the_reference() {
    run(Routine::Matrix, 4, ROUNDING);
}
