//! What a checkpoint offers a tokenizer to be built from.

use super::gguf::Gguf;
use super::tokenizer_config::TokenizerConfig;
use super::value::{Value, ValueType};
use crate::{Error, Result};
use std::path::PathBuf;

/// Where the tokenizer of a checkpoint comes from.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum TokenizerSource {
    /// A `tokenizer.json` in the format of the Hugging Face `tokenizers` library.
    HuggingFace {
        /// The file.
        path: PathBuf,
        /// What the file does not say, from the `tokenizer_config.json` beside it.
        config: TokenizerConfig,
    },
    /// The vocabulary in the metadata of a GGUF file.
    Gguf(Box<GgufVocabulary>),
}

/// Vocabulary and tokenizer settings of a GGUF file, keys `tokenizer.ggml.*`.
///
/// From a file, [`scores`](Self::scores) and [`token_types`](Self::token_types) are as long as
/// [`tokens`](Self::tokens), or empty where it has none, and every id is smaller than that.
/// Everything else is checked by [`Tokenizer::from_gguf`](crate::tokenizer::Tokenizer::from_gguf).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GgufVocabulary {
    /// `model`: `gpt2` (byte-level BPE), `llama` (SentencePiece BPE) and others.
    pub model: String,
    /// `pre`: how a byte-level BPE cuts text before merging, for example `llama-bpe`.
    pub pre: Option<String>,
    /// `tokens`: the text of each token, by id.
    pub tokens: Vec<String>,
    /// `token_type`: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `scores`: the priority of each token; only SentencePiece needs them.
    pub scores: Vec<f32>,
    /// `merges`: the pairs of a byte-level BPE, the two texts separated by a space, first to last.
    /// Its length is its own.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos_id: Option<u32>,
    /// `eos_token_id`.
    pub eos_id: Option<u32>,
    /// `unknown_token_id`.
    pub unk_id: Option<u32>,
    /// `padding_token_id`.
    pub pad_id: Option<u32>,
    /// `add_bos_token`: whether a text starts with the token `bos_id`; by default on for `llama`
    /// and for `llama-bpe`, as in llama.cpp.
    pub add_bos: Option<bool>,
    /// `add_eos_token`: whether a text ends with the token `eos_id`; by default off.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`: whether a text is tokenized as if a space came first; by default on, and
    /// only used by SentencePiece.
    pub add_space_prefix: Option<bool>,
}

impl GgufVocabulary {
    /// Copies the vocabulary out of a file; `None` if it has no `tokenizer.ggml.model`.
    ///
    /// # Errors
    /// [`Error::InvalidGguf`] for keys of the wrong type, lists of the wrong length and special
    /// tokens that are not in the vocabulary.
    pub fn from_gguf(gguf: &Gguf) -> Result<Option<Self>> {
        let Some(model) = gguf.string("tokenizer.ggml.model")? else {
            return Ok(None);
        };
        let tokens = strings(gguf, "tokenizer.ggml.tokens")?;
        let flag = |name: &str| gguf.boolean(&format!("tokenizer.ggml.{name}"));
        let id = |name: &str| special_id(gguf, name, tokens.len());
        Ok(Some(Self {
            model: model.to_owned(),
            pre: gguf.string("tokenizer.ggml.pre")?.map(str::to_owned),
            scores: list(gguf, "tokenizer.ggml.scores", tokens.len(), |value| match value {
                Value::Float(score) => Some(score as f32),
                _ => None,
            })?,
            token_types: list(
                gguf,
                "tokenizer.ggml.token_type",
                tokens.len(),
                |value| match value {
                    Value::Integer(kind) => i32::try_from(kind).ok(),
                    _ => None,
                },
            )?,
            merges: strings(gguf, "tokenizer.ggml.merges")?,
            bos_id: id("bos")?,
            eos_id: id("eos")?,
            unk_id: id("unknown")?,
            pad_id: id("padding")?,
            add_bos: flag("add_bos_token")?,
            add_eos: flag("add_eos_token")?,
            add_space_prefix: flag("add_space_prefix")?,
            tokens,
        }))
    }
}

/// The text of a special token; `None` if the file has no such token.
pub(super) fn special_token(gguf: &Gguf, name: &str) -> Result<Option<String>> {
    let Some(tokens) = gguf.array("tokenizer.ggml.tokens")? else {
        return Ok(None);
    };
    let id = special_id(gguf, name, tokens.len())?;
    Ok(id.and_then(|id| tokens.strings()?.nth(id as usize)).map(str::to_owned))
}

fn special_id(gguf: &Gguf, name: &str, tokens: usize) -> Result<Option<u32>> {
    let key = format!("tokenizer.ggml.{name}_token_id");
    match gguf.integer::<u32>(&key)? {
        // −1, stored unsigned, is ggml's "there is none".
        None | Some(u32::MAX) => Ok(None),
        Some(id) if (id as usize) < tokens => Ok(Some(id)),
        Some(id) => Err(Error::gguf(format!("{key} is {id}, there are {tokens} tokens"))),
    }
}

fn strings(gguf: &Gguf, key: &str) -> Result<Vec<String>> {
    let Some(array) = gguf.array(key)? else {
        return Ok(Vec::new());
    };
    let strings =
        array.strings().ok_or_else(|| Error::gguf(format!("{key} is not a list of strings")))?;
    Ok(strings.map(str::to_owned).collect())
}

fn list<T>(
    gguf: &Gguf,
    key: &str,
    length: usize,
    convert: impl Fn(Value) -> Option<T>,
) -> Result<Vec<T>> {
    let Some(array) = gguf.array(key)? else {
        return Ok(Vec::new());
    };
    if array.len() != length || array.kind() == ValueType::String {
        return Err(Error::gguf(format!("{key} is not a list of {length} numbers")));
    }
    array
        .iter()
        .map(|value| convert(value).ok_or_else(|| Error::gguf(format!("{key} holds no numbers"))))
        .collect()
}
