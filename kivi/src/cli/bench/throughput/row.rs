//! One row of the table: a cache within a number of bytes.

use super::{serve::Measured, workload::Planned};
use crate::cli::{
    bench::report::percentile,
    cache::Cache,
    plot::{Curve, Curves, Panels},
    summary::bytes,
};
use anyhow::Result;
use kivi::{KiviPolicy, ValueResidual, memory};
use serde_json::{Value, json};
use std::path::Path;

/// What one cache did within a number of bytes.
#[derive(Debug, Default)]
pub(super) struct Row {
    /// The cache.
    pub(super) name: String,
    pub(super) kv_memory: usize,
    /// The cache's lengths, for the report.
    config: Value,
    input_tokens: usize,
    output_tokens: usize,
    requests: usize,
    /// Bytes allocated for a sequence of average length at its end.
    sequence_bytes: usize,
    /// What the largest request needs, if that is more than there is; nothing is measured then.
    pub(super) needed_bytes: Option<usize>,
    /// Answers that were compared with those computed alone.
    pub(super) checked_requests: usize,
    /// Tokens per second of one sequence alone.
    pub(super) alone_rate: Option<f64>,
    pub(super) measured: Option<Measured>,
}

/// Mean tokens of a prompt and its answer.
pub(super) fn mean_tokens(requests: &[Planned]) -> f64 {
    requests.iter().map(Planned::tokens).sum::<usize>() as f64 / requests.len() as f64
}

/// Mean tokens of a prompt.
pub(super) fn mean_input(requests: &[Planned]) -> f64 {
    requests.iter().map(|planned| planned.prompt.len()).sum::<usize>() as f64
        / requests.len() as f64
}

impl Row {
    /// A row about to be measured.
    pub(super) fn new(
        name: &str,
        cache: &Cache,
        kv_memory: usize,
        requests: &[Planned],
    ) -> Result<Self> {
        let tokens = mean_tokens(requests).ceil() as usize;
        let config = &cache.config;
        let usage = memory::predict(&cache.pool(tokens)?, &KiviPolicy::new(config), tokens);
        let blocks = config.value_residual() == ValueResidual::Block;
        Ok(Self {
            name: name.into(),
            kv_memory,
            config: json!({
                "group_size": config.group_size(),
                "residual_length": config.residual_length(),
                "sink_length": config.sink_length(),
                "value_residual": if blocks { "block" } else { "window" },
                "page_tokens": config.page_tokens(),
                "segment_tokens": config.segment_tokens(),
            }),
            input_tokens: requests.iter().map(|planned| planned.prompt.len()).sum(),
            output_tokens: requests.iter().map(|planned| planned.output).sum(),
            requests: requests.len(),
            sequence_bytes: usage.allocated(),
            ..Self::default()
        })
    }

    /// Sequences of average length that fit.
    fn predicted_batch(&self) -> usize {
        self.kv_memory / self.sequence_bytes.max(1)
    }

    /// Generated tokens per second, and with those of the prompts.
    fn rates(&self) -> Option<(f64, f64)> {
        let seconds = self.measured.as_ref()?.seconds;
        let all = self.input_tokens + self.output_tokens;
        Some((self.output_tokens as f64 / seconds, all as f64 / seconds))
    }

    /// Largest batch and generated tokens per second over those of another row.
    fn relative_to(&self, other: &Self) -> Option<(f64, f64)> {
        let batch = |row: &Self| Some(row.measured.as_ref()?.stats.max_running as f64);
        Some((batch(self)? / batch(other)?, self.rates()?.0 / other.rates()?.0))
    }

