//! The CPU backend against the reference, on every instruction set of this machine, or on that of
//! `KIVI_CPU_ISA`. `KIVI_PARITY_STEP=n` runs every n-th case, for emulated processors.

use kivi_cpu::{Cpu, Isa};
use kivi_cpu_ref::parity::{Case, Report, basic_cases, check, extended_cases};

/// Folded operands are rounded to multiples of the largest over 32512, or 16256 at 8 bits.
const ROUNDING: f32 = 0.5 / 16256.0;

/// Runs cases on two threads and returns what they found together.
fn run(cpu: &Cpu, cases: &[Case]) -> Report {
    let part = |cases: &[Case]| {
        let mut total = Report::default();
        for case in cases {
            let report = check(cpu, case, ROUNDING)
                .unwrap_or_else(|e| panic!("{}: {e}\n{case:#?}", cpu.isa()));
            total += report;
        }
        total
    };
    let (first, second) = cases.split_at(cases.len() / 2);
    let (a, b) = std::thread::scope(|scope| {
        let other = scope.spawn(|| part(second));
        (part(first), other.join())
    });
    let b = b.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    let mut report = a;
    report += b;
    println!(
        "{}: {} cases run, {} skipped, {} rows; largest error {:.1} % of what is tolerated",
        cpu.isa(),
        report.cases,
        report.skipped,
        report.rows,
        100.0 * report.worst
    );
    assert_eq!((report.cases, report.skipped), (cases.len(), 0));
    report
}

/// The instruction sets to run on.
fn instruction_sets() -> Vec<Isa> {
    match std::env::var_os(Isa::VARIABLE) {
        Some(_) => vec![Isa::detect().unwrap()],
        None => Isa::available().collect(),
    }
}

/// Of how many cases one is run.
fn step() -> usize {
    let variable = "KIVI_PARITY_STEP";
    let step = std::env::var(variable).map_or(1, |step| step.parse().expect(variable));
    assert!(step > 0, "{variable} is 0");
    step
}

#[test]
fn basic_cases_agree_with_the_reference() {
    let (all, step) = (basic_cases(), step());
    let cases: Vec<Case> = all.iter().step_by(step).cloned().collect();
    if step > 1 {
        println!("{} of {} cases left out", all.len() - cases.len(), all.len());
    }
    for isa in instruction_sets() {
        let report = run(&Cpu::with_isa(2, isa).unwrap(), &cases);
        assert!(report.rows > 10_000 / step);
    }
}

/// A few cases from all over the whole grid; with the feature `extended`, all of it.
#[test]
fn cases_of_the_whole_grid_agree_with_the_reference() {
    let sample = if cfg!(feature = "extended") { 1 } else { 9973 };
    let cases: Vec<Case> = extended_cases().into_iter().step_by(sample * step()).collect();
    run(&Cpu::new(2).unwrap(), &cases);
}
