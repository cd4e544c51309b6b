//! What the benchmarks write, and the statistics in it.

use super::options::JsonTarget;
use crate::cli::output;
use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

/// The JSON object, a header and rows. A file is written anew with every row, so that what was
/// measured survives an interruption, and what cannot be written is found before anything is
/// measured.
pub(super) struct Report {
    target: JsonTarget,
    /// An object.
    header: Value,
    rows: Vec<Value>,
}

impl Report {
    /// Adds the date to the header.
    pub(super) fn new(target: JsonTarget, mut header: Value) -> Result<Self> {
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ");
        header["date"] = now.to_string().into();
        let report = Self { target, header, rows: Vec::new() };
        report.write_file()?;
        Ok(report)
    }

    /// Adds a field to the header, or replaces it.
    pub(super) fn note(&mut self, key: &str, value: Value) -> Result<()> {
        self.header[key] = value;
        self.write_file()
    }

    pub(super) fn push(&mut self, row: Value) -> Result<()> {
        self.rows.push(row);
        self.write_file()
    }

    /// Prints the object if that is what was asked for.
    pub(super) fn finish(&self) -> Result<()> {
        if self.target == JsonTarget::Stdout {
            output::print(&self.text()?)?;
        }
        Ok(())
    }

    fn text(&self) -> Result<String> {
        let mut object = self.header.clone();
        object["rows"] = json!(self.rows);
        output::json_text(object)
    }

    fn write_file(&self) -> Result<()> {
        let JsonTarget::File(path) = &self.target else { return Ok(()) };
        std::fs::write(path, self.text()?)
            .map_err(|error| anyhow!("cannot write {}: {error}", path.display()))
    }
}

/// A progress bar on standard error; none when that is no terminal.
pub(super) fn progress(hidden: bool, steps: usize) -> ProgressBar {
    let bar = if hidden { ProgressBar::hidden() } else { ProgressBar::new(steps as u64) };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// The 10th, 50th and 90th percentile.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Percentiles {
    pub(super) p10: f64,
    pub(super) median: f64,
    pub(super) p90: f64,
}

impl Percentiles {
    /// Of at least one sample.
    pub(super) fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let at = |share| percentile(&samples, share);
        Self { p10: at(0.1), median: at(0.5), p90: at(0.9) }
    }
}

/// A share of at least one sample in ascending order lies below this; between two of them linearly.
pub(super) fn percentile(samples: &[f64], share: f64) -> f64 {
    let position = share * (samples.len() - 1) as f64;
    let (low, high) = (position.floor() as usize, position.ceil() as usize);
    samples[low] + (samples[high] - samples[low]) * position.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_lie_between_samples() {
        let of = |samples: &[f64]| Percentiles::of(samples.to_vec());
        assert_eq!(of(&[7.0]), Percentiles { p10: 7.0, median: 7.0, p90: 7.0 });
        let eleven: Vec<f64> = (0..=10).rev().map(f64::from).collect();
        assert_eq!(of(&eleven), Percentiles { p10: 1.0, median: 5.0, p90: 9.0 });
        assert_eq!(of(&[4.0, 2.0]).median, 3.0);
    }
}