    /// The row of the report; `f16` is the one of the same bytes.
    pub(super) fn json(&self, f16: Option<&Self>) -> Value {
        let mut row = json!({
            "kv_memory_bytes": self.kv_memory,
            "cache": self.name,
            "requests": self.requests,
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "sequence_bytes": self.sequence_bytes,
            "predicted_batch": self.predicted_batch(),
            "skipped": self.measured.is_none(),
            "needed_bytes": self.needed_bytes,
        });
        extend(&mut row, self.config.clone());
        let Some(measured) = &self.measured else { return row };
        let stats = &measured.stats;
        let (rate, total) = self.rates().unzip();
        let (batch_ratio, rate_ratio) = f16.and_then(|f16| self.relative_to(f16)).unzip();
        let milliseconds = |samples: &[f64], share| {
            (!samples.is_empty()).then(|| 1e3 * percentile(samples, share))
        };
        let decoding = measured.decoding;
        let speedup = decoding.rate().zip(self.alone_rate).map(|(batch, alone)| batch / alone);
        extend(
            &mut row,
            json!({
                "seconds": measured.seconds,
                "max_batch": stats.max_running,
                "mean_batch": measured.mean_batch,
                "tokens_per_second": rate,
                "total_tokens_per_second": total,
                "time_to_first_token_p50_ms": milliseconds(&measured.first_token, 0.5),
                "time_to_first_token_p99_ms": milliseconds(&measured.first_token, 0.99),
                "between_tokens_p50_ms": milliseconds(&measured.between, 0.5),
                "between_tokens_p99_ms": milliseconds(&measured.between, 0.99),
                "decode_batch": decoding.batch(),
                "decode_tokens_per_second": decoding.rate(),
                "alone_tokens_per_second": self.alone_rate,
                "decode_speedup_over_alone": speedup,
                "peak_cache_bytes": stats.peak_bytes,
                "resident_bytes_before": measured.resident.map(|(before, _)| before),
                "peak_resident_bytes": measured.resident.map(|(_, peak)| peak),
                "steps": stats.steps,
                "computed_tokens": stats.computed_tokens,
                "reused_tokens": stats.reused_tokens,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
                "swapped_out": stats.swapped_out,
                "recomputed": stats.forgotten,
                "evicted_prefixes": stats.evicted,
                "checked_requests": self.checked_requests,
                "max_batch_relative_to_f16": batch_ratio,
                "throughput_relative_to_f16": rate_ratio,
            }),
        );
        row
    }

    /// The row of the table.
    pub(super) fn line(&self, f16: Option<&Self>) -> String {
        let start =
            format!("{:>10} {:<6} {:>5}", bytes(self.kv_memory), self.name, self.predicted_batch());
        let (Some(measured), Some((rate, total))) = (&self.measured, self.rates()) else {
            let needed = bytes(self.needed_bytes.unwrap_or_default());
            return format!("{start}  skipped: the largest request alone may need {needed}");
        };
        let stats = &measured.stats;
        let milliseconds = |samples: &[f64], share| match samples {
            [] => "-".into(),
            samples => format!("{:.0}", 1e3 * percentile(samples, share)),
        };
        let dash = |value: Option<String>| value.unwrap_or_else(|| "-".into());
        let (batch_ratio, rate_ratio) = f16.and_then(|f16| self.relative_to(f16)).unzip();
        let times = |ratio: Option<f64>| dash(ratio.map(|ratio| format!("{ratio:.2}")));
        let mut line = format!(
            "{start} {:>5} {:>5.1}  {rate:>8.1} {total:>8.1}  {:>6} {:>6} {:>5} {:>5}  {:>10} \
             {:>10}  {:>6} {:>7}",
            stats.max_running,
            measured.mean_batch,
            milliseconds(&measured.first_token, 0.5),
            milliseconds(&measured.first_token, 0.99),
            milliseconds(&measured.between, 0.5),
            milliseconds(&measured.between, 0.99),
            bytes(stats.peak_bytes),
            dash(measured.resident.map(|(_, peak)| bytes(peak as usize))),
            times(batch_ratio),
            times(rate_ratio),
        );
        for (count, what) in [
            (stats.reused_tokens, "tokens reused"),
            (stats.swapped_out, "swapped out"),
            (stats.forgotten, "recomputed"),
            (stats.evicted, "prefixes evicted"),
            (stats.accepted_tokens, "drafts accepted"),
        ] {
            if count > 0 {
                line += &format!("  {count} {what}");
            }
        }
        line
    }

    /// The row in words.
    fn title(&self) -> String {
        format!("{} in {}", self.name, bytes(self.kv_memory))
    }
}

pub(super) const HEADING: &str = " kv memory cache   fits batch  mean  tokens/s    all/s   first    \
    p99  next   p99  peak cache   resident  batch× tokens×";

/// Adds the fields of an object to another.
fn extend(object: &mut Value, fields: Value) {
    if let (Value::Object(object), Value::Object(fields)) = (object, fields) {
        object.extend(fields);
    }
}

/// A mean batch must be larger by this factor to count as larger.
const LARGER: f64 = 1.05;

/// A sequence more must bring this share of what one brought so far, or computing is the limit.
const GAIN: f64 = 0.25;

