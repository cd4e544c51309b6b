//! `tokenizer_config.json`: what `tokenizer.json` does not say.

use crate::{Error, Result};
use serde::Deserialize;

/// The fields of a `tokenizer_config.json` that matter here; all of them may be absent.
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
struct File {
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    unk_token: Option<Token>,
    pad_token: Option<Token>,
    chat_template: Option<Template>,
}

/// A token is its text, or an object with the text in it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

/// A template is its source, or there are several with names.
#[derive(Deserialize)]
#[serde(untagged)]
enum Template {
    Source(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl TokenizerConfig {
    /// Reads the file's bytes. Of several named templates, the one called `default` is taken.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] when it does not parse or a field has another type.
    pub fn from_json(json: &[u8]) -> Result<Self> {
        let file: File = serde_json::from_slice(json).map_err(|error| Error::json(&error))?;
        let text = |token: Option<Token>| {
            token.map(|token| match token {
                Token::Text(content) | Token::Object { content } => content,
            })
        };
        let chat_template = match file.chat_template {
            None => None,
            Some(Template::Source(source)) => Some(source),
            Some(Template::Named(templates)) => {
                templates.into_iter().find(|t| t.name == "default").map(|t| t.template)
            }
        };
        Ok(Self {
            bos_token: text(file.bos_token),
            eos_token: text(file.eos_token),
            unk_token: text(file.unk_token),
            pad_token: text(file.pad_token),
            chat_template,
        })
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
