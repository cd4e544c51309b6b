//! Numbered steps with their duration and result, and the summary at the end.

use std::process::ExitCode;
use std::time::{Duration, Instant};

/// What a step returns: a short remark for the summary (may be empty), or why there is none.
pub(crate) type Check = Result<String, Problem>;

/// Why a step did not pass.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Problem {
    /// Something this machine lacks and cannot fetch; not an error.
    Skipped(String),
    /// The check ran and what it checks is wrong.
    Failed(String),
}

impl Problem {
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self::Skipped(reason.into())
    }

    pub(crate) fn failed(reason: impl Into<String>) -> Self {
        Self::Failed(reason.into())
    }
}

/// The steps run so far.
#[derive(Default)]
pub(crate) struct Report {
    steps: Vec<(&'static str, Check, Duration)>,
}

impl Report {
    /// Runs one step, prints its heading and result, and says whether it passed.
    ///
    /// A failure does not stop the steps after it, so that one run shows everything.
    pub(crate) fn step(&mut self, name: &'static str, check: impl FnOnce() -> Check) -> bool {
        println!("\n=== {}. {name}", self.steps.len() + 1);
        let start = Instant::now();
        let result = check();
        let elapsed = start.elapsed();
        println!("--- {}", line(name, &result, elapsed));
        let passed = result.is_ok();
        self.steps.push((name, result, elapsed));
        passed
    }

    /// Prints the summary; failure if a step failed.
    pub(crate) fn finish(self) -> ExitCode {
        println!("\n=== summary");
        let (mut passed, mut skipped, mut failed) = (0, 0, 0);
        let mut total = Duration::ZERO;
        for (number, (name, result, elapsed)) in self.steps.iter().enumerate() {
            println!("{:>3}. {}", number + 1, line(name, result, *elapsed));
            total += *elapsed;
            match result {
                Ok(_) => passed += 1,
                Err(Problem::Skipped(_)) => skipped += 1,
                Err(Problem::Failed(_)) => failed += 1,
            }
        }
        let seconds = total.as_secs_f64();
        println!("{passed} passed, {skipped} skipped, {failed} failed in {seconds:.1} s");
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

fn line(name: &str, result: &Check, elapsed: Duration) -> String {
    let (word, detail) = match result {
        Ok(detail) => ("passed", detail),
        Err(Problem::Skipped(reason)) => ("skipped", reason),
        Err(Problem::Failed(reason)) => ("FAILED", reason),
    };
    let line = format!("{name:<30} {word:<8} {:>7.1} s  {detail}", elapsed.as_secs_f64());
    line.trim_end().to_owned()
}