/// A sentence for each row that ran more sequences at once than another one, of the same bytes or of
/// the same cache, and generated hardly more tokens per second. Of several others, the fastest.
pub(super) fn limits(rows: &[Row]) -> Vec<String> {
    let measured = |row: &Row| Some((row.measured.as_ref()?.mean_batch, row.rates()?.0));
    let of_row = |row: &Row| {
        let (batch, rate) = measured(row)?;
        let comparable =
            |other: &&Row| (other.kv_memory == row.kv_memory) != (other.name == row.name);
        let others = rows.iter().filter(comparable).filter_map(|other| {
            let (fewer, faster) = measured(other)?;
            let enough = faster * (1.0 + GAIN * (batch / fewer - 1.0));
            (batch > LARGER * fewer && rate < enough).then_some((other, fewer, faster))
        });
        let (other, fewer, faster) = others.max_by(|a, b| a.2.total_cmp(&b.2))?;
        let mut line = format!(
            "computing is the limit: {} ran {batch:.1} sequences at once and {} {fewer:.1}, but \
             generated {:.2} times as many tokens per second",
            row.title(),
            other.title(),
            rate / faster
        );
        let decoding = row.measured.as_ref()?.decoding;
        if let (Some(batch), Some(together), Some(alone)) =
            (decoding.batch(), decoding.rate(), row.alone_rate)
        {
            line += &format!(
                "; a step of {batch:.1} sequences generates {:.2} times as many per second as a \
                 sequence alone",
                together / alone
            );
        }
        Some(line)
    };
    rows.iter().filter_map(of_row).collect()
}

/// Draws throughput and largest batch over the bytes, a line for each cache.
pub(super) fn plot(rows: &[Row], path: &Path) -> Result<()> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        if !names.contains(&row.name.as_str()) {
            names.push(&row.name);
        }
    }
    let series = |of: &dyn Fn(&Row) -> Option<f64>| {
        let curve = |name: &&str| {
            let own = rows.iter().filter(|row| row.name == *name);
            let point = |row: &Row| Some((row.kv_memory as f64 / f64::from(1 << 20), of(row)?));
            Curve { name: (*name).into(), points: own.filter_map(point).collect(), joined: true }
        };
        names.iter().map(curve).collect()
    };
    let curves = |title, y, series| Curves { title, x: "cache, MiB", y, series };
    let throughput = series(&|row| Some(row.rates()?.0));
    let batch = series(&|row| Some(row.measured.as_ref()?.stats.max_running as f64));
    Panels(vec![
        curves("Throughput", "generated tokens per second", throughput),
        curves("Largest batch", "sequences at once", batch),
    ])
    .save(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, kv_memory: usize, batch: usize, seconds: f64) -> Row {
        let mut measured = Measured { seconds, mean_batch: batch as f64, ..Measured::default() };
        measured.stats.max_running = batch;
        Row {
            name: name.into(),
            kv_memory,
            output_tokens: 600,
            measured: Some(measured),
            ..Row::default()
        }
    }

    #[test]
    fn a_larger_batch_that_is_hardly_faster_is_told() {
        let mib = 1 << 20;
        let rows = [
            row("f16", 8 * mib, 2, 10.0),
            row("kivi2", 8 * mib, 8, 12.0),
            row("f16", 16 * mib, 4, 5.0),
            row("kivi2", 16 * mib, 16, 2.5),
            row("f16", 64 * mib, 8, 4.5),
            // Neither of the same bytes nor of the same cache as the fast one.
            row("kivi4", 32 * mib, 30, 100.0),
        ];
        let [line, hardly] = &limits(&rows)[..] else { panic!("{:?}", limits(&rows)) };
        assert_eq!(
            hardly,
            "computing is the limit: f16 in 64.0 MiB ran 8.0 sequences at once and f16 in 16.0 MiB \
             4.0, but generated 1.11 times as many tokens per second"
        );
        assert_eq!(
            line,
            "computing is the limit: kivi2 in 8.0 MiB ran 8.0 sequences at once and f16 in 8.0 MiB \
             2.0, but generated 0.83 times as many tokens per second"
        );
        let ratios = rows[3].relative_to(&rows[2]);
        assert_eq!(ratios, Some((4.0, 2.0)));
        assert!(limits(&[Row::default(), row("f16", 1, 1, 1.0)]).is_empty());
    }

    #[test]
    fn rows_that_were_skipped_say_what_is_needed() {
        let row = Row { needed_bytes: Some(3 << 20), kv_memory: 1 << 20, ..Row::default() };
        assert!(row.line(None).contains("1.0 MiB") && row.line(None).contains("need 3.0 MiB"));
        let json = row.json(None);
        assert_eq!((&json["skipped"], &json["needed_bytes"]), (&true.into(), &(3 << 20).into()));
        assert!(json["max_batch"].is_null());
    }
}
