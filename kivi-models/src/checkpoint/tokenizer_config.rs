//! `tokenizer_config.json`: what `tokenizer.json` does not say.

use super::files;
use super::gguf::Gguf;
use super::tokenizer_source::special_token;
use crate::{Error, Result};
use serde::Deserialize;
use std::path::Path;

/// The chat template and the texts of the special tokens, the fields of a `tokenizer_config.json`
/// that matter here; all of them may be absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenizerConfig {
    /// Text of the beginning-of-sequence token.
    pub bos_token: Option<String>,
    /// Text of the end-of-sequence token.
    pub eos_token: Option<String>,
    /// Text of the unknown token.
    pub unk_token: Option<String>,
    /// Text of the padding token.
    pub pad_token: Option<String>,
    /// Source of the (default) chat template.
    pub chat_template: Option<String>,
}

#[derive(Deserialize)]
struct Raw {
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    unk_token: Option<Token>,
    pad_token: Option<Token>,
    chat_template: Option<Template>,
}

/// A token as plain text, or with the flags of an added token around it.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a token")]
enum Token {
    Text(String),
    Added { content: String },
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a template or a list of named ones")]
enum Template {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Parses a `tokenizer_config.json`. Of several named templates the one called `default` is
    /// taken.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] when it does not parse or a field has another type.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let raw: Raw = serde_json::from_slice(json).map_err(|error| Error::json(&error))?;
        let text = |token: Option<Token>| {
            token.map(|token| match token {
                Token::Text(text) | Token::Added { content: text } => text,
            })
        };
        let chat_template = match raw.chat_template {
            Some(Template::One(template)) => Some(template),
            Some(Template::Named(templates)) => {
                templates.into_iter().find(|t| t.name == "default").map(|t| t.template)
            }
            None => None,
        };
        Ok(Self {
            bos_token: text(raw.bos_token),
            eos_token: text(raw.eos_token),
            unk_token: text(raw.unk_token),
            pad_token: text(raw.pad_token),
            chat_template,
        })
    }

    /// Reads the same from the metadata of a GGUF file.
    pub(super) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        Ok(Self {
            bos_token: special_token(gguf, "bos")?,
            eos_token: special_token(gguf, "eos")?,
            unk_token: special_token(gguf, "unknown")?,
            pad_token: special_token(gguf, "padding")?,
            chat_template: gguf.string("tokenizer.chat_template")?.map(str::to_owned),
        })
    }

    /// Reads `tokenizer_config.json` and `chat_template.jinja`, either if it is there; the template
    /// of the latter wins, as in transformers.
    pub(super) fn from_directory(directory: &Path) -> Result<Self> {
        let path = directory.join("tokenizer_config.json");
        let mut config = match files::read_optional(&path)? {
            Some(json) => Self::from_json(&json).map_err(|error| error.in_file(&path))?,
            None => Self::default(),
        };
        let path = directory.join("chat_template.jinja");
        if let Some(bytes) = files::read_optional(&path)? {
            config.chat_template = Some(String::from_utf8(bytes).map_err(|_| {
                Error::unsupported("a chat template that is not UTF-8", "UTF-8").in_file(&path)
            })?);
        }
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_and_templates_come_in_two_forms() {
        let json = br#"{"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": false},
            "unk_token": null, "model_max_length": 1e30, "chat_template": [
            {"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
        let config = TokenizerConfig::from_json(json).unwrap();
        assert_eq!(config.bos_token.as_deref(), Some("<s>"));
        assert_eq!(config.eos_token.as_deref(), Some("</s>"));
        assert_eq!((config.unk_token, config.pad_token), (None, None));
        assert_eq!(config.chat_template.as_deref(), Some("d"));
        assert!(TokenizerConfig::from_json(br#"{"bos_token": 1}"#).is_err());
    }
}
