//! Tokenizers as GGUF files hold them.

use super::Roles;
use super::build::{MAX_VOCAB, Parts, invalid};
use super::patterns;
use super::pieces::{Spelling, byte_token};
use super::sentencepiece;
use crate::checkpoint::GgufVocabulary;
use crate::error::quoted;
use crate::{Error, Result};
use tokenizers::AddedToken;
use tokenizers::normalizers::{Prepend, Replace, Sequence};

/// The `tokenizer.ggml.*` metadata of a GGUF file.
#[derive(Clone, Debug, Default)]
pub struct GgufTokenizer {
    /// `model`: `"gpt2"` (byte-level merges) or `"llama"` (SentencePiece).
    pub model: String,
    /// `pre`: how byte-level text is cut, `"smollm"`, `"llama-bpe"` or `"qwen2"`.
    pub pre: Option<String>,
    /// `tokens`: the vocabulary, by id.
    pub tokens: Vec<String>,
    /// `token_type`, one per token or none at all: 1 normal, 2 unknown, 3 control, 4 user-defined,
    /// 5 unused, 6 byte.
    pub token_types: Vec<i32>,
    /// `scores`, one per token or none at all; only SentencePiece needs them.
    pub scores: Vec<f32>,
    /// `merges`, two tokens separated by a space each; only byte-level vocabularies need them.
    pub merges: Vec<String>,
    /// `bos_token_id`.
    pub bos_id: Option<u32>,
    /// `eos_token_id`.
    pub eos_id: Option<u32>,
    /// `unknown_token_id`.
    pub unk_id: Option<u32>,
    /// `padding_token_id`.
    pub pad_id: Option<u32>,
    /// `add_bos_token`; by default on for `"llama"` and `"llama-bpe"`, as in llama.cpp.
    pub add_bos: Option<bool>,
    /// `add_eos_token`; by default off.
    pub add_eos: Option<bool>,
    /// `add_space_prefix`; by default on, and only used by `"llama"`.
    pub add_space_prefix: Option<bool>,
}

impl From<GgufVocabulary> for GgufTokenizer {
    fn from(vocabulary: GgufVocabulary) -> Self {
        Self {
            model: vocabulary.model,
            pre: vocabulary.pre,
            tokens: vocabulary.tokens,
            token_types: vocabulary.token_types,
            scores: vocabulary.scores,
            merges: vocabulary.merges,
            bos_id: vocabulary.bos_id,
            eos_id: vocabulary.eos_id,
            unk_id: vocabulary.unknown_id,
            pad_id: vocabulary.padding_id,
            add_bos: vocabulary.add_bos,
            add_eos: vocabulary.add_eos,
            add_space_prefix: vocabulary.add_space_prefix,
        }
    }
}

