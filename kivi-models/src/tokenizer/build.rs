//! The one place where a tokenizer is checked and put together, whatever file it came from.

use super::pieces::{Pieces, Spelling};
use super::{Inner, Roles, Tokenizer};
use crate::error::quoted;
use crate::{Error, Result};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokenizers::models::bpe::{BPE, BpeBuilder, Vocab};
use tokenizers::{AddedToken, AddedVocabulary, NormalizerWrapper, PreTokenizerWrapper};

/// Ids stay below this, four times the largest vocabulary in use, so that tables indexed by id are
/// bounded.
pub(super) const MAX_VOCAB: usize = 1 << 20;

/// Bytes of a token; the longest in use have a few hundred. It bounds the work of finding the
/// splits of a token.
pub(super) const MAX_TOKEN_BYTES: usize = 4096;

/// A tokenizer as a file describes it, not yet checked.
pub(super) struct Parts {
    /// `(token, id)` of the merge vocabulary; may hold the special tokens too.
    pub(super) vocab: Vec<(String, u32)>,
    /// Pairs to merge, first to last.
    pub(super) merges: Vec<(String, String)>,
    /// A pre-token that is in the vocabulary is taken whole.
    pub(super) ignore_merges: bool,
    /// Characters outside the vocabulary become byte tokens.
    pub(super) byte_fallback: bool,
    /// Several unknown characters in a row become one unknown token.
    pub(super) fuse_unk: bool,
    /// The unknown token.
    pub(super) unk: Option<String>,
    /// Applied to the text between added tokens.
    pub(super) normalizer: Option<NormalizerWrapper>,
    /// Cuts the text into the pieces that merges stay inside.
    pub(super) pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Tokens found in the text before anything else.
    pub(super) added: Vec<(AddedToken, u32)>,
    /// How the vocabulary spells bytes.
    pub(super) spelling: Spelling,
    /// Put before a text on request.
    pub(super) prefix: Vec<u32>,
    /// Put after a text on request.
    pub(super) suffix: Vec<u32>,
    /// Tokens with a role.
    pub(super) roles: Roles,
}

/// An [`Error::InvalidTokenizer`].
pub(super) fn invalid(reason: impl Into<String>) -> Error {
    Error::InvalidTokenizer { reason: reason.into() }
}

impl Parts {
    /// Checks everything and builds the tokenizer.
    pub(super) fn build(mut self) -> Result<Tokenizer> {
        let plain_merges = self.check()?;
        let added = self.added_vocabulary()?;
        let mut added_plain = added.clone();
        added_plain.set_encode_special_tokens(true);
        self.drop_special_from_model(&plain_merges);
        let pieces = Pieces::new(
            self.spelling,
            self.vocab.iter().map(|(token, id)| (token.as_str(), *id)),
            self.added.iter().map(|(token, id)| (token.content.as_str(), *id, token.special)),
        );
        let mut model = BpeBuilder::new()
            .vocab_and_merges(self.vocab.into_iter().collect::<Vocab>(), self.merges)
            .ignore_merges(self.ignore_merges)
            .byte_fallback(self.byte_fallback)
            .fuse_unk(self.fuse_unk);
        if let Some(unk) = self.unk {
            model = model.unk_token(unk);
        }
        let inner = Inner {
            model: model.build().map_err(|error| invalid(error.to_string()))?,
            normalizer: self.normalizer,
            pre_tokenizer: self.pre_tokenizer,
            added,
            added_plain,
            pieces,
            prefix: self.prefix,
            suffix: self.suffix,
            roles: self.roles,
        };
        Ok(Tokenizer { inner: Arc::new(inner) })
    }

