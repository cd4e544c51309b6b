//! `kivi eval` and `kivi tune` on a tiny model: answers, resuming, and wrong files.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const MODEL: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../kivi-models/tests/golden/models/llama3-tiny");

fn kivi(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kivi"));
    command.args(arguments).args(["--model", MODEL, "--threads", "1"]).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KIVI_") {
            command.env_remove(name);
        }
    }
    command.output().unwrap()
}

fn json(arguments: &[&str]) -> Value {
    let Output { status, stdout, stderr } = kivi(&[arguments, &["--json"]].concat());
    assert!(status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&stderr));
    serde_json::from_slice(&stdout).unwrap()
}

/// Asserts that the program refuses in one line that contains all `words`.
fn refused(arguments: &[&str], words: &[&str]) {
    let Output { status, stdout, stderr } = kivi(arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    let context = format!("kivi {}\n{stderr}", arguments.join(" "));
    assert!(matches!(status.code(), Some(1 | 2)), "{status}: {context}");
    assert!(stdout.is_empty() && !stderr.contains("panicked"), "{context}");
    let errors: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("not one error line: {context}") };
    for word in words {
        assert!(error.contains(word), "{word:?} is missing: {context}");
    }
}

fn write(folder: &TempDir, name: &str, text: &str) -> String {
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().into()
}

fn path(folder: &TempDir, name: &str) -> (PathBuf, String) {
    let path = folder.path().join(name);
    let text = path.to_str().unwrap().into();
    (path, text)
}

/// A text of more than 600 tokens for any tokenizer.
fn text() -> String {
    let words = ["river", "stone", "lamp", "green", "seven", "under", "quiet", "ship"];
    (0..2000).map(|i| format!("{} ", words[i * i % 7 + i % 2])).collect()
}

fn share(value: &Value) -> f64 {
    let share = value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    assert!((0.0..=1.0).contains(&share), "{share}");
    share
}

#[test]
fn wrong_files_name_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let good = r#"{"question": "1+1?", "answer": "2 #### 2"}"#;
    for (command, lines, words) in [
        ("gsm8k", "", &["empty", "line 1"][..]),
        ("gsm8k", &format!("{good}\n{{\"question\": "), &["f.jsonl, line 2, column"]),
        ("gsm8k", r#"{"query": "x", "answer": "1"}"#, &["line 1", "question"]),
        ("gsm8k", &format!("{good}\n").repeat(5), &["5 questions", "5 as examples"]),
        (
            "gsm8k",
            &format!(
                "{}{{\"question\": \"x\", \"answer\": \"none\"}}",
                format!("{good}\n").repeat(5)
            ),
            &["line 6", "####"],
        ),
        (
            "choice",
            r#"{"question": "x", "choices": ["a", "b"], "answer": 2}"#,
            &["line 1", "2 choices"],
        ),
        ("choice", r#"{"question": "x"}"#, &["line 1", "mc1_targets"]),
        (
            "choice",
            r#"{"question": "x", "mc1_targets": {"choices": ["a", "b"], "labels": [1]}}"#,
            &["line 1", "2 choices and 1 labels"],
        ),
        (
            "qa",
            r#"{"story": "x", "questions": ["a", "b"], "answers": ["c"]}"#,
            &["2 questions and 1"],
        ),
        ("qa", "\n\n[1]", &["line 3"]),
        (
            "longbench",
            r#"{"input": "a", "context": "b", "answers": ["c"], "dataset": "dureader"}"#,
            &["line 1", "dureader"],
        ),
        (
            "longbench",
            r#"{"input": "a", "context": "b", "answers": ["c"], "dataset": "trec"}"#,
            &["line 1", "all_classes"],
        ),
    ] {
        let file = write(&folder, "f.jsonl", lines);
        refused(&["eval", command, "--file", &file], words);
    }
    refused(&["eval", "qa", "--file", "no-such.jsonl"], &["cannot read no-such.jsonl"]);
    refused(&["eval", "needle", "--plot", "map.gif"], &["map.gif", ".svg"]);
    refused(&["eval", "needle", "--depths", "101"], &["0 to 100"]);
    refused(&["eval", "passkey", "--lengths", "4000"], &["do not fit", "512"]);
}

#[test]
fn choices_are_scored_and_an_interrupted_run_is_resumed() {
    let folder = tempfile::tempdir().unwrap();
    let line = |i: usize| {
        format!(
            "{{\"question\": \"number {i}?\", \"choices\": [\"a b\", \"c\"], \"answer\": {}}}\n",
            i % 2
        )
    };
    let file = write(&folder, "f.jsonl", &(0..6).map(line).collect::<String>());
    let base = ["eval", "choice", "--file", &file, "--batch", "4"];
    let whole = json(&base);
    assert_eq!(whole["questions"], 6);
    let accuracy = share(&whole["scores"]["acc"]);
    let (out, out_text) = path(&folder, "answers.jsonl");
    let with_out = [&base[..], &["--out", &out_text]].concat();
    // Three questions first; then the rest, in other batches, with the same result.
    json(&[&with_out[..], &["--limit", "3"]].concat());
    let lines = |path: &Path| std::fs::read_to_string(path).unwrap().lines().count();
    assert_eq!(lines(&out), 1 + 3);
    let resumed = json(&with_out);
    assert_eq!(lines(&out), 1 + 6);
    assert_eq!(share(&resumed["scores"]["acc"]), accuracy);
    // Another cache gives other answers.
    refused(&[&with_out[..], &["--cache", "f16"]].concat(), &["another run"]);
    // So do other questions, even as many of them.
    std::fs::write(&file, (1..7).map(line).collect::<String>()).unwrap();
    refused(&with_out, &["another run"]);
}

#[test]
fn stories_and_documents_are_answered() {
    let folder = tempfile::tempdir().unwrap();
    let story = r#"{"story": "A cat sat.", "questions": ["Who?", "Did what?"], "answers": ["a cat", ["sat", "it sat"]]}"#;
    let file = write(&folder, "qa.jsonl", story);
    let report = json(&["eval", "qa", "--file", &file]);
    assert_eq!(report["questions"], 2);
    share(&report["scores"]["f1"]);
    share(&report["scores"]["exact_match"]);
    // Far longer than the context: tokens in the middle are left out.
    let document = serde_json::json!({
        "input": "Who?", "context": text(), "answers": ["a cat"], "dataset": "hotpotqa",
    });
    let file = write(&folder, "long.jsonl", &document.to_string());
    let report = json(&["eval", "longbench", "--file", &file]);
    share(&report["groups"]["hotpotqa"]["score"]);
}

#[test]
fn needles_are_hidden_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let ((svg, svg_text), (png, png_text)) = (path(&folder, "map.svg"), path(&folder, "map.png"));
    let plots = format!("{svg_text},{png_text}");
    let options = ["--lengths", "200,300", "--depths", "0,100", "--trials", "1", "--digits", "2"];
    let report = json(&[&["eval", "needle", "--plot", &plots][..], &options].concat());
    assert_eq!(report["questions"], 4);
    share(&report["scores"]["found"]);
    assert!(std::fs::read_to_string(svg).unwrap().contains("</svg>"));
    assert_eq!(&std::fs::read(png).unwrap()[1..4], b"PNG");
}

