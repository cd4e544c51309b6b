//! `cargo xtask repro`: tables and figures of the paper (arXiv 2402.02750) on a model at hand, the
//! paper's row beside ours.
//!
//! The paper's models have 7 to 13 billion parameters; whatever runs here is named in every heading,
//! and only the direction of a difference can be compared.

mod paper;

use crate::report::{Check, Problem, Report};
use crate::shell::{command, kivi, output, root};
use clap::{Args, Subcommand};
use serde_json::Value;
use std::path::{Path, PathBuf};

#[derive(Args)]
pub(crate) struct Repro {
    #[command(subcommand)]
    table: Table,
    /// The model, as kivi takes it.
    #[arg(long, global = true, default_value = "smollm2-135m")]
    model: String,
    /// Folder with `wikitext2-test.txt` and `gsm8k-test.jsonl`.
    #[arg(long, global = true, default_value = "../shared/data")]
    data: PathBuf,
    /// Ask only so many questions, measure only so many chunks.
    #[arg(long, global = true)]
    limit: Option<usize>,
    /// Threads.
    #[arg(long, global = true, default_value_t = 0)]
    threads: usize,
    /// Also write the table to a Markdown file, and plots beside it.
    #[arg(long, global = true)]
    out: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Table {
    /// Table 1: per-token and per-channel grouping of keys and values
    Table1,
    /// Table 2: errors of keys, values and attention
    Table2,
    /// Table 3: CoQA, TruthfulQA and GSM8K
    Table3 {
        /// CoQA in the format of `kivi eval qa`.
        #[arg(long)]
        coqa: Option<PathBuf>,
        /// TruthfulQA in the format of `kivi eval choice`.
        #[arg(long)]
        truthfulqa: Option<PathBuf>,
    },
    /// Table 4: LongBench
    Longbench {
        /// The data sets, JSONL.
        #[arg(long)]
        file: PathBuf,
    },
    /// Figure 4: needle in a haystack
    Needle,
    /// Table 5, above: group sizes
    GroupSize,
    /// Table 5, below: residual lengths
    ResidualLength,
    /// Figure 5: memory and throughput by batch
    Throughput {
        /// Bytes for all cached keys and values.
        #[arg(long, default_value = "12MiB,24MiB,48MiB,96MiB")]
        kv_memory: String,
    },
    /// The quality page: perplexity of every format
    Formats,
}

/// A cache of the tables and the options that ask for it.
type Cache = (&'static str, &'static [&'static str]);

const F16: Cache = ("f16", &["--cache", "f16"]);
const KIVI4: Cache = ("kivi4", &["--cache", "kivi4"]);
const KIVI2: Cache = ("kivi2", &["--cache", "kivi2"]);
const PLUS: Cache = ("kivi2+", &["--cache", "kivi2+"]);

impl Repro {
    pub(crate) fn run(&self, report: &mut Report) {
        report.step("build", crate::cargo::build_kivi);
        let (name, table): (_, fn(&Self) -> Check) = match &self.table {
            Table::Table1 => ("Table 1", Self::table1),
            Table::Table2 => ("Table 2", Self::table2),
            Table::Table3 { .. } => ("Table 3", Self::table3),
            Table::Longbench { .. } => ("Table 4", Self::longbench),
            Table::Needle => ("Figure 4", Self::needle),
            Table::GroupSize => ("Table 5: group sizes", Self::group_size),
            Table::ResidualLength => ("Table 5: residual lengths", Self::residual_length),
            Table::Throughput { .. } => ("Figure 5", Self::throughput),
            Table::Formats => ("formats", Self::formats),
        };
        report.step(name, || table(self));
    }

    /// Runs kivi and reads its JSON object.
    fn kivi<S: AsRef<std::ffi::OsStr>>(&self, arguments: &[S]) -> Result<Value, Problem> {
        let mut command = command(kivi()?, arguments);
        command.args(["--model", &self.model, "--json"]);
        command.args(["--threads", &self.threads.to_string()]);
        let text = output(command)?;
        serde_json::from_str(&text)
            .map_err(|error| Problem::failed(format!("kivi printed no JSON: {error}")))
    }

    /// A file of the data folder.
    fn file(&self, name: &str) -> Result<String, Problem> {
        let path = root().join(&self.data).join(name);
        if path.is_file() {
            return Ok(path.to_string_lossy().into_owned());
        }
        Err(Problem::skipped(format!(
            "{} is not there; see --data",
            self.data.join(name).display()
        )))
    }

    /// Prints a table and writes it where it was asked for.
    fn publish(&self, title: &str, lines: &[String]) -> Check {
        let mut text = format!("## {title}\n\nOurs: {} on WikiText-2", self.model);
        text += " and GSM8K where those are named; the paper's figures are of the models it names.";
        if let Some(limit) = self.limit {
            text += &format!(" Limited to {limit} chunks of text, or questions.");
        }
        text += "\n\n";
        for line in lines {
            text += line;
            text.push('\n');
        }
        println!("\n{text}");
        if let Some(path) = &self.out {
            std::fs::write(path, &text).map_err(|error| {
                Problem::failed(format!("cannot write {}: {error}", path.display()))
            })?;
        }
        Ok(String::new())
    }

    /// Rows of `kivi eval errors`.
    fn errors(&self) -> Result<Vec<Value>, Problem> {
        let text = self.file("wikitext2-test.txt")?;
        let object = self.kivi(&["eval", "errors", "--file", &text])?;
        Ok(object["rows"].as_array().cloned().unwrap_or_default())
    }

    fn table1(&self) -> Check {
        self.publish("Table 1: which way to group", &table1(&self.errors()?))
    }

    fn table2(&self) -> Check {
        self.publish("Table 2: errors", &table2(&self.errors()?))
    }

    /// One score of an evaluation in percent, or why there is none.
    fn score(&self, arguments: &[&str], cache: Cache, score: &str) -> Result<String, Problem> {
        let mut all = arguments.to_vec();
        all.extend(cache.1);
        let limit = self.limit.map(|limit| limit.to_string());
        if let Some(limit) = &limit {
            all.extend(["--limit", limit]);
        }
        let object = self.kivi(&all)?;
        Ok(percent(&object["scores"][score]))
    }

    fn table3(&self) -> Check {
        let Table::Table3 { coqa, truthfulqa } = &self.table else { return Ok(String::new()) };
        let gsm8k = self.file("gsm8k-test.jsonl")?;
        let of_file = |name: &str, path: &Option<PathBuf>, cache, score| match path {
            Some(path) => {
                let path = path.to_string_lossy();
                self.score(&["eval", name, "--file", &path], cache, score)
            }
            None => Ok("-".into()),
        };
        let mut lines = vec![
            "| cache | paper, Llama-2-7B: CoQA | TruthfulQA | GSM8K | Llama-2-13B: CoQA | TruthfulQA | \
             GSM8K | ours: CoQA (exact match) | TruthfulQA (mc1) | GSM8K |"
                .into(),
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|".into(),
        ];
        for (cache, row) in [F16, KIVI4, KIVI2].into_iter().zip(paper::TABLE_3) {
            let [a, b, c, d, e, f] = row;
            lines.push(format!(
                "| {} | {a} | {b} | {c} | {d} | {e} | {f} | {} | {} | {} |",
                cache.0,
                of_file("qa", coqa, cache, "exact_match")?,
                of_file("choice", truthfulqa, cache, "mc1")?,
                self.score(&["eval", "gsm8k", "--file", &gsm8k], cache, "correct")?,
            ));
        }
        lines.push(format!(
            "| kivi2+ | | | | | | | {} | {} | {} |",
            of_file("qa", coqa, PLUS, "exact_match")?,
            of_file("choice", truthfulqa, PLUS, "mc1")?,
            self.score(&["eval", "gsm8k", "--file", &gsm8k], PLUS, "correct")?,
        ));
        self.publish("Table 3: generation", &lines)
    }

    fn longbench(&self) -> Check {
        let Table::Longbench { file } = &self.table else { return Ok(String::new()) };
        let file = file.to_string_lossy();
        let mut lines = vec![
            "| cache | paper, Llama2-7B, average of 8 | Mistral-7B | ours, average of the file |"
                .into(),
            "|---|---:|---:|---:|".into(),
        ];
        for (cache, [llama, mistral]) in [F16, KIVI4, KIVI2].into_iter().zip(paper::TABLE_4) {
            let score = self.score(&["eval", "longbench", "--file", &file], cache, "score")?;
            lines.push(format!("| {} | {llama} | {mistral} | {score} |", cache.0));
        }
        self.publish("Table 4: LongBench", &lines)
    }

    fn needle(&self) -> Check {
        let mut lines = vec!["| cache | needles found, % |".into(), "|---|---:|".into()];
        for cache in [F16, KIVI4, KIVI2, PLUS] {
            let mut arguments = vec!["eval", "needle"];
            let plot = self.out.as_deref().and_then(Path::parent).map(|folder| {
                folder.join(format!("needle-{}.svg", cache.0)).to_string_lossy().into_owned()
            });
            if let Some(plot) = &plot {
                arguments.extend(["--plot", plot]);
            }
            lines.push(format!("| {} | {} |", cache.0, self.score(&arguments, cache, "found")?));
        }
        lines.push(String::new());
        lines.push("The paper shows maps without figures: 2 bits find what 16 bits find.".into());
        self.publish("Figure 4: needle in a haystack", &lines)
    }

    /// Perplexity and bits per element over some cache.
    fn perplexity(&self, options: &[&str]) -> Result<(f64, f64, f64), Problem> {
        let text = self.file("wikitext2-test.txt")?;
        let chunks = self.limit.unwrap_or(4).to_string();
        let mut arguments = vec!["eval", "perplexity", "--file", &text, "--chunks", &chunks];
        arguments.extend(options);
        let object = self.kivi(&arguments)?;
        let number = |key: &str| {
            object[key].as_f64().ok_or_else(|| Problem::failed(format!("kivi printed no {key}")))
        };
        Ok((number("perplexity")?, number("bits_per_element")?, number("bits_per_element_limit")?))
    }

    fn group_size(&self) -> Check {
        self.ablation("group size", "--group-size", paper::TABLE_5_GROUP)
    }

    fn residual_length(&self) -> Check {
        self.ablation("residual length", "--residual-length", paper::TABLE_5_RESIDUAL)
    }

    fn ablation(&self, name: &str, option: &str, rows: &[(&str, &str)]) -> Check {
        let mut lines = vec![
            format!(
                "| {name} | paper, Llama-2-13B: GSM8K | ours: perplexity of WikiText-2 | bits at the end |"
            ),
            "|---|---:|---:|---:|".into(),
        ];
        for &(length, gsm8k) in rows {
            let (perplexity, bits, _) = self.perplexity(&["--cache", "kivi2", option, length])?;
            lines.push(format!("| {length} | {gsm8k} | {perplexity:.2} | {bits:.2} |"));
        }
        self.publish(&format!("Table 5: {name}"), &lines)
    }

    fn throughput(&self) -> Check {
        let Table::Throughput { kv_memory } = &self.table else { return Ok(String::new()) };
        let requests = self.limit.unwrap_or(64).to_string();
        let workload = ["--input", "161", "--output", "338", "--requests", &requests];
        let caches = ["--caches", "f16,kivi4,kivi2", "--residual-length", "32"];
        let plot = self.out.as_deref().and_then(Path::parent);
        let plot = plot.map(|folder| folder.join("throughput.svg").to_string_lossy().into_owned());
        let mut arguments = vec!["bench", "throughput", "--kv-memory", kv_memory];
        arguments.extend(workload.into_iter().chain(caches));
        if let Some(plot) = &plot {
            arguments.extend(["--plot", plot]);
        }
        let object = self.kivi(&arguments)?;
        let mut lines = vec![
            "| cache, MiB | | sequences that fit | largest batch | mean batch | tokens per second | \
             over f16 | peak of resident memory, MiB |"
                .into(),
            "|---:|---|---:|---:|---:|---:|---:|---:|".into(),
        ];
        for row in object["rows"].as_array().into_iter().flatten() {
            let number = |key: &str, digits| {
                row[key].as_f64().map_or("-".into(), |number| format!("{number:.digits$}"))
            };
            let mib = |key: &str| {
                let bytes = row[key].as_f64();
                bytes.map_or("-".into(), |bytes| format!("{:.0}", bytes / f64::from(1 << 20)))
            };
            lines.push(format!(
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                mib("kv_memory_bytes"),
                row["cache"].as_str().unwrap_or_default(),
                number("predicted_batch", 0),
                number("max_batch", 0),
                number("mean_batch", 1),
                number("tokens_per_second", 1),
                number("throughput_relative_to_f16", 2),
                mib("peak_resident_bytes"),
            ));
        }
        lines.push(String::new());
        for limit in object["limits"].as_array().into_iter().flatten() {
            lines.push(format!("- {}", limit.as_str().unwrap_or_default()));
        }
        lines.push(String::new());
        lines.push(
            "161 tokens in and 338 out, R = 32. The paper, Llama-2-7B on an A100 with as many \
             sequences as fit: 4 times larger batches, 2.35 to 3.47 times the throughput."
                .into(),
        );
        self.publish("Figure 5: memory and throughput", &lines)
    }

    fn formats(&self) -> Check {
        let mut lines = vec![
            "| cache | perplexity | bits at the end | in the limit |".into(),
            "|---|---:|---:|---:|".into(),
        ];
        const K4V2: Cache =
            ("keys kivi4, values kivi2", &["--cache-type-k", "kivi4", "--cache-type-v", "kivi2"]);
        const K2V4: Cache =
            ("keys kivi2, values kivi4", &["--cache-type-k", "kivi2", "--cache-type-v", "kivi4"]);
        const KIVI8: Cache = ("kivi8", &["--cache", "kivi8"]);
        for (name, options) in [F16, KIVI8, KIVI4, K4V2, K2V4, KIVI2, PLUS] {
            let (perplexity, bits, limit) = self.perplexity(options)?;
            lines.push(format!("| {name} | {perplexity:.2} | {bits:.2} | {limit:.2} |"));
        }
        self.publish("Formats", &lines)
    }
}

/// Lines of Table 1 with the rows of `kivi eval errors`.
fn table1(rows: &[Value]) -> Vec<String> {
    let error = |tensor: &str, bits: u64, grouping: &str| {
        percent(&find(rows, tensor, bits, grouping)["attention_output_error"])
    };
    let mut lines = vec![
        "The paper quantizes everything, without a residual. Ours: error of the attention output \
         with only the keys, and only the values, quantized so."
            .into(),
        String::new(),
        "| configuration | paper, Llama-2-13B: CoQA | TruthfulQA | ours: keys, % | values, % |"
            .into(),
        "|---|---:|---:|---:|---:|".into(),
    ];
    for (name, bits, [keys, values], [coqa, truthful]) in paper::TABLE_1 {
        lines.push(format!(
            "| {name} | {coqa} | {truthful} | {} | {} |",
            error("keys", bits, keys),
            error("values", bits, values)
        ));
    }
    lines
}

/// Lines of Table 2 with the same rows.
fn table2(rows: &[Value]) -> Vec<String> {
    let mut lines = vec![
        "| 2 bits | paper, Llama-2-13B: itself | attention | ours: itself, % | attention weights, \
         % | attention output, % |"
            .into(),
        "|---|---:|---:|---:|---:|---:|".into(),
    ];
    for (tensor, grouping, [itself, attention]) in paper::TABLE_2 {
        let row = find(rows, tensor, 2, grouping);
        lines.push(format!(
            "| {tensor} {grouping} | {itself} | {attention} | {} | {} | {} |",
            percent(&row["reconstruction_error"]),
            percent(&row["attention_weights_error"]),
            percent(&row["attention_output_error"]),
        ));
    }
    lines.push(String::new());
    lines.push(
        "The paper's attention error is that of the weights for keys; for values it says that \
         the output error per token is almost 15 times smaller than per channel."
            .into(),
    );
    lines
}

/// The row of `kivi eval errors` for a tensor, a width and a grouping.
fn find<'a>(rows: &'a [Value], tensor: &str, bits: u64, grouping: &str) -> &'a Value {
    let is = |row: &&Value| {
        row["tensor"] == tensor && row["bits"] == bits && row["grouping"] == grouping
    };
    rows.iter().find(is).unwrap_or(&Value::Null)
}

/// A share in percent, or a dash.
fn percent(value: &Value) -> String {
    value.as_f64().map_or("-".into(), |share| format!("{:.2}", 100.0 * share))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn rows_are_found_by_what_they_are_of() {
        let row = |grouping: &str, error: f64| json!({"tensor": "keys", "bits": 2, "grouping": grouping, "attention_output_error": error});
        let rows = [row("per token", 0.5), row("per channel", 0.125)];
        let found = find(&rows, "keys", 2, "per channel");
        assert_eq!(percent(&found["attention_output_error"]), "12.50");
        assert_eq!(percent(&find(&rows, "values", 2, "per channel")["x"]), "-");
        let line = "| 2 bits, both per token | 52.93 | 24.98 | 50.00 | - |";
        assert!(table1(&rows).iter().any(|found| found == line), "{:?}", table1(&rows));
        let line = "| keys per channel | 4.55 | 9.60 | - | - | 12.50 |";
        assert!(table2(&rows).iter().any(|found| found == line), "{:?}", table2(&rows));
    }
}
