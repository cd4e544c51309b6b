//! The chat template and the special tokens it uses.

use super::files;
use super::gguf::Gguf;
use super::tokenizer_source::special_token;
use crate::{Error, Result};
use serde::Deserialize;
use std::path::Path;

/// What a chat template and its caller need besides the tokenizer.
#[derive(Default)]
pub(super) struct TextSettings {
    pub(super) chat_template: Option<String>,
    pub(super) bos_token: Option<String>,
    pub(super) eos_token: Option<String>,
}

/// The fields of `tokenizer_config.json` that are read here.
#[derive(Default, Deserialize)]
struct RawTokenizerConfig {
    chat_template: Option<RawTemplate>,
    bos_token: Option<RawToken>,
    eos_token: Option<RawToken>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a template or a list of named ones")]
enum RawTemplate {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// A token as plain text, or with the flags of an added token around it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a token")]
enum RawToken {
    Text(String),
    Added { content: String },
}

impl RawToken {
    fn text(self) -> String {
        match self {
            Self::Text(text) | Self::Added { content: text } => text,
        }
    }
}

impl TextSettings {
    /// Reads the metadata of a GGUF file.
    pub(super) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Ok(Self {
            chat_template: gguf.string("tokenizer.chat_template")?.map(str::to_owned),
            bos_token: special_token(gguf, "bos")?,
            eos_token: special_token(gguf, "eos")?,
        })
    }

    /// Reads `tokenizer_config.json` and `chat_template.jinja`; the latter wins, as in transformers.
    /// Of several named templates the one called `default` is taken.
    pub(super) fn from_directory(directory: &Path) -> Result<Self> {
        let path = directory.join("tokenizer_config.json");
        let raw = match files::read_optional(&path)? {
            Some(json) => serde_json::from_slice::<RawTokenizerConfig>(&json)
                .map_err(|error| Error::json(&error).in_file(&path))?,
            None => RawTokenizerConfig::default(),
        };
        let jinja = directory.join("chat_template.jinja");
        let chat_template = match (files::read_optional(&jinja)?, raw.chat_template) {
            (Some(bytes), _) => Some(String::from_utf8(bytes).map_err(|_| {
                Error::unsupported("a chat template that is not UTF-8").in_file(&jinja)
            })?),
            (None, Some(RawTemplate::One(template))) => Some(template),
            (None, Some(RawTemplate::Named(templates))) => templates
                .into_iter()
                .find(|template| template.name == "default")
                .map(|template| template.template),
            (None, None) => None,
        };
        Ok(Self {
            chat_template,
            bos_token: raw.bos_token.map(RawToken::text),
            eos_token: raw.eos_token.map(RawToken::text),
        })
    }
}
