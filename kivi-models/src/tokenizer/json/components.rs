//! The exchangeable parts of a `tokenizer.json`. Each kind that is let through is one that a
//! decoder-only model uses and that cannot fail on any text.

use super::super::build::{MAX_TOKEN_BYTES, invalid};
use super::super::pieces::Spelling;
use crate::error::{one_line, quoted};
use crate::{Error, Result};
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

/// The normalizer, if there is one.
pub(super) fn normalizer(value: Value) -> Result<Option<NormalizerWrapper>> {
    const KINDS: [&str; 7] = ["NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Lowercase"];
    for part in flatten(&value, "normalizers")? {
        allow("normalizer", part, &KINDS)?;
        // What is put in must be something, and Replace is only needed for plain text.
        let put_in = match kind(part) {
            "Prepend" => &part["prepend"],
            "Replace" if part["pattern"]["String"].is_string() => &part["content"],
            "Replace" => {
                return Err(Error::unsupported(
                    "tokenizer normalizer that replaces a regex",
                    "plain text",
                ));
            }
            _ => continue,
        };
        if !put_in.as_str().is_some_and(|text| (1..=64).contains(&text.len())) {
            let (kind, put_in) = (kind(part), one_line(&put_in.to_string()));
            return Err(invalid(format!("{kind} of {put_in}, allowed are texts of 1 … 64 bytes")));
        }
        check_pattern(part)?;
    }
    deserialize("normalizer", value)
}

/// The pre-tokenizer, if there is one.
pub(super) fn pre_tokenizer(value: Value) -> Result<Option<PreTokenizerWrapper>> {
    for part in flatten(&value, "pretokenizers")? {
        allow("pre-tokenizer", part, &["Split", "ByteLevel", "Digits", "Metaspace"])?;
        check_pattern(part)?;
    }
    deserialize("pre-tokenizer", value)
}

/// How the vocabulary spells bytes, which the decoder tells.
pub(super) fn spelling(value: &Value) -> Result<Spelling> {
    let parts = flatten(value, "decoders")?;
    let kinds: Vec<&str> = parts.iter().map(|part| kind(part)).collect();
    match kinds[..] {
        ["ByteLevel"] => return Ok(Spelling::ByteLevel),
        ["Metaspace"] if parts[0]["replacement"] == "▁" => {
            let never = parts[0]["prepend_scheme"] == "never"
                || parts[0]["prepend_scheme"].is_null() && parts[0]["add_prefix_space"] == false;
            return Ok(Spelling::SentencePiece { leading_space: !never });
        }
        ["Replace", "ByteFallback", "Fuse"] | ["Replace", "ByteFallback", "Fuse", "Strip"] => {
            let replaces = parts[0]["pattern"]["String"] == "▁" && parts[0]["content"] == " ";
            let strip = parts.get(3);
            let one_space = |s: &Value| s["content"] == " " && s["start"] == 1 && s["stop"] == 0;
            if replaces && strip.is_none_or(|strip| one_space(strip)) {
                return Ok(Spelling::SentencePiece { leading_space: strip.is_some() });
            }
        }
        _ => {}
    }
    let found = if kinds.is_empty() { "none".to_owned() } else { one_line(&kinds.join(", ")) };
    Err(Error::unsupported(format!("tokenizer decoder {found}"), "byte-level, SentencePiece"))
}

/// The tokens that the post-processor puts before and after a text.
pub(super) fn affixes(value: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
    let (mut prefix, mut suffix) = (Vec::new(), Vec::new());
    for part in flatten(value, "processors")? {
        allow("post-processor", part, &["ByteLevel", "TemplateProcessing"])?;
        if kind(part) == "TemplateProcessing" {
            let (before, after) = template(part)?;
            prefix.splice(..0, before);
            suffix.extend(after);
        }
    }
    Ok((prefix, suffix))
}

/// The template for one text: special tokens, the text once, special tokens.
fn template(part: &Value) -> Result<(Vec<u32>, Vec<u32>)> {
    let malformed = || invalid("the post-processor's template for one text is malformed");
    let (mut before, mut after, mut texts) = (Vec::new(), Vec::new(), 0);
    for item in part["single"].as_array().ok_or_else(malformed)? {
        if let Some(token) = item["SpecialToken"]["id"].as_str() {
            let ids = part["special_tokens"][token]["ids"].as_array().ok_or_else(malformed)?;
            for id in ids {
                let id = id.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(malformed)?;
                if texts == 0 { before.push(id) } else { after.push(id) }
            }
        } else if item["Sequence"]["id"] == "A" {
            texts += 1;
        } else {
            return Err(malformed());
        }
    }
    if texts == 1 { Ok((before, after)) } else { Err(malformed()) }
}

/// The parts of a component, which may be nothing, one part or a sequence of components.
fn flatten<'a>(value: &'a Value, list: &str) -> Result<Vec<&'a Value>> {
    if value.is_null() {
        return Ok(Vec::new());
    }
    if kind(value) != "Sequence" {
        return Ok(vec![value]);
    }
    let items = value[list].as_array();
    let items = items.ok_or_else(|| invalid(format!("a sequence without its list of {list}")))?;
    // The depth is bounded by that of the JSON parser.
    let parts: Result<Vec<_>> = items.iter().map(|item| flatten(item, list)).collect();
    Ok(parts?.concat())
}

fn kind(part: &Value) -> &str {
    part["type"].as_str().unwrap_or_default()
}

fn allow(what: &str, part: &Value, kinds: &[&str]) -> Result<()> {
    let found = kind(part);
    if kinds.contains(&found) {
        return Ok(());
    }
    Err(Error::unsupported(format!("tokenizer {what} {}", quoted(found)), kinds.join(", ")))
}

/// Refuses patterns that match nothing or that would take too much memory to compile.
fn check_pattern(part: &Value) -> Result<()> {
    let text = &part["pattern"]["String"];
    let regex = &part["pattern"]["Regex"];
    for pattern in [text, regex].into_iter().filter_map(Value::as_str) {
        if pattern.is_empty() || pattern.len() > MAX_TOKEN_BYTES {
            let len = pattern.len();
            return Err(invalid(format!(
                "a pattern of {len} bytes, allowed are 1 … {MAX_TOKEN_BYTES}"
            )));
        }
    }
    if let Some(pattern) = regex.as_str() {
        check_repetitions(pattern)?;
    }
    Ok(())
}

/// Counted repetitions are unrolled when a pattern is compiled, and multiply when nested.
fn check_repetitions(pattern: &str) -> Result<()> {
    const LIMIT: u64 = 4096;
    let mut product: u64 = 1;
    for braces in pattern.split('{').skip(1).filter_map(|rest| rest.split_once('}')) {
        // `\p{L}` and the like hold no number.
        let counts = braces.0.split(',').filter(|count| !count.is_empty());
        let counts: Option<Vec<u64>> = counts
            .map(|n| n.bytes().all(|b| b.is_ascii_digit()).then(|| n.parse().unwrap_or(u64::MAX)))
            .collect();
        let largest = counts.and_then(|counts| counts.into_iter().max()).unwrap_or(1);
        product = product.saturating_mul(largest.max(1));
    }
    if product > LIMIT {
        return Err(invalid(format!("a pattern with {product} repetitions, the limit is {LIMIT}")));
    }
    Ok(())
}

fn deserialize<T: DeserializeOwned>(what: &str, value: Value) -> Result<Option<T>> {
    if value.is_null() {
        return Ok(None);
    }
    serde_json::from_value(value)
        .map(Some)
        .map_err(|error| invalid(format!("{what}: {}", one_line(&error.to_string()))))
}
