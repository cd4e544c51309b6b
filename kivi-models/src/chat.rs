//! Chat templates: a list of messages to the text the model was trained on.
//!
//! Templates are Jinja as Hugging Face transformers renders it: `trim_blocks`, `lstrip_blocks`,
//! Python's string methods, `raise_exception`, `strftime_now`, and a `tojson` that escapes nothing
//! for HTML. The source file followed is `transformers/utils/chat_template_utils.py`.

mod json;

use crate::error::one_line;
use crate::{Error, Result};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, UndefinedBehavior, Value, context};
use serde::{Deserialize, Serialize};

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `"system"`, `"user"`, `"assistant"`, or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A message of `role`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// Name of the one template in the environment.
const NAME: &str = "chat";

/// Instructions a template may run, so that a hostile one ends. Real templates take a few dozen per
/// message.
const FUEL: u64 = 5_000_000;

impl ChatTemplate {
    /// Compiles `source`; `bos` and `eos` are the texts of the model's special tokens, which most
    /// templates insert.
    ///
    /// # Errors
    /// [`Error::InvalidTemplate`] when `source` is not valid Jinja.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self> {
        let mut environment = Environment::new();
        let whitespace = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(whitespace.map_err(|error| invalid(&error))?);
        // Jinja2's default, which templates rely on: printing an undefined value prints nothing,
        // but reaching into one is an error.
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment.add_template_owned(NAME, portable(source)).map_err(|error| invalid(&error))?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The conversation as the model expects it. `add_generation_prompt` appends the opening of an
    /// assistant turn.
    ///
    /// The result is meant to be encoded with special tokens parsed and none added: the template
    /// writes them itself. Text inside a message that spells a special token then becomes one, as
    /// in every implementation of these templates; a server that must rule this out checks the
    /// messages first, with [`Tokenizer::contains_special`](crate::tokenizer::Tokenizer::contains_special).
    ///
    /// # Errors
    /// [`Error::TemplateRejected`] when the template itself refuses the messages (wrong order of
    /// roles, say), [`Error::InvalidTemplate`] when it fails otherwise.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let fail = |error: minijinja::Error| match rejection(&error) {
            Some(reason) => Error::TemplateRejected { reason },
            None => invalid(&error),
        };
        let messages = messages.iter().map(|message| {
            Value::from_pairs([("role", &message.role), ("content", &message.content)])
        });
        self.environment
            .get_template(NAME)
            .and_then(|template| {
                template.render(context! {
                    messages => messages.collect::<Value>(),
                    add_generation_prompt => add_generation_prompt,
                    bos_token => &self.bos,
                    eos_token => &self.eos,
                    tools => (),
                    documents => (),
                })
            })
            .map_err(fail)
    }
}

/// Marks an error raised by the template, to tell it from one in the template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Rejection(String);

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, "raised by the template")
        .with_source(Rejection(message)))
}

/// The template's own message, when it called `raise_exception`.
fn rejection(error: &minijinja::Error) -> Option<String> {
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        if let Some(Rejection(message)) = inner.downcast_ref() {
            return Some(one_line(message));
        }
        source = inner.source();
    }
    None
}

/// The local date and time in the given `strftime` format.
fn strftime_now(format: &str) -> Result<String, minijinja::Error> {
    jiff::fmt::strtime::format(format, &jiff::ZonedDateTime::now())
        .map_err(|error| minijinja::Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// The template without the two constructs of real templates that only Python's Jinja has: the
/// `generation` block, which marks the assistant's words for training and prints nothing, and the
/// slice `[::-1]`, which the `reverse` filter does as well.
fn portable(source: &str) -> String {
    let mut source = source.replace("[::-1]", "|reverse");
    for tag in ["generation", "endgeneration"] {
        for (open, close) in [("{% ", " %}"), ("{%- ", " %}"), ("{% ", " -%}"), ("{%- ", " -%}")] {
            // An empty comment keeps the whitespace rules of the tag it stands for.
            let comment = format!(
                "{}{}",
                open.trim_end().replace('%', "#"),
                close.trim_start().replace('%', "#")
            );
            source = source.replace(&format!("{open}{tag}{close}"), &comment);
        }
    }
    source
}

fn invalid(error: &minijinja::Error) -> Error {
    let mut reason = error.to_string();
    if let Some(source) = std::error::Error::source(error) {
        reason = format!("{reason}: {source}");
    }
    Error::InvalidTemplate { reason: one_line(&reason) }
}