    /// Checks the parts against each other; returns for each merge whether it is free of special
    /// tokens.
    fn check(&self) -> Result<Vec<bool>> {
        let (id_of, ids) = self.check_vocab()?;
        let special = self.special_ids();
        let mut plain_merges = Vec::with_capacity(self.merges.len());
        let mut merged = String::new();
        for (rank, (left, right)) in self.merges.iter().enumerate() {
            merged.clear();
            merged.push_str(left);
            merged.push_str(right);
            let mut plain = true;
            for token in [left, right, &merged] {
                let Some(id) = id_of.get(token.as_str()) else {
                    let name = quoted(token);
                    return Err(invalid(format!(
                        "merge {rank} names {name}, which is not in the vocabulary"
                    )));
                };
                plain &= !special.contains(id);
            }
            plain_merges.push(plain);
        }
        if let Some(unk) = &self.unk
            && !id_of.contains_key(unk.as_str())
        {
            let name = quoted(unk);
            return Err(invalid(format!("the unknown token {name} is not in the vocabulary")));
        }
        let Roles { bos, eos, unk, pad } = self.roles;
        let affixes = self.prefix.iter().chain(&self.suffix).copied();
        for id in [bos, eos, unk, pad].into_iter().flatten().chain(affixes) {
            if !ids.contains(&id) {
                return Err(invalid(format!("special token id {id} has no token")));
            }
        }
        Ok(plain_merges)
    }

    /// Every id and every token once, and of sane size; returns the merge vocabulary, and the ids of
    /// all tokens.
    fn check_vocab(&self) -> Result<(HashMap<&str, u32>, HashSet<u32>)> {
        let mut id_of = HashMap::with_capacity(self.vocab.len());
        let mut ids = HashSet::with_capacity(self.vocab.len() + self.added.len());
        let mut added_contents = HashSet::new();
        let vocab = self.vocab.iter().map(|(token, id)| (token.as_str(), *id, false));
        let added = self.added.iter().map(|(token, id)| (token.content.as_str(), *id, true));
        for (token, id, is_added) in vocab.chain(added) {
            if id as usize >= MAX_VOCAB {
                let name = quoted(token);
                return Err(invalid(format!("token {name} has id {id}, the limit is {MAX_VOCAB}")));
            }
            if token.len() > MAX_TOKEN_BYTES {
                let len = token.len();
                return Err(invalid(format!(
                    "token {id} has {len} bytes, the limit is {MAX_TOKEN_BYTES}"
                )));
            }
            if is_added && (token.is_empty() || !added_contents.insert(token)) {
                let name = quoted(token);
                return Err(invalid(format!("added token {name} is empty or given twice")));
            }
            let other = if is_added { id_of.get(token).copied() } else { id_of.insert(token, id) };
            match other {
                // An added token may be in the vocabulary as well, under the same id.
                Some(other) if is_added && other == id => continue,
                Some(other) => {
                    let name = quoted(token);
                    return Err(invalid(format!("token {name} has the ids {other} and {id}")));
                }
                None => {}
            }
            if !ids.insert(id) {
                let name = quoted(token);
                return Err(invalid(format!("id {id} belongs to {name} and to another token")));
            }
        }
        Ok((id_of, ids))
    }

    fn special_ids(&self) -> HashSet<u32> {
        self.added.iter().filter(|(token, _)| token.special).map(|(_, id)| *id).collect()
    }

    /// The added tokens under their own ids. The crate takes ids from the model, so it is shown a
    /// model of nothing but these tokens.
    fn added_vocabulary(&self) -> Result<AddedVocabulary> {
        let ids = self.added.iter().map(|(token, id)| (token.content.clone(), *id));
        let model = BPE::builder()
            .vocab_and_merges(ids.collect::<Vocab>(), Vec::new())
            .build()
            .map_err(|error| invalid(error.to_string()))?;
        let tokens: Vec<AddedToken> = self.added.iter().map(|(token, _)| token.clone()).collect();
        let mut added = AddedVocabulary::new();
        added.add_tokens(&tokens, &model, self.normalizer.as_ref());
        Ok(added)
    }

    /// Takes the special tokens out of reach of ordinary text: they leave the merge vocabulary, all
    /// but the unknown token, and with them the merges that involve them.
    fn drop_special_from_model(&mut self, plain_merges: &[bool]) {
        let mut plain = plain_merges.iter();
        self.merges.retain(|_| plain.next() == Some(&true));
        let special = self.special_ids();
        let unk = self.unk.as_deref();
        self.vocab.retain(|(token, id)| !special.contains(id) || Some(&**token) == unk);
    }
}
