//! `kivi bench`: fields of the JSON objects on small shapes, and wrong input.

use serde_json::Value;
use std::process::{Command, Output, Stdio};

const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../kivi-models/tests/golden/models/llama3-tiny");

fn kivi(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kivi"));
    command.arg("bench").args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KIVI_") {
            command.env_remove(name);
        }
    }
    command.output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let Output { status, stdout, stderr } = kivi(arguments);
    assert!(status.success(), "{}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

/// Asserts that the program refuses with this exit code, in one line that contains all `words`.
fn refused(code: i32, arguments: &[&str], words: &[&str]) {
    let Output { status, stdout, stderr } = kivi(arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    let context = format!("kivi bench {}\n{stderr}", arguments.join(" "));
    assert_eq!(status.code(), Some(code), "{context}");
    assert!(stdout.is_empty() && !stderr.contains("panicked"), "{context}");
    let errors: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("not one error line: {context}") };
    for word in words {
        assert!(error.contains(word), "{word:?} is missing: {context}");
    }
}

fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("no number {key} in {row}"))
}

#[test]
fn attention_rows() {
    // One layer of 300 tokens would fit in any cache; four calls are made per row.
    let base = ["attention", "--tokens", "300", "--heads", "4/2,3/1", "--head-dim", "64"];
    let options = ["--format", "kivi4:kivi2,f16", "--batch", "2", "--repeats", "4", "--json", "-"];
    let limit = ["--memory-limit", "1GiB"];
    let report = json(&[&base[..], &options, &limit].concat());
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    assert!(report["machine"].is_object() && report["date"].is_string());
    let cache = number(&report, "last_level_cache_bytes");
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for (index, row) in rows.iter().enumerate() {
        // The baseline comes first.
        let f16 = index % 2 == 0;
        assert_eq!(row["format"], if f16 { "f16" } else { "kivi4:kivi2" });
        assert_eq!((&row["tokens"], &row["batch"]), (&300.into(), &2.into()));
        assert_eq!(row["skipped"], false);
        let kv_heads = number(row, "kv_heads");
        // f16: keys and values of 64 channels. Otherwise 256 keys and 171 values are codes, with
        // 32 + 8 and 16 + 8 bytes each.
        let head = if f16 { 300 * 256 } else { 256 * 40 + 171 * 24 + (44 + 129) * 128 };
        let read = 2.0 * kv_heads * f64::from(head);
        assert_eq!(number(row, "bytes_read"), read);
        // As far as a server's cache of hundreds of MiB lets memory suffice.
        let (memory, limit) = (number(row, "needed_bytes"), f64::from(1u32 << 30));
        assert!(read * number(row, "layers") >= 4.0 * cache || memory > 0.99 * limit, "{row}");
        assert!(memory <= limit, "{row}");
        assert_eq!(number(row, "calls"), 4.0);

        let milliseconds = number(row, "milliseconds");
        assert!(milliseconds > 0.0);
        assert!(number(row, "milliseconds_p10") <= milliseconds);
        assert!(number(row, "milliseconds_p90") >= milliseconds);
        let rate = number(row, "gigabytes_per_second");
        assert!((rate * milliseconds * 1e6 / read - 1.0).abs() < 1e-9);
        let share = number(row, "share_of_read_speed");
        assert!(share > 0.0 && share.is_finite(), "{row}");
        assert!((rate / number(row, "read_gigabytes_per_second") / share - 1.0).abs() < 1e-9);
        let error = number(row, "relative_error");
        assert!(error > 0.0 && error <= 1e-3, "not checked? {row}");
        let ratio = number(row, "speed_relative_to_f16");
        assert!(if f16 { ratio == 1.0 } else { ratio > 0.0 });
        assert!(number(row, "threads") >= 1.0 && row["isa"].is_string());
    }
}

#[test]
fn several_queries_and_sinks_are_checked_too() {
    // At 258 tokens a key block is quantized between two of the queries.
    let base = ["attention", "--tokens", "258", "--heads", "2/1", "--head-dim", "80"];
    let options = ["--queries", "5", "--sinks", "4", "--residual", "64", "--repeats", "1"];
    let formats = ["--format", "kivi2,kivi8:f16,kivi2+0.25:kivi2", "--device", "cpu", "--json"];
    let limit = ["--memory-limit", "512MiB"];
    let report = json(&[&base[..], &limit, &options, &formats].concat());
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert!(number(row, "relative_error") <= 1e-3);
        // There is no baseline.
        assert!(row["speed_relative_to_f16"].is_null());
    }
}

