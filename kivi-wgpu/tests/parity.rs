//! The kernels against the reference, on the first device there is, with SPIR-V and with WGSL, with plane
//! operations and without. `KIVI_PARITY_STEP=n` runs every n-th case.

use kivi_cpu_ref::parity::{Case, Report, basic_cases, check};
use kivi_wgpu::{GpuOptions, OpenError, WgpuOptions, open};

/// Products are in f32.
const ROUNDING: f32 = 0.0;

#[test]
fn basic_cases_agree_with_the_reference() {
    let step = std::env::var("KIVI_PARITY_STEP").map_or(1, |step| step.parse().unwrap());
    let cases: Vec<Case> = basic_cases().into_iter().step_by(step).collect();
    let planes = std::env::var("KIVI_PLANES").map_or(8, |step| step.parse().unwrap());
    for wgsl in [true, false] {
        for planes in [0, planes] {
            let gpu = GpuOptions { planes: Some(planes), ..GpuOptions::default() };
            let options = WgpuOptions { wgsl, gpu, ..WgpuOptions::default() };
            let backend = match open(&options) {
                Err(error @ OpenError::NoDevice) => {
                    println!("skipped: {error}");
                    return;
                }
                other => other.unwrap(),
            };
            let mut total = Report::default();
            for case in &cases {
                let report = check(&backend, case, ROUNDING);
                total += report.unwrap_or_else(|error| panic!("{backend:?}: {error}\n{case:#?}"));
            }
            println!(
                "{backend:?}: {} cases run, {} skipped, {} rows; largest error {:.1} % of what is \
                 tolerated",
                total.cases,
                total.skipped,
                total.rows,
                100.0 * total.worst
            );
            assert_eq!((total.cases, total.skipped), (cases.len(), 0));
        }
    }
}
