//! What was measured: samples by case and column, read from the programs' JSON.

use crate::report::Problem;
use serde_json::{Value, json};

/// A program and its cache format: a column of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Column {
    pub(super) program: &'static str,
    pub(super) format: &'static str,
}

pub(super) const LLAMA: &str = "llama.cpp";
pub(super) const KIVI: &str = "kivi";
/// In the order of the tables: the most bits first.
pub(super) const COLUMNS: [Column; 7] = [
    Column { program: LLAMA, format: "f16" },
    Column { program: LLAMA, format: "q8_0" },
    Column { program: LLAMA, format: "q4_0" },
    Column { program: KIVI, format: "f16" },
    Column { program: KIVI, format: "kivi8" },
    Column { program: KIVI, format: "kivi4" },
    Column { program: KIVI, format: "kivi2" },
];

/// The position of a column.
pub(super) fn column(program: &str, format: &str) -> Option<usize> {
    COLUMNS.iter().position(|column| column.program == program && column.format == format)
}

/// The formats of one program.
pub(super) fn formats(program: &str) -> impl Iterator<Item = &'static str> {
    COLUMNS.iter().filter(move |column| column.program == program).map(|column| column.format)
}

/// The shape of one attention call: a query token, `tokens` in the cache, one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) tokens: u64,
    pub(super) query_heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
}

impl Shape {
    fn matches(&self, row: &Value) -> bool {
        row["tokens"] == self.tokens
            && row["query_heads"] == self.query_heads
            && row["kv_heads"] == self.kv_heads
            && row["head_dim"] == self.head_dim
    }
}

/// One case, in every column: `samples[column]` has one value per round.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Measured<K> {
    pub(super) case: K,
    samples: [Vec<f64>; COLUMNS.len()],
    bytes: [Option<u64>; COLUMNS.len()],
}

impl<K> Measured<K> {
    pub(super) fn new(case: K) -> Self {
        Self { case, samples: Default::default(), bytes: Default::default() }
    }

    /// The median over the rounds, or `None` where nothing was measured.
    pub(super) fn median(&self, column: usize) -> Option<f64> {
        median(self.samples[column].clone())
    }

    fn add(&mut self, column: usize, value: f64) -> Result<(), Problem> {
        if !(value.is_finite() && value > 0.0) {
            return Err(Problem::failed(format!("a measurement of {value}")));
        }
        self.samples[column].push(value);
        Ok(())
    }

    /// Every column as a JSON object, added to those of the case.
    fn columns(&self, case: &Value, value_name: &str) -> Vec<Value> {
        let column = |(index, column): (usize, &Column)| {
            let mut row = case.clone();
            row["program"] = json!(column.program);
            row["format"] = json!(column.format);
            row[value_name] = json!(self.median(index)?);
            row["samples"] = json!(self.samples[index]);
            if let Some(bytes) = self.bytes[index] {
                row["bytes"] = json!(bytes);
            }
            Some(row)
        };
        COLUMNS.iter().enumerate().filter_map(column).collect()
    }
}

/// Milliseconds of one attention call.
impl Measured<Shape> {
    /// Reads what `tools/peers/attention.cpp` printed: one object per line.
    pub(super) fn add_llama_cpp(&mut self, text: &str) -> Result<(), Problem> {
        let rows = text.lines().map(parse).collect::<Result<Vec<Value>, Problem>>()?;
        self.add_rows(LLAMA, &rows, "cache", "bytes")
    }

    /// Reads what `kivi bench attention` wrote.
    pub(super) fn add_kivi(&mut self, text: &str) -> Result<(), Problem> {
        self.add_rows(KIVI, &rows(parse(text)?)?, "format", "bytes_read")
    }

    fn add_rows(
        &mut self,
        program: &str,
        rows: &[Value],
        format_name: &str,
        bytes_name: &str,
    ) -> Result<(), Problem> {
        expect_all(program, rows, format_name)?;
        for row in rows {
            if !self.case.matches(row) {
                return Err(Problem::failed(format!("asked for {:?}, got {row}", self.case)));
            }
            let index = known_column(program, row, format_name)?;
            self.add(index, number(row, "milliseconds")?)?;
            self.bytes[index] = row[bytes_name].as_u64();
        }
        Ok(())
    }

