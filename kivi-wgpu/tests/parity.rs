//! The kernels against the reference: with SPIR-V and with WGSL, with plane operations and without.
//!
//! Each case runs in one of these four ways, so that all cases and all ways are covered;
//! `KIVI_PARITY=full` runs every case in every way. The device is the first there is that is not
//! software, or Mesa's software driver; where there is none, the test says so and runs nothing.

use kivi_core::CacheBackend;
use kivi_cpu_ref::parity::{Case, Report, basic_cases, check};
use kivi_wgpu::{GpuOptions, OpenError, Wgpu, WgpuOptions, adapters, open};
use std::io::Write;

/// Products are in f32.
const ROUNDING: f32 = 0.0;

/// Units of a plane of Mesa's software driver, which does not announce them.
const SOFTWARE_PLANE: usize = 8;

/// Whether a device is there.
fn device(options: &WgpuOptions) -> Option<Wgpu> {
    match open(options) {
        Err(error @ OpenError::NoDevice) => {
            println!("skipped: {error}");
            None
        }
        other => Some(other.unwrap_or_else(|error| panic!("{error}"))),
    }
}

/// Runs cases and tells what differs.
fn run(backend: &Wgpu, cases: &[Case]) {
    let (mut total, mut failures) = (Report::default(), Vec::new());
    for case in cases {
        match check(backend, case, ROUNDING) {
            Ok(report) => total += report,
            Err(error) => failures.push(format!("case {}: {error}\n{case:?}", case.seed)),
        }
    }
    // Past the test harness, so that it shows in every run.
    let _shown = writeln!(
        std::io::stderr(),
        "{}: {} cases run, {} skipped, {} rows; largest error {:.1} % of what is tolerated",
        backend.capabilities().device,
        total.cases,
        total.skipped,
        total.rows,
        100.0 * total.worst
    );
    assert!(failures.is_empty(), "{} cases failed:\n{}", failures.len(), failures.join("\n"));
    // Key biases are what these kernels lack.
    let biased = cases.iter().filter(|case| case.key_bias.is_some()).count();
    assert_eq!((total.cases, total.skipped), (cases.len() - biased, biased));
}

#[test]
fn basic_cases_agree_with_the_reference() {
    let all = basic_cases();
    let full = std::env::var("KIVI_PARITY").is_ok_and(|value| value == "full");
    // A GPU announces its planes itself.
    let software = adapters().iter().all(|adapter| adapter.software);
    let planes = software.then_some(SOFTWARE_PLANE);
    let ways = [(true, Some(0)), (true, planes), (false, Some(0)), (false, planes)];
    for (number, (wgsl, planes)) in ways.into_iter().enumerate() {
        // One form of the attention kernel for all numbers of queries: a software device takes a
        // second to compile each.
        let gpu = GpuOptions { planes, queries: Some(4), ..GpuOptions::default() };
        let Some(backend) = device(&WgpuOptions { wgsl, gpu, ..WgpuOptions::default() }) else {
            return;
        };
        let (first, step) = if full { (0, 1) } else { (number, ways.len()) };
        let cases: Vec<Case> = all.iter().skip(first).step_by(step).cloned().collect();
        run(&backend, &cases);
    }
}

/// What the suite above holds fixed: other numbers of queries, and codes that are converted.
#[test]
fn every_form_of_attention_agrees_with_the_reference() {
    let all = basic_cases();
    for (number, queries) in [1, 2, 8].into_iter().enumerate() {
        for denormals in [false, true] {
            let denormals = Some(denormals);
            let gpu = GpuOptions { queries: Some(queries), denormals, ..GpuOptions::default() };
            let Some(backend) = device(&WgpuOptions { gpu, ..WgpuOptions::default() }) else {
                return;
            };
            let cases: Vec<Case> = all.iter().skip(7 * number).step_by(31).cloned().collect();
            run(&backend, &cases);
        }
    }
}