#[test]
fn a_row_that_does_not_fit_is_skipped_and_says_so() {
    let base = ["attention", "--tokens", "1048576", "--heads", "32/32", "--format", "f16"];
    let options = ["--memory-limit", "1MiB"];
    let report = json(&[&base[..], &options, &["--json", "-"]].concat());
    let row = &report["rows"][0];
    assert_eq!(row["skipped"], true);
    // Keys and values of 2²⁰ tokens, 32 heads, 128 channels, 2 bytes: 16 GiB, and more to fill it.
    assert!(number(row, "needed_bytes") >= 16.0 * (1u64 << 30) as f64);
    assert!(row["milliseconds"].is_null());
    let output = kivi(&[&base[..], &options].concat());
    let table = String::from_utf8(output.stdout).unwrap();
    let line = table.lines().last().unwrap();
    assert!(line.contains("skipped") && line.contains("GiB") && line.contains("1.0 MiB"), "{line}");
}

#[test]
fn a_file_gets_the_object_and_standard_output_the_table() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("rows.json");
    let base = ["attention", "--tokens", "64", "--heads", "1/1", "--head-dim", "16"];
    let options = ["--memory-limit", "0", "--json", path.to_str().unwrap()];
    let output = kivi(&[&base[..], &options].concat());
    assert!(output.status.success());
    assert!(String::from_utf8(output.stdout).unwrap().contains("tokens   heads"));
    let report: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    assert_eq!(report["rows"].as_array().unwrap().len(), 5);
}

#[test]
fn wrong_options_of_attention() {
    for (options, words) in [
        (&["--tokens", "0"][..], &["--tokens", "'0'", "from 1 to 16777216"][..]),
        (&["--tokens", "99999999999999999999"], &["16777216"]),
        (&["--heads", "7/2"], &["7 query heads", "not a multiple of 2 kv heads"]),
        (&["--heads", "32"], &["32/8"]),
        (&["--heads", "100000/1"], &["4096"]),
        (&["--head-dim", "0"], &["from 1 to 4096"]),
        (&["--format", "kivi3"], &["kivi3", "kivi2, kivi4"]),
        (&["--format", "kivi4:"], &["kivi2, kivi4"]),
        (&["--batch", "0"], &["--batch", "'0'", "from 1 to 4096"]),
        (&["--repeats", "0"], &["--repeats", "'0'"]),
        (&["--seconds", "-1"], &["--seconds"]),
        (&["--memory-limit", "much"], &["much", "4GiB"]),
    ] {
        refused(2, &[&["attention"], options].concat(), words);
    }
    for (options, words) in [
        (&["--tokens", "4", "--queries", "5"][..], &["5 queries", "4 tokens"][..]),
        (&["--group-size", "48"], &["group-size: 48", "16, 32, 64 or 128"]),
        (&["--residual", "100"], &["residual-length: 100", "multiple"]),
        (&["--json", "/no/such/folder/file"], &["cannot write", "/no/such/folder/file"]),
        (&["--threads", "100000"], &["threads", "100000", "1024"]),
    ] {
        refused(1, &[&["attention"], options].concat(), words);
    }
}

