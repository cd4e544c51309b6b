//! Wrong input to the `kivi` program: one clear line, exit code 1 or 2, nothing on standard output,
//! no panic.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kivi-models/tests/golden/models");
/// Context length of the tiny models.
const CONTEXT: usize = 512;

fn model(name: &str) -> String {
    format!("{MODELS}/{name}")
}

/// A copy of a tiny model's folder, to be damaged.
fn copy(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

fn kivi(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kivi"));
    command.args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KIVI_") {
            command.env_remove(name);
        }
    }
    command
}

/// Asserts that the program refuses, and that its one line contains every one of `words`.
fn refused(arguments: &[&str], words: &[&str]) {
    let Output { status, stdout, stderr } = kivi(arguments).output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    let context = format!("kivi {}\n{stderr}", arguments.join(" "));
    assert!(matches!(status.code(), Some(1 | 2)), "{status}: {context}");
    assert!(!stderr.contains("panicked"), "{context}");
    assert!(stdout.is_empty(), "{context}");
    let errors: Vec<_> = stderr.lines().filter(|line| line.starts_with("error: ")).collect();
    let [error] = errors[..] else { panic!("not one error line: {context}") };
    for word in words {
        assert!(error.contains(word), "{word:?} is missing: {context}");
    }
    // After the error only clap's usage hint may follow.
    if status.code() == Some(1) {
        assert_eq!(stderr.lines().last(), Some(error), "{context}");
    }
}

fn refused_model(path: &Path, words: &[&str]) {
    let path = path.to_str().unwrap();
    refused(&["run", "--model", path, "-n", "1", "hello"], words);
    refused(&["inspect", path], words);
}