    pub(super) fn to_json(&self) -> Vec<Value> {
        let Shape { tokens, query_heads, kv_heads, head_dim } = self.case;
        let case = json!({
            "tokens": tokens,
            "query_heads": query_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        });
        self.columns(&case, "milliseconds")
    }
}

/// Tokens in the cache before the first generated one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Depth(pub(super) u64);

/// Generated tokens per second.
impl Measured<Depth> {
    /// Reads what `llama-bench -o json` printed for one cache type; returns when it ran and the
    /// commit it was built from.
    pub(super) fn add_llama_bench(&mut self, text: &str) -> Result<Run, Problem> {
        let rows = rows(parse(text)?)?;
        let [row] = rows.as_slice() else {
            return Err(Problem::failed(format!("llama-bench printed {} results", rows.len())));
        };
        let string = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
        if row["n_depth"] != self.case.0 || row["type_k"] != row["type_v"] {
            return Err(Problem::failed(format!("llama-bench measured something else: {row}")));
        }
        let index = known_column(LLAMA, row, "type_k")?;
        // kivi reports the median of its repeats, too.
        let samples = row["samples_ts"].as_array().into_iter().flatten();
        let samples = samples.filter_map(Value::as_f64).collect();
        let speed = median(samples)
            .ok_or_else(|| Problem::failed(format!("llama-bench gave no samples: {row}")))?;
        self.add(index, speed)?;
        Ok(Run { time: string("test_time"), commit: string("build_commit") })
    }

    /// Reads what `kivi bench generate` wrote.
    pub(super) fn add_kivi(&mut self, text: &str) -> Result<(), Problem> {
        let rows = rows(parse(text)?)?;
        expect_all(KIVI, &rows, "format")?;
        for row in &rows {
            if row["depth"] != self.case.0 {
                return Err(Problem::failed(format!("asked for {:?}, got {row}", self.case)));
            }
            let index = known_column(KIVI, row, "format")?;
            self.add(index, number(row, "generation_tokens_per_second")?)?;
        }
        Ok(())
    }

    pub(super) fn to_json(&self) -> Vec<Value> {
        self.columns(&json!({ "depth": self.case.0 }), "tokens_per_second")
    }
}

/// What llama-bench says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) time: String,
    pub(super) commit: String,
}

/// The middle value, or the mean of the two middle ones.
fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().checked_sub(1)? / 2, values.len() / 2);
    Some(f64::midpoint(values[low], values[high]))
}

fn parse(text: &str) -> Result<Value, Problem> {
    serde_json::from_str(text).map_err(|error| Problem::failed(format!("no JSON: {error}: {text}")))
}

/// The rows of a result: a list, or the list `rows` of an object.
fn rows(value: Value) -> Result<Vec<Value>, Problem> {
    match value {
        Value::Array(rows) => Ok(rows),
        Value::Object(mut object) => match object.remove("rows") {
            Some(Value::Array(rows)) => Ok(rows),
            _ => Err(Problem::failed("the JSON object has no list of rows")),
        },
        other => Err(Problem::failed(format!("neither a JSON list nor an object: {other}"))),
    }
}

/// One row for every format of the program, no more.
fn expect_all(program: &str, rows: &[Value], format_name: &str) -> Result<(), Problem> {
    let mut found: Vec<&str> = rows.iter().filter_map(|row| row[format_name].as_str()).collect();
    let mut expected: Vec<&str> = formats(program).collect();
    found.sort_unstable();
    expected.sort_unstable();
    if found == expected {
        Ok(())
    } else {
        Err(Problem::failed(format!("{program} measured {found:?} instead of {expected:?}")))
    }
}

fn known_column(program: &str, row: &Value, format_name: &str) -> Result<usize, Problem> {
    let format = row[format_name].as_str().unwrap_or_default();
    column(program, format)
        .ok_or_else(|| Problem::failed(format!("{program} measured an unknown format: {row}")))
}

fn number(row: &Value, key: &str) -> Result<f64, Problem> {
    row[key].as_f64().ok_or_else(|| Problem::failed(format!("no number {key} in {row}")))
}

#[cfg(test)]
#[path = "results_tests.rs"]
mod tests;
