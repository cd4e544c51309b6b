//! Tokenizers from the vocabulary of a GGUF file.

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

impl GgufVocabulary {
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
                return Err(Error::unsupported(
                    format!("tokenizer model {}", quoted(other)),
                    "gpt2, llama",
                ));
            }
        };
        Ok(parts)
    }

    fn byte_level(self, kinds: &[Kind]) -> Result<Parts> {
        let pre = patterns::named(self.pre.as_deref())?;
        let (prefix, suffix) = self.affixes(pre.add_bos)?;
        let added = self.added(kinds);
        let roles = self.roles();
        let merges = self.merges.into_iter().enumerate().map(split_merge).collect::<Result<_>>()?;
        Ok(Parts {
            merges,
            ignore_merges: pre.ignore_merges,
            byte_fallback: false,
            fuse_unk: false,
            unk: None,
            normalizer: pre.normalizer,
            pre_tokenizer: Some(pre.pre_tokenizer),
            added,
            spelling: Spelling::ByteLevel,
            prefix,
            suffix,
            roles,
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

/// The two tokens of a merge. The first character may itself be a space.
fn split_merge((rank, mut merge): (usize, String)) -> Result<(String, String)> {
    let first = merge.chars().next().map_or(0, char::len_utf8);
    match merge[first..].find(' ').map(|space| first + space) {
        Some(space) if space + 1 < merge.len() => {
            let right = merge.split_off(space + 1);
            merge.truncate(space);
            Ok((merge, right))
        }
        _ => Err(invalid(format!("merge {rank} is {}, not two tokens", quoted(&merge)))),
    }
}
