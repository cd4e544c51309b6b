//! Text to token ids and back.
//!
//! A [`Tokenizer`] is built from a Hugging Face `tokenizer.json` or from the metadata of a GGUF
//! file; both give the same ids. The byte-pair merging and the pre-tokenizers are those of the
//! `tokenizers` crate. Around it, this module differs in three ways:
//!
//! - Special tokens are not part of the merge vocabulary, so that text is never encoded to one
//!   unless the caller asks for it, not even where the model's own file would allow it.
//! - Truncation and padding that a `tokenizer.json` may ask for are not applied.
//! - Decoding concatenates the tokens' bytes and then replaces what is not UTF-8, for every kind of
//!   tokenizer. It is the only rule under which the text of a sequence does not change when tokens
//!   are added to it. (For invalid bytes in a SentencePiece vocabulary, Hugging Face replaces the
//!   whole run of byte tokens instead.)

mod build;
mod gguf;
mod json;
mod patterns;
mod pieces;
mod sentencepiece;

use crate::checkpoint::{GgufVocabulary, TokenizerConfig, TokenizerSource, read_optional};
use crate::{Error, Result};
use pieces::Pieces;
use std::sync::Arc;
use tokenizers::models::bpe::BPE;
use tokenizers::{
    AddedVocabulary, Model, NormalizerWrapper, OffsetType, PreTokenizer, PreTokenizerWrapper,
};

/// A tokenizer; cloning it is cheap, and clones may be used from many threads.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
}

struct Inner {
    model: BPE,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Finds special and other added tokens in text.
    added: AddedVocabulary,
    /// The same, but leaves special tokens alone.
    added_plain: AddedVocabulary,
    pieces: Pieces,
    /// Put before a text on request, usually the beginning-of-sequence token.
    prefix: Vec<u32>,
    /// Put after a text on request.
    suffix: Vec<u32>,
    roles: Roles,
}

/// Ids of the tokens that have a role of their own.
#[derive(Clone, Copy, Debug, Default)]
struct Roles {
    bos: Option<u32>,
    eos: Option<u32>,
    unk: Option<u32>,
    pad: Option<u32>,
}

impl Tokenizer {
    /// A tokenizer from the bytes of a `tokenizer.json`, with the special tokens that
    /// `tokenizer_config.json` names.
    ///
    /// # Errors
    /// [`Error::InvalidTokenizer`] when the file contradicts itself, [`Error::UnsupportedFeature`]
    /// when it uses a model, normalizer, pre-tokenizer or decoder that no architecture here needs
    /// (supported: byte-pair encoding, byte-level or with SentencePiece's `▁` and byte tokens).
    pub fn from_json(json: &[u8], config: &TokenizerConfig) -> Result<Self> {
        json::parse(json, config)?.build()
    }

    /// A tokenizer from the vocabulary of a GGUF file.
    ///
    /// # Errors
    /// As [`Self::from_json`].
    pub fn from_gguf(vocabulary: GgufVocabulary) -> Result<Self> {
        vocabulary.into_parts()?.build()
    }

    /// The tokenizer of a checkpoint.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::MissingFile`] when the file cannot be read, and those of
    /// [`Self::from_json`].
    pub fn from_source(source: TokenizerSource) -> Result<Self> {
        match source {
            TokenizerSource::Gguf(vocabulary) => Self::from_gguf(*vocabulary),
            TokenizerSource::HuggingFace { path, config } => match read_optional(&path)? {
                Some(json) => Self::from_json(&json, &config).map_err(|error| error.in_file(&path)),
                None => Err(Error::MissingFile { path, reason: "the tokenizer is in it".into() }),
            },
        }
    }

