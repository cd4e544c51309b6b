//! `tokenizer.json`, the file of the Hugging Face `tokenizers` library.

mod components;

use super::Roles;
use super::build::{Parts, invalid};
use crate::checkpoint::TokenizerConfig;
use crate::error::quoted;
use crate::{Error, Result};
use serde::de::{Deserialize, DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::Value;
use std::fmt;
use tokenizers::AddedToken;

/// Only the kind of the model: other kinds spell the vocabulary in other ways.
#[derive(serde::Deserialize)]
struct Probe {
    model: ProbeModel,
}

#[derive(serde::Deserialize)]
struct ProbeModel {
    #[serde(rename = "type")]
    kind: Option<String>,
}

#[derive(serde::Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(serde::Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

#[derive(serde::Deserialize)]
struct Model {
    vocab: Vocab,
    merges: Vec<Merge>,
    unk_token: Option<String>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// Two tokens, or in older files both in one string.
#[derive(serde::Deserialize)]
#[serde(untagged)]
enum Merge {
    Pair(String, String),
    Joined(String),
}

/// The entries of the vocabulary object, repeated keys included, so that they can be refused.
struct Vocab(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Vocab {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Vocab;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tokens to ids")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vocab, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Vocab(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Reads the file's bytes; the parts are not checked against each other yet.
pub(super) fn parse(json: &[u8], config: &TokenizerConfig) -> Result<Parts> {
    let probe: Probe = from_slice(json)?;
    if probe.model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        let kind = quoted(&probe.model.kind.unwrap_or_default());
        return Err(Error::unsupported(format!("tokenizer model {kind}"), "BPE"));
    }
    let File { added_tokens, normalizer, pre_tokenizer, post_processor, decoder, model } =
        from_slice(json)?;
    for (name, value) in [
        ("continuing_subword_prefix", &model.continuing_subword_prefix),
        ("end_of_word_suffix", &model.end_of_word_suffix),
    ] {
        if let Some(value) = value.as_deref().filter(|value| !value.is_empty()) {
            let value = quoted(value);
            return Err(Error::unsupported(format!("tokenizer model with {name} {value}"), "none"));
        }
    }
    if let Some(dropout) = model.dropout.filter(|&dropout| dropout != 0.0) {
        return Err(Error::unsupported(format!("tokenizer model with dropout {dropout}"), "0"));
    }
    let added = added_tokens.into_iter().map(|added| (added.token, added.id)).collect::<Vec<_>>();
    let roles = {
        let id_of = |token: &Option<String>| find(token.as_deref(), &added, &model.vocab.0);
        Roles {
            bos: id_of(&config.bos_token)?,
            eos: id_of(&config.eos_token)?,
            unk: id_of(if config.unk_token.is_some() {
                &config.unk_token
            } else {
                &model.unk_token
            })?,
            pad: id_of(&config.pad_token)?,
        }
    };
    let merges = model.merges.into_iter().enumerate().map(pair).collect::<Result<_>>()?;
    let (prefix, suffix) = components::affixes(&post_processor)?;
    Ok(Parts {
        merges,
        ignore_merges: model.ignore_merges,
        byte_fallback: model.byte_fallback,
        fuse_unk: model.fuse_unk,
        unk: model.unk_token,
        normalizer: components::normalizer(normalizer)?,
        pre_tokenizer: components::pre_tokenizer(pre_tokenizer)?,
        added,
        spelling: components::spelling(&decoder)?,
        prefix,
        suffix,
        roles,
        vocab: model.vocab.0,
    })
}

fn from_slice<T: DeserializeOwned>(json: &[u8]) -> Result<T> {
    serde_json::from_slice(json).map_err(|error| Error::json(&error))
}

/// The id of a token that the configuration names.
fn find(
    token: Option<&str>,
    added: &[(AddedToken, u32)],
    vocab: &[(String, u32)],
) -> Result<Option<u32>> {
    let Some(token) = token else { return Ok(None) };
    let in_added = added.iter().find(|(added, _)| added.content == token).map(|(_, id)| *id);
    let in_vocab = || vocab.iter().find(|(text, _)| text == token).map(|(_, id)| *id);
    let id = in_added.or_else(in_vocab);
    let unknown = || invalid(format!("special token {} is not in the vocabulary", quoted(token)));
    id.map(Some).ok_or_else(unknown)
}

fn pair((rank, merge): (usize, Merge)) -> Result<(String, String)> {
    match merge {
        Merge::Pair(left, right) => Ok((left, right)),
        Merge::Joined(text) => match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => Ok((left.to_owned(), right.to_owned())),
            _ => Err(invalid(format!("merge {rank} is {}, not two tokens", quoted(&text)))),
        },
    }
}
