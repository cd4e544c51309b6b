//! The CPU backend against the reference, on every instruction set of this machine.

use kivi_cpu::{Cpu, Isa};
use kivi_cpu_ref::parity::{basic_cases, check};
use std::sync::atomic::{AtomicUsize, Ordering};

#[test]
fn basic_cases_agree_with_the_reference() {
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        let cases = basic_cases();
        let rows = AtomicUsize::new(0);
        let worst = std::sync::Mutex::new(0f32);
        std::thread::scope(|scope| {
            for part in cases.chunks(cases.len().div_ceil(2)) {
                let (cpu, rows, worst) = (&cpu, &rows, &worst);
                scope.spawn(move || {
                    for case in part {
                        let report = check(cpu, case)
                            .unwrap_or_else(|error| panic!("{isa}: {error}\n{case:#?}"));
                        rows.fetch_add(report.rows, Ordering::Relaxed);
                        let mut worst = worst.lock().unwrap();
                        *worst = worst.max(report.worst);
                    }
                });
            }
        });
        let (rows, worst) = (rows.into_inner(), worst.into_inner().unwrap());
        println!(
            "{isa}: {} cases, {rows} rows, 0 skipped; largest error {:.1} % of the tolerance",
            cases.len(),
            100.0 * worst
        );
        assert!(rows > 10_000);
    }
}