    /// The token ids of `text`.
    ///
    /// `add_special` puts the model's own tokens around it (such as the beginning of sequence).
    /// `parse_special` turns text that spells a special token into that token; leave it off for
    /// text that a user typed.
    ///
    /// # Errors
    /// [`Error::InvalidTokenizer`] when a pre-tokenizer of the file fails on this text.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<u32>> {
        let inner = &*self.inner;
        let encoding = inner.run(text, parse_special).map_err(|error| {
            build::invalid(format!("cannot encode {} bytes of text: {error}", text.len()))
        })?;
        if let Some(byte) = inner.pieces.first_missing_byte(text.as_bytes()) {
            // The reference tokenizers drop such bytes; so do we, but not silently.
            tracing::warn!("the vocabulary has no token for byte {byte:#04x}; it is left out");
        }
        let ids = encoding.get_ids();
        Ok(if add_special { [&inner.prefix, ids, &inner.suffix].concat() } else { ids.to_vec() })
    }

    /// The text of `ids`; what is not UTF-8, and ids without a token, read as U+FFFD.
    ///
    /// The space that SentencePiece puts before the first word is dropped. `skip_special` leaves
    /// special tokens out.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| self.bytes_to_decode(id, skip_special)).copied().collect();
        let bytes = match bytes.strip_prefix(b" ") {
            Some(rest) if self.strips_leading_space() => rest,
            _ => &bytes,
        };
        String::from_utf8_lossy(bytes).into_owned()
    }

    /// The bytes one token stands for, perhaps only part of a character.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.inner.pieces.bytes(id)
    }

    /// The token that is spelled exactly so in the vocabulary.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        let inner = &*self.inner;
        inner.added.token_to_id(token, &inner.model)
    }

    /// How the vocabulary spells a token.
    pub fn token_text(&self, id: u32) -> Option<String> {
        let inner = &*self.inner;
        inner.added.simple_id_to_token(id).or_else(|| inner.model.id_to_token(id))
    }

    /// One more than the largest id; ids in between may be unused.
    pub fn vocab_size(&self) -> usize {
        self.inner.pieces.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos_id(&self) -> Option<u32> {
        self.inner.roles.bos
    }

    /// The end-of-sequence token.
    pub fn eos_id(&self) -> Option<u32> {
        self.inner.roles.eos
    }

    /// The token for text the vocabulary cannot spell.
    pub fn unk_id(&self) -> Option<u32> {
        self.inner.roles.unk
    }

    /// The token that fills up batches.
    pub fn pad_id(&self) -> Option<u32> {
        self.inner.roles.pad
    }

    /// Whether the token controls the model and is not text.
    pub fn is_special(&self, id: u32) -> bool {
        self.inner.pieces.is_special(id)
    }

    /// The first special token that `text` spells, for callers that must refuse such text.
    pub fn contains_special(&self, text: &str) -> Option<u32> {
        let is_in = |id: &u32| self.token_text(*id).is_some_and(|token| text.contains(&token));
        self.inner.pieces.special_ids().find(is_in)
    }

    /// Whether decoding drops one space at the beginning of a text.
    pub(crate) fn strips_leading_space(&self) -> bool {
        self.inner.pieces.strip_leading_space
    }

    /// The bytes `id` adds to decoded text.
    pub(crate) fn bytes_to_decode(&self, id: u32, skip_special: bool) -> &[u8] {
        if skip_special && self.is_special(id) {
            return &[];
        }
        self.token_bytes(id).unwrap_or("\u{FFFD}".as_bytes())
    }
}

impl Inner {
    /// The pipeline of the `tokenizers` crate, without truncation, padding and post-processing.
    fn run(&self, text: &str, parse_special: bool) -> tokenizers::Result<tokenizers::Encoding> {
        let added = if parse_special { &self.added } else { &self.added_plain };
        let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), text);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut pieces)?;
        }
        pieces.tokenize(|piece| self.model.tokenize(piece.get()))?;
        pieces.into_encoding(None, 0, OffsetType::None)
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("roles", &self.inner.roles)
            .finish_non_exhaustive()
    }
}