#[test]
fn generation_rows() {
    let base = ["generate", "--model", MODEL, "--prompt", "48", "--depth", "0,200"];
    let options = ["--generate", "4", "--repeats", "2", "--batch", "3", "--format", "f16,kivi2"];
    let report = json(&[&base[..], &options, &["--json", "-"]].concat());
    let (layers, kv_heads, head_dim) =
        (number(&report, "layers"), number(&report, "kv_heads"), number(&report, "head_dim"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for (index, row) in rows.iter().enumerate() {
        let f16 = index % 2 == 0;
        assert_eq!(row["format"], if f16 { "f16" } else { "kivi2" });
        let depth = if index < 2 { 0.0 } else { 200.0 };
        assert_eq!(number(row, "depth"), depth);
        assert_eq!((number(row, "batch"), number(row, "prompt_tokens")), (3.0, 48.0));
        assert!(number(row, "prompt_tokens_per_second") > 0.0);
        let rate = number(row, "generation_tokens_per_second");
        // Three sequences advance by a token in each step.
        assert!((rate * number(row, "milliseconds_per_step") / 3000.0 - 1.0).abs() < 1e-9);
        let in_use = number(&row["cache_bytes"], "in_use");
        let f16_bytes = 3.0 * depth * layers * kv_heads * head_dim * 2.0 * 2.0;
        assert!(if f16 { in_use == f16_bytes } else { in_use < f16_bytes || depth == 0.0 });
        assert!(number(&row["cache_bytes"], "allocated") >= in_use);
    }
}

#[test]
fn wrong_options_of_generate() {
    let base = ["generate", "--model", MODEL];
    for (options, words) in [
        (&["--batch", "0"][..], &["--batch", "'0'"][..]),
        (&["--generate", "0"], &["--generate", "'0'"]),
        (&["--prompt", "0"], &["--prompt", "'0'"]),
        (&["--format", "q4_0"], &["q4_0", "kivi2"]),
        (&["--depth", "x"], &["--depth", "'x'"]),
    ] {
        refused(2, &[&base[..], options].concat(), words);
    }
    for (options, words) in [
        (&["--prompt", "513"][..], &["513", "512"][..]),
        (&["--depth", "0,490"], &["490", "32", "512"]),
        (&["--depth", "16777216"], &["16777216", "512"]),
        (&["--prompt", "8", "--depth", "0", "--residual", "100"], &["residual-length: 100"]),
        (&["--model", "no-such-model.gguf"], &["no-such-model.gguf"]),
    ] {
        let arguments = [&["generate"], options].concat();
        let with_model = [&base[..], options].concat();
        refused(1, if options.contains(&"--model") { &arguments } else { &with_model }, words);
    }
}

#[test]
fn throughput_rows() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("throughput.svg");
    let base = ["throughput", "--model", MODEL, "--threads", "1", "--residual-length", "32"];
    let options = ["--kv-memory", "40KiB,100KiB", "--caches", "kivi2,f16", "--requests", "6"];
    let lengths = ["--input", "100", "--output", "156", "--plot", plot.to_str().unwrap()];
    let report = json(&[&base[..], &options, &lengths, &["--json", "-"]].concat());
    assert_eq!(report["workload"]["requests"], 6);
    assert_eq!(report["workload"]["lengths"], "fixed");
    assert_eq!(report["admission"], "whole-answer");
    assert!(report["limits"].is_array());
    let (layers, kv_heads, head_dim) =
        (number(&report, "layers"), number(&report, "kv_heads"), number(&report, "head_dim"));
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for (index, row) in rows.iter().enumerate() {
        // The baseline comes first.
        let f16 = index % 2 == 0;
        assert_eq!(row["cache"], if f16 { "f16" } else { "kivi2" });
        let budget = if index < 2 { 40_960.0 } else { 102_400.0 };
        assert_eq!(number(row, "kv_memory_bytes"), budget);
        assert_eq!((number(row, "input_tokens"), number(row, "output_tokens")), (600.0, 936.0));
        let sequence = number(row, "sequence_bytes");
        // 256 tokens are whole pages.
        let uncompressed = 256.0 * layers * kv_heads * head_dim * 4.0;
        assert!(if f16 { sequence == uncompressed } else { sequence < uncompressed }, "{row}");
        let fit = (budget / sequence).floor();
        assert_eq!(number(row, "predicted_batch"), fit);
        // Whole answers are promised, so that no more run at once than fit, and none gives way.
        let largest = number(row, "max_batch");
        assert!(largest >= 1.0 && largest <= fit.min(6.0), "{row}");
        // A mean of equal numbers is rounded.
        assert!(number(row, "mean_batch") <= largest * (1.0 + 1e-12), "{row}");
        assert_eq!((number(row, "swapped_out"), number(row, "recomputed")), (0.0, 0.0));
        assert!(number(row, "peak_cache_bytes") <= budget);
        let rate = number(row, "tokens_per_second");
        assert!((rate * number(row, "seconds") / 936.0 - 1.0).abs() < 1e-9);
        let ratio = number(row, "total_tokens_per_second") / rate;
        assert!((ratio * 936.0 / 1536.0 - 1.0).abs() < 1e-9);
        for key in ["time_to_first_token", "between_tokens"] {
            let (p50, p99) =
                (number(row, &format!("{key}_p50_ms")), number(row, &format!("{key}_p99_ms")));
            assert!(0.0 <= p50 && p50 <= p99, "{row}");
        }
        assert!(number(row, "alone_tokens_per_second") > 0.0);
        assert_eq!(number(row, "checked_requests"), 3.0);
        assert!(!f16 || number(row, "throughput_relative_to_f16") == 1.0);
        assert_eq!(
            number(row, "max_batch_relative_to_f16"),
            largest / number(&rows[index / 2 * 2], "max_batch")
        );
        #[cfg(target_os = "linux")]
        assert!(number(row, "peak_resident_bytes") >= number(row, "resident_bytes_before"));
    }
    // All come at once, so the predicted number does run at once as soon as there are as many.
    assert_eq!(number(&rows[0], "max_batch"), number(&rows[0], "predicted_batch").min(6.0));
    let plot = std::fs::read_to_string(plot).unwrap();
    for word in ["<svg", "Throughput", "Largest batch", "kivi2", "f16"] {
        assert!(plot.contains(word), "{word}");
    }
}

#[test]
fn throughput_with_everything_an_engine_does() {
    let folder = tempfile::tempdir().unwrap();
    let (lengths, text) = (folder.path().join("lengths"), folder.path().join("text"));
    std::fs::write(&lengths, "30 20\n{\"input\": 5, \"output\": 50}\n").unwrap();
    std::fs::write(&text, "The boats come back in the morning. ".repeat(20)).unwrap();
    let base = ["throughput", "--model", MODEL, "--residual-length", "32", "--sink-length", "32"];
    let options = ["--caches", "kivi4", "--requests", "7", "--kv-memory", "300KiB"];
    let how = ["--admission", "prompt", "--preemption", "recompute", "--lookup"];
    let when = ["--arrivals", "200", "--seed", "3", "--shared-prefix", "33"];
    let (lengths, text) = (lengths.to_str().unwrap(), text.to_str().unwrap());
    let files = ["--lengths", lengths, "--file", text, "--json"];
    let report = json(&[&base[..], &options, &how, &when, &files].concat());
    assert_eq!(report["lookup"], true);
    assert_eq!(report["workload"]["arrivals_per_second"], 200.0);
    let row = &report["rows"][0];
    // Four requests of the first line, three of the second, each after the prefix.
    assert_eq!(number(row, "input_tokens"), f64::from(4 * 30 + 3 * 5 + 7 * 33));
    assert_eq!(number(row, "output_tokens"), f64::from(4 * 20 + 3 * 50));
    assert!(number(row, "drafted_tokens") >= number(row, "accepted_tokens"));
    assert!(row["throughput_relative_to_f16"].is_null());
    assert_eq!(number(row, "sink_length"), 32.0);
}

#[test]
fn a_budget_below_one_request_is_skipped_and_says_so() {
    let base = ["throughput", "--model", MODEL, "--caches", "f16", "--kv-memory", "1KiB"];
    let lengths = ["--input", "40", "--output", "24", "--requests", "2"];
    let report = json(&[&base[..], &lengths, &["--json"]].concat());
    let row = &report["rows"][0];
    assert_eq!(row["skipped"], true);
    assert!(number(row, "needed_bytes") > 1024.0 && row["max_batch"].is_null());
}

#[test]
fn wrong_options_of_throughput() {
    let base = ["throughput", "--model", MODEL];
    for (options, words) in [
        (&["--kv-memory", "much"][..], &["much", "4GiB"][..]),
        (&["--caches", "kivi3"], &["kivi3", "kivi2+"]),
        (&["--requests", "0"], &["--requests", "'0'"]),
        (&["--input", "5"], &["--output"]),
        (&["--output", "5"], &["--input"]),
        (&["--arrivals", "0"], &["--arrivals", "requests per second"]),
        (&["--admission", "all"], &["prompt, whole-answer"]),
    ] {
        let output = kivi(&[&base[..], options].concat());
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{words:?}: {stderr}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("lengths.txt");
    std::fs::write(&path, "5 5\n5 x\n").unwrap();
    for (options, words) in [
        (&["--input", "500", "--output", "13"][..], &["500 and 13", "512"][..]),
        (&["--shared-prefix", "511"], &["511", "512"]),
        (&["--residual-length", "100"], &["residual-length: 100"]),
        (&["--lengths", path.to_str().unwrap()], &["lengths.txt, line 2", "\"5 x\""]),
        (&["--lengths", "/no/such/file"], &["cannot read", "/no/such/file"]),
        (&["--file", "/no/such/file"], &["cannot read", "/no/such/file"]),
        (&["--kv-memory", "1KiB", "--plot", "x.gif"], &[".svg or a .png", "x.gif"]),
    ] {
        refused(1, &[&base[..], options].concat(), words);
    }
}