#[test]
fn errors_are_smaller_with_more_bits() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(&folder, "text.txt", &text());
    let (plots, plots_text) = path(&folder, "plots");
    let report = json(&["eval", "errors", "--file", &file, "--ctx", "128", "--plots", &plots_text]);
    let rows = report["rows"].as_array().unwrap();
    let error = |tensor: &str, bits: usize, grouping: &str, key: &str| {
        let is = |row: &&Value| {
            row["tensor"] == tensor && row["bits"] == bits && row["grouping"] == grouping
        };
        share(&rows.iter().find(is).unwrap()[key])
    };
    for (tensor, grouping) in
        [("keys", "per token"), ("keys", "per channel"), ("values", "per token")]
    {
        for key in ["reconstruction_error", "attention_output_error"] {
            let [two, four, eight] = [2, 4, 8].map(|bits| error(tensor, bits, grouping, key));
            assert!(two > four && four > eight, "{tensor} {grouping}: {two} {four} {eight}");
        }
    }
    let promoted = error("keys", 2, "per channel, 0.25 promoted", "reconstruction_error");
    assert!(promoted < error("keys", 2, "per channel", "reconstruction_error"));
    assert!(plots.join("keys-layer-0.svg").is_file() && plots.join("values-layer-0.svg").is_file());
    refused(&["eval", "errors", "--file", &file, "--ctx", "100"], &["100", "32"]);
    refused(&["eval", "errors", "--file", &file, "--plot-layers", "99"], &["layer 99"]);
}

#[test]
fn a_tuned_plan_has_the_size_and_can_be_used() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(&folder, "text.txt", &text());
    let (_, plan) = path(&folder, "plan.json");
    let (plot, plot_text) = path(&folder, "frontier.svg");
    let base = ["tune", "--file", &file, "--ctx", "192", "--chunks", "1"];
    let small =
        ["--residual-length", "32", "--sink-length", "4", "--levels", "kivi2,kivi4:kivi2,kivi4"];
    let files = ["--out", &plan, "--plot", &plot_text, "--target-bits", "4.25"];
    let report = json(&[&base[..], &small, &files].concat());
    let bits = report["bits_per_element_limit"].as_f64().unwrap();
    assert!((3.0..=4.25).contains(&bits), "{bits}");
    assert!(report["kld"].as_f64().unwrap() >= 0.0);
    assert!(plot.is_file());
    let options = ["eval", "perplexity", "--file", &file, "--ctx", "192", "--chunks", "1"];
    let used = json(&[&options[..], &["--cache-plan", &plan, "--kld"]].concat());
    assert_eq!(used["layer_formats"], report["layer_formats"]);
    let limit = used["bits_per_element_limit"].as_f64().unwrap();
    assert!((limit - bits).abs() < 0.01, "{limit} {bits}");
    let layers = used["attention_output_error_per_layer"].as_array().unwrap();
    assert!(layers.iter().all(|error| error.as_f64().unwrap() > 0.0));
    refused(&[&base[..], &["--ctx", "128"]].concat(), &["cannot be used", "--ctx"]);
    // Values have groups of head_dim = 16 channels, so a scale and a zero take 2 bits of each.
    refused(&[&base[..], &small, &["--target-bits", "1"]].concat(), &["3.50 to 5.50 bits"]);
    refused(&[&base[..], &small, &["--levels", "kivi4+0.25"]].concat(), &["kivi4+0.25"]);
}