fn write(folder: &TempDir, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

#[test]
fn the_tiny_models_work_at_all() {
    for name in ["llama2-tiny", "llama3-tiny", "llama3-tiny.gguf", "mistral-tiny"] {
        let arguments = ["run", "--model", &model(name), "--temp", "0", "-n", "4", "hello"];
        let output = kivi(&arguments).output().unwrap();
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn missing_model_file() {
    refused_model(Path::new("no-such-model.gguf"), &["no-such-model.gguf"]);
}

#[test]
fn truncated_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let whole = fs::read(model("llama3-tiny.gguf")).unwrap();
    for length in [0, 3, 20, 1000, whole.len() / 2, whole.len() - 1] {
        let path = write(&folder, "truncated.gguf", &whole[..length]);
        refused_model(&path, &["truncated.gguf"]);
    }
}

/// The start of a GGUF file, version 3: number of tensors, number of metadata entries.
fn gguf(tensors: u64, entries: u64) -> Vec<u8> {
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend(tensors.to_le_bytes());
    bytes.extend(entries.to_le_bytes());
    bytes
}

#[test]
fn gguf_with_absurd_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let huge = u64::MAX.to_le_bytes();
    let counts = gguf(u64::MAX, u64::MAX);
    let string = [&gguf(0, 1)[..], &huge, b"key"].concat();
    let mut tensor = gguf(1, 0);
    tensor.extend(1u64.to_le_bytes()); // name "t"
    tensor.extend(b"t");
    tensor.extend(2u32.to_le_bytes()); // dimensions
    tensor.extend(huge);
    tensor.extend(huge);
    tensor.extend(0u32.to_le_bytes()); // F32
    tensor.extend(0u64.to_le_bytes()); // offset
    let mut array = gguf(0, 1);
    array.extend(1u64.to_le_bytes()); // key "a"
    array.extend(b"a");
    array.extend(9u32.to_le_bytes()); // an array
    array.extend(4u32.to_le_bytes()); // of u32
    array.extend(huge);
    for (name, bytes) in
        [("counts", counts), ("string", string), ("tensor", tensor), ("array", array)]
    {
        let name = format!("{name}.gguf");
        refused_model(&write(&folder, &name, &bytes), &[&name]);
    }
}

#[test]
fn index_that_names_a_missing_shard() {
    let folder = copy("mistral-tiny");
    fs::remove_file(folder.path().join("model-00002-of-00002.safetensors")).unwrap();
    refused_model(folder.path(), &["model-00002-of-00002.safetensors"]);
}

#[test]
fn unknown_architecture() {
    let folder = copy("llama2-tiny");
    let path = folder.path().join("config.json");
    let config = fs::read_to_string(&path).unwrap();
    let config = config.replace("LlamaForCausalLM", "OtherForCausalLM");
    fs::write(&path, config.replace("\"llama\"", "\"other\"")).unwrap();
    refused_model(folder.path(), &["\"other\"", "not supported", "LlamaForCausalLM"]);
}

#[test]
fn missing_tokenizer() {
    let folder = copy("llama2-tiny");
    fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    let path = folder.path().to_str().unwrap();
    refused(&["run", "--model", path, "-n", "1", "hello"], &["tokenizer"]);
}

#[test]
fn prompt_files() {
    let folder = tempfile::tempdir().unwrap();
    let llama = model("llama3-tiny");
    // More tokens than the context; how many is for the tokenizer to say.
    let long = "7".repeat(CONTEXT + 1);
    for (name, bytes, words) in [
        ("empty.txt", &b""[..], &["empty"][..]),
        ("blank.txt", b" \n\n", &["empty"]),
        ("invalid.txt", b"caf\xe9", &["invalid.txt", "UTF-8", "byte 3"]),
    ] {
        let path = write(&folder, name, bytes);
        let path = path.to_str().unwrap();
        refused(&["run", "--model", &llama, "-n", "1", "--prompt-file", path], words);
    }
    let folder = folder.path().to_str().unwrap();
    for name in ["no-such.txt", folder] {
        refused(&["run", "--model", &llama, "--prompt-file", name], &["cannot read", name]);
    }
    let long = ["run", "--model", &llama, "-n", "1", "--raw", &long];
    refused(&long, &["the prompt of", "tokens does not fit the context of 512"]);
}

/// What `kivi run` says to a prompt on standard input.
fn answer_to_input(bytes: &[u8]) -> Output {
    let mut child = kivi(&["run", "--model", &model("llama3-tiny"), "-n", "1", "--temp", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(bytes).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn prompt_on_standard_input() {
    assert!(answer_to_input(b"hello").status.success());
    for (bytes, message) in [
        (&b""[..], "error: the prompt is empty\n"),
        (b" \n", "error: the prompt is empty\n"),
        (b"caf\xe9", "error: standard input is not valid UTF-8 at byte 3\n"),
    ] {
        let output = answer_to_input(bytes);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        assert_eq!(String::from_utf8(output.stderr).unwrap(), message);
    }
}

#[test]
fn lengths() {
    let llama = model("llama3-tiny");
    let base = ["run", "--model", &llama];
    for (options, words) in [
        (&["--context", "513"][..], &["context 513", "512"][..]),
        (&["--context", "0"], &["the prompt of", "the context of 0"]),
        (&["-n", "512"], &["512 more tokens after a prompt of", "the context of 512"]),
        (&["-n", "2", "--max-tokens", "2"], &["--tokens", "--max-tokens"]),
    ] {
        refused(&[&base, options, &["hello"]].concat(), words);
    }
}

#[test]
fn sampling_options() {
    let llama = model("llama3-tiny");
    let base = ["run", "--model", &llama, "--max-tokens", "1"];
    for (options, words) in [
        (&["--temp", "-1"][..], &["temperature is -1", "0 … 10000"][..]),
        (&["--temp", "nan"], &["temperature is NaN"]),
        (&["--top-p", "2"], &["top_p is 2", "at most 1"]),
        (&["--seed", "x"], &["--seed", "x"]),
        (&["--stop", ""], &["stop", "empty"]),
    ] {
        refused(&[&base, options, &["hello"]].concat(), words);
    }
}

#[test]
fn cache_options() {
    let llama = model("llama3-tiny");
    let base = ["run", "--model", &llama, "-n", "1"];
    for (options, words) in [
        (&["--group-size", "0"][..], &["group-size", "0", "16, 32, 64 or 128"][..]),
        (&["--group-size", "48", "--residual-length", "128"], &["group-size", "48"]),
        (&["--residual-length", "0"], &["residual-length", "0"]),
        (&["--residual-length", "100"], &["residual-length", "100", "multiple", "32"]),
        // Refused before so much memory is asked for.
        (&["--residual-length", "16777216"], &["residual-length", "16777216", "512"]),
        (&["--sink-length", "513"], &["sink-length", "513", "512"]),
        (&["--threads", "100000"], &["threads", "100000", "1024"]),
        (&["--cache-type-k", "kivi3"], &["kivi3", "kivi2"]),
        (&["--key-promote", "1.5"], &["key-promote", "1.5", "at most 1"]),
        (&["--key-promote", "x"], &["key-promote", "x"]),
        (
            &["--cache-type-k", "kivi4", "--key-promote", "0.25"],
            &["key-promote", "kivi4+0.25", "kivi2 keys"],
        ),
        (
            &["--cache-type-k", "kivi2+0.25", "--key-promote", "0.125"],
            &["--key-promote 0.125", "kivi2+0.25"],
        ),
        (&["--device", "abacus"], &["abacus"]),
        (&["--cache", "kivi3+"], &["kivi3+", "kivi2+, kivi2"]),
        (&["--cache", "kivi2+", "--cache-type-k", "kivi4"], &["--cache <NAME>", "--cache-type-k"]),
        (&["--cache-plan", "no-such.json"], &["no-such.json"]),
    ] {
        refused(&[&base, options, &["hello"]].concat(), words);
    }
}

#[test]
fn cache_plans() {
    let (llama, folder) = (model("llama3-tiny"), tempfile::tempdir().unwrap());
    for (json, words) in [
        ("{\"cache\": \"kivi2\",\n \"layer\": []}", &["plan.json", "line 2", "layer"][..]),
        ("", &["plan.json", "line 1"]),
        ("{\"layers\": [{\"layers\": [99], \"keys\": \"f16\"}]}", &["layer", "99", "0 to"]),
        ("{\"layers\": [{\"layers\": [0], \"keys\": \"q8\"}]}", &["q8", "kivi2"]),
    ] {
        let path = write(&folder, "plan.json", json.as_bytes());
        let options = ["--cache-plan", path.to_str().unwrap()];
        let base = ["run", "--model", &llama, "-n", "1"];
        refused(&[&base[..], &options, &["hello"]].concat(), words);
    }
}

#[test]
fn an_invalid_variable_is_not_ignored() {
    for (variable, value, word) in [
        ("KIVI_GROUP_SIZE", "48", "16, 32, 64 or 128"),
        ("KIVI_CPU_ISA", "abacus", "portable or avx2"),
        ("KIVI_DEVICE", "abacus", "cpu-ref"),
    ] {
        let output = kivi(&["run", "--model", &model("llama3-tiny"), "-n", "1", "hello"])
            .env(variable, value)
            .output()
            .unwrap();
        assert!(!output.status.success(), "{variable}");
        assert!(output.stdout.is_empty(), "{variable}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("error: "), "{error}");
        assert!(error.contains(value) && error.contains(word), "{error}");
    }
}

#[test]
fn evaluation_of_a_missing_or_short_text() {
    let llama = model("llama3-tiny");
    let base = ["eval", "perplexity", "--model", &llama, "--ctx", "64", "--file"];
    refused(&[&base[..], &["no-such.txt"]].concat(), &["no-such.txt"]);
    let folder = tempfile::tempdir().unwrap();
    let path = write(&folder, "short.txt", b"too short");
    let path = path.to_str().unwrap();
    refused(&[&base[..], &[path]].concat(), &["fewer than one chunk of 64"]);
    let base = ["eval", "perplexity", "--model", &llama, "--file", path];
    for (options, words) in [
        (&["--ctx", "2"][..], &["2 tokens", "--ctx 4"][..]),
        (&["--ctx", "513"], &["513", "512"]),
        (&["--ctx", "64", "--chunks", "0"], &["0 chunks"]),
        (&["--ctx", "64", "--batch", "0"], &["0"]),
    ] {
        refused(&[&base, options].concat(), words);
    }
}

/// `kivi run … | head -1`: the reader goes away, the program ends without a panic.
#[test]
fn standard_output_closed_early() {
    let llama = model("llama3-tiny");
    let mut child = kivi(&["run", "--model", &llama, "--temp", "0", "-n", "256", "hello"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let stderr = child.stderr.take().unwrap();
    let lines: Vec<String> = BufReader::new(stderr).lines().map(Result::unwrap).collect();
    let status = child.wait().unwrap();
    assert!(!lines.iter().any(|line| line.contains("panicked")), "{lines:?}");
    assert!(status.code().is_none_or(|code| code <= 2), "{status}: {lines:?}");
}