/// What a token is for, `token_type` in the file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl GgufTokenizer {
    pub(super) fn into_parts(self) -> Result<Parts> {
        if self.tokens.is_empty() || self.tokens.len() > MAX_VOCAB {
            let found = self.tokens.len();
            return Err(invalid(format!("{found} tokens, allowed are 1 … {MAX_VOCAB}")));
        }
        let kinds = self.kinds()?;
        let parts = match self.model.as_str() {
            "gpt2" => self.byte_level(&kinds)?,
            "llama" => self.sentencepiece(&kinds)?,
            other => {
                let name = quoted(other);
                return Err(Error::unsupported(format!(
                    "tokenizer model {name} (supported: gpt2, llama)"
                )));
            }
        };
        Ok(parts)
    }

    fn byte_level(self, kinds: &[Kind]) -> Result<Parts> {
        let pre = patterns::named(self.pre.as_deref())?;
        let merges = self.merges.iter().enumerate().map(|(rank, merge)| {
            // The first character may itself be a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let (left, right) = merge[first..].split_once(' ').unwrap_or_default();
            let left = &merge[..first + left.len()];
            if right.is_empty() {
                let merge = quoted(merge);
                return Err(invalid(format!("merge {rank} is {merge}, not two tokens")));
            }
            Ok((left.to_owned(), right.to_owned()))
        });
        let merges = merges.collect::<Result<_>>()?;
        let (prefix, suffix) = self.affixes(pre.add_bos)?;
        Ok(Parts {
            merges,
            ignore_merges: pre.ignore_merges,
            byte_fallback: false,
            fuse_unk: false,
            unk: None,
            normalizer: pre.normalizer,
            pre_tokenizer: Some(pre.pre_tokenizer),
            added: self.added(kinds),
            spelling: Spelling::ByteLevel,
            prefix,
            suffix,
            roles: self.roles(),
            vocab: self.tokens.into_iter().zip(0..).collect(),
        })
    }

    fn sentencepiece(self, kinds: &[Kind]) -> Result<Parts> {
        if self.scores.len() != self.tokens.len() {
            let (scores, tokens) = (self.scores.len(), self.tokens.len());
            return Err(invalid(format!("{scores} scores for {tokens} tokens")));
        }
        if let Some(id) = self.scores.iter().position(|score| score.is_nan()) {
            return Err(invalid(format!("the score of token {id} is NaN")));
        }
        if let Some(id) = (0..kinds.len())
            .find(|&id| kinds[id] == Kind::Byte && byte_token(&self.tokens[id]).is_none())
        {
            let name = quoted(&self.tokens[id]);
            return Err(invalid(format!("byte token {id} is spelled {name}, not like \"<0x0A>\"")));
        }
        let ordinary = |kind| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused);
        let pieces: Vec<(&str, u32, f32)> = (0..)
            .zip(&self.tokens)
            .filter(|&(id, _)| ordinary(kinds[id as usize]))
            .map(|(id, token)| (token.as_str(), id, self.scores[id as usize]))
            .collect();
        self.check_lengths()?;
        let merges = sentencepiece::merges(&pieces);
        // Stands for characters that neither the vocabulary nor its byte tokens can spell.
        let unk = match self.unk_id {
            Some(id) => self.tokens.get(id as usize),
            None => kinds.iter().position(|&kind| kind == Kind::Unknown).map(|id| &self.tokens[id]),
        };
        let unk = unk.cloned();
        let leading_space = self.add_space_prefix.unwrap_or(true);
        let mut normalizers = Vec::new();
        if leading_space {
            normalizers.push(Prepend::new("▁".to_owned()).into());
        }
        let space = Replace::new(" ", "▁").map_err(|error| invalid(error.to_string()))?;
        normalizers.push(space.into());
        let (prefix, suffix) = self.affixes(true)?;
        Ok(Parts {
            merges,
            ignore_merges: false,
            byte_fallback: true,
            fuse_unk: true,
            unk,
            normalizer: Some(Sequence::new(normalizers).into()),
            pre_tokenizer: None,
            added: self.added(kinds),
            spelling: Spelling::SentencePiece { leading_space },
            prefix,
            suffix,
            roles: self.roles(),
            vocab: self.tokens.into_iter().zip(0..).collect(),
        })
    }

    fn kinds(&self) -> Result<Vec<Kind>> {
        if self.token_types.is_empty() {
            return Ok(vec![Kind::Normal; self.tokens.len()]);
        }
        if self.token_types.len() != self.tokens.len() {
            let (types, tokens) = (self.token_types.len(), self.tokens.len());
            return Err(invalid(format!("{types} token types for {tokens} tokens")));
        }
        let kind = |(id, &number): (usize, &i32)| {
            Ok(match number {
                1 => Kind::Normal,
                2 => Kind::Unknown,
                3 => Kind::Control,
                4 => Kind::UserDefined,
                5 => Kind::Unused,
                6 => Kind::Byte,
                _ => {
                    return Err(invalid(format!(
                        "token {id} has type {number}, allowed are 1 … 6"
                    )));
                }
            })
        };
        self.token_types.iter().enumerate().map(kind).collect()
    }

    /// Control tokens and the unknown token are special; user-defined ones are text that is never
    /// split.
    fn added(&self, kinds: &[Kind]) -> Vec<(AddedToken, u32)> {
        let added = |(id, token): (u32, &String)| {
            let special = match kinds[id as usize] {
                Kind::Control | Kind::Unknown => true,
                Kind::UserDefined => false,
                Kind::Normal | Kind::Unused | Kind::Byte => return None,
            };
            Some((AddedToken::from(token.clone(), special).normalized(false), id))
        };
        (0..).zip(&self.tokens).filter_map(added).collect()
    }

    /// Before the quadratic search for splits, not only when everything is checked.
    fn check_lengths(&self) -> Result<()> {
        let limit = super::build::MAX_TOKEN_BYTES;
        match self.tokens.iter().position(|token| token.len() > limit) {
            Some(id) => {
                let len = self.tokens[id].len();
                Err(invalid(format!("token {id} has {len} bytes, the limit is {limit}")))
            }
            None => Ok(()),
        }
    }

    fn affixes(&self, add_bos: bool) -> Result<(Vec<u32>, Vec<u32>)> {
        let affix = |name: &str, id: Option<u32>, wanted: Option<bool>, default: bool| {
            if wanted == Some(true) && id.is_none() {
                return Err(invalid(format!("add_{name}_token is set without {name}_token_id")));
            }
            Ok(id.filter(|_| wanted.unwrap_or(default)).into_iter().collect())
        };
        Ok((
            affix("bos", self.bos_id, self.add_bos, add_bos)?,
            affix("eos", self.eos_id, self.add_eos, false)?,
        ))
    }

    fn roles(&self) -> Roles {
        Roles { bos: self.bos_id, eos: self.eos_id, unk: self.unk_id, pad: self.pad_id }
    }
}
