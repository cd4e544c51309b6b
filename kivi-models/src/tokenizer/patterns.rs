//! The regular expressions that cut text before byte-level merging, by the name GGUF files use.
//!
//! Sources: the `pre_tokenizer` of each model's `tokenizer.json`, and `llama-vocab.cpp` of
//! llama.cpp for the names.

use super::build::invalid;
use crate::{Error, Result};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

/// Llama 3: digits in groups of up to three, contractions in any case.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Qwen 2: as Llama 3, but every digit on its own.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// What goes before the merging.
pub(super) struct PreTokenization {
    pub(super) normalizer: Option<NormalizerWrapper>,
    pub(super) pre_tokenizer: PreTokenizerWrapper,
    /// A pre-token in the vocabulary is taken whole.
    pub(super) ignore_merges: bool,
    /// Whether texts start with the beginning-of-sequence token unless the file says otherwise.
    pub(super) add_bos: bool,
}

/// The pre-tokenization that GGUF files call `pre`.
pub(super) fn named(pre: Option<&str>) -> Result<PreTokenization> {
    let plain = |pre_tokenizers| PreTokenization {
        normalizer: None,
        pre_tokenizer: Sequence::new(pre_tokenizers).into(),
        ignore_merges: false,
        add_bos: false,
    };
    Ok(match pre {
        Some("smollm") => plain(vec![Digits::new(true).into(), byte_level(true)]),
        Some("llama-bpe") => PreTokenization {
            ignore_merges: true,
            add_bos: true,
            ..plain(vec![split(LLAMA3)?, byte_level(false)])
        },
        Some("qwen2") => PreTokenization {
            normalizer: Some(NFC.into()),
            ..plain(vec![split(QWEN2)?, byte_level(false)])
        },
        other => {
            let name = other.map_or("none".to_owned(), crate::error::quoted);
            return Err(Error::unsupported(
                format!("pre-tokenizer {name}"),
                "smollm, llama-bpe, qwen2",
            ));
        }
    })
}

/// Bytes to printable characters, after GPT-2's own split if `split`.
fn byte_level(split: bool) -> PreTokenizerWrapper {
    ByteLevel::new(false, true, split).into()
}

fn split(pattern: &str) -> Result<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(pattern.to_owned());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
    Ok(split.map_err(|error| invalid(error.to_string()))?.into())
}
