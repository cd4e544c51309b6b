//! The error type of this crate.

use std::path::{Path, PathBuf};

/// What can go wrong while a model is found, read or run.
///
/// *Invalid*, *missing* and *wrong* variants mean that the files are damaged or incomplete;
/// *unsupported* variants mean that they are sound but ask for something this crate does not do.
/// Messages are one line and lower-case; names taken from a file are escaped and shortened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The operating system could not read a file or directory.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Another error, with the file it was found in.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<Error>,
    },
    /// The path is neither a model directory nor a model file.
    #[error("{} is not a model: {reason}", path.display())]
    NotAModel {
        /// What was given.
        path: PathBuf,
        /// What was found instead.
        reason: String,
    },
    /// Bytes that are not a well-formed GGUF file.
    #[error("invalid GGUF: {reason}")]
    InvalidGguf {
        /// What is wrong, and where.
        reason: String,
    },
    /// Bytes that are not a well-formed safetensors file, or an index that contradicts its files.
    #[error("invalid safetensors: {reason}")]
    InvalidSafetensors {
        /// What is wrong.
        reason: String,
    },
    /// A JSON file that does not parse or does not have the expected fields.
    #[error("invalid JSON: {reason}")]
    InvalidJson {
        /// What is wrong, with line and column.
        reason: String,
    },
    /// A file that another file names, or that every model directory has, is not there.
    #[error("{} is missing: {reason}", path.display())]
    MissingFile {
        /// The file looked for.
        path: PathBuf,
        /// Why it is needed.
        reason: String,
    },
    /// A model configuration that no model can have.
    #[error("invalid model configuration: {reason}")]
    InvalidConfig {
        /// Which value, what it is and what it may be.
        reason: String,
    },
    /// A model of an architecture this crate does not have.
    #[error("architecture {name} is not supported (supported: {supported})")]
    UnsupportedArchitecture {
        /// Name in the model file.
        name: String,
        /// The names that are.
        supported: &'static str,
    },
    /// A sound file that uses something this crate does not implement.
    #[error("not supported: {what} (supported: {supported})")]
    UnsupportedFeature {
        /// What it uses.
        what: String,
        /// What may stand in its place.
        supported: String,
    },
    /// A weight the architecture needs is not in the checkpoint.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// Name as the checkpoint would spell it.
        name: String,
    },
    /// A weight whose shape contradicts the configuration.
    #[error("tensor {name} has shape {found:?}, the configuration needs {expected:?}")]
    WrongShape {
        /// Name in the checkpoint.
        name: String,
        /// Its shape, slowest dimension first.
        found: Vec<usize>,
        /// `[rows, columns]`, or `[1, n]` for a vector.
        expected: [usize; 2],
    },
    /// The model has no tokenizer.
    #[error("{} holds no tokenizer: {reason}", path.display())]
    MissingTokenizer {
        /// The model file or directory.
        path: PathBuf,
        /// What was looked for.
        reason: String,
    },
    /// A tokenizer file that contradicts itself, or that fails on a text.
    #[error("invalid tokenizer: {reason}")]
    InvalidTokenizer {
        /// What is wrong, with the numbers.
        reason: String,
    },
    /// A chat template that does not parse or fails while it runs.
    #[error("invalid chat template: {reason}")]
    InvalidTemplate {
        /// What is wrong, with the line.
        reason: String,
    },
    /// A chat template that refuses the messages it was given.
    #[error("the chat template refuses these messages: {reason}")]
    TemplateRejected {
        /// The template's own words.
        reason: String,
    },
    /// A sampling option outside its range.
    #[error("invalid sampling option: {reason}")]
    InvalidSampling {
        /// Which option, its value, and what is allowed.
        reason: String,
    },
    /// Logits that no token can be chosen from.
    #[error("invalid logits: {reason}")]
    InvalidLogits {
        /// What is wrong with them.
        reason: String,
    },
    /// A stop sequence that cannot be looked for.
    #[error("invalid stop sequence: {reason}")]
    InvalidStop {
        /// What is wrong with it.
        reason: String,
    },
    /// A model's name that fits no known form.
    #[error(
        "no model {name}: not a path that exists, not a known name ({known}), and not of the form \
         org/model[@revision] or org/model[@revision]:FILE.gguf"
    )]
    UnknownModel {
        /// The name, quoted.
        name: String,
        /// The known names.
        known: String,
    },
    /// A known model that is not on this machine and may not be fetched.
    #[error(
        "{name} is not on this machine and this run is offline: run once with a network connection, \
         or put the file with SHA-256 {sha256} at {}",
        file.display()
    )]
    Offline {
        /// The model's name.
        name: String,
        /// Where the file would be found.
        file: PathBuf,
        /// SHA-256 of the one right file.
        sha256: String,
    },
    /// A repository of the Hub that is not on this machine and may not be fetched.
    #[error(
        "{name} is not in the Hub's cache at {} and this run is offline: run once with a network \
         connection, or fetch it with \"hf download\"",
        cache.display()
    )]
    OfflineHub {
        /// Repository, revision and file.
        name: String,
        /// Where it was looked for.
        cache: PathBuf,
    },
    /// A model that no source could provide.
    #[error("cannot get {name}: {}", joined(attempts))]
    Unavailable {
        /// The model's name.
        name: String,
        /// The sources, in the order they were asked.
        attempts: Vec<crate::fetch::Attempt>,
    },
    /// The platform does not say where caches go.
    #[error("no cache folder: neither KIVI_CACHE_DIR nor a home folder is set")]
    NoCacheDir,
    /// The operating system could not write a file.
    #[error("cannot write {}: {source}", path.display())]
    Write {
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// An error of the core or a backend.
    #[error(transparent)]
    Core(#[from] kivi_core::Error),
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The error itself, without the file names wrapped around it.
    pub fn root(&self) -> &Error {
        match self {
            Self::InFile { error, .. } => error.root(),
            other => other,
        }
    }

    /// An [`Error::InvalidGguf`].
    pub(crate) fn gguf(reason: impl Into<String>) -> Self {
        Self::InvalidGguf { reason: reason.into() }
    }

    /// An [`Error::InvalidSafetensors`].
    pub(crate) fn safetensors(reason: impl Into<String>) -> Self {
        Self::InvalidSafetensors { reason: reason.into() }
    }

    /// An [`Error::InvalidConfig`].
    pub(crate) fn config(reason: impl Into<String>) -> Self {
        Self::InvalidConfig { reason: reason.into() }
    }

    /// An [`Error::UnsupportedFeature`].
    pub(crate) fn unsupported(what: impl Into<String>, supported: impl Into<String>) -> Self {
        Self::UnsupportedFeature { what: what.into(), supported: supported.into() }
    }

    /// An [`Error::InvalidJson`] from serde's report.
    pub(crate) fn json(error: &serde_json::Error) -> Self {
        Self::InvalidJson { reason: one_line(&error.to_string()) }
    }

    /// This error, found in `path`. Errors that already name a path are left alone.
    pub(crate) fn in_file(self, path: &Path) -> Self {
        match self {
            Self::Io { .. }
            | Self::InFile { .. }
            | Self::NotAModel { .. }
            | Self::MissingFile { .. }
            | Self::MissingTokenizer { .. } => self,
            error => Self::InFile { path: path.to_owned(), error: Box::new(error) },
        }
    }
}

/// All attempts on one line.
fn joined(attempts: &[crate::fetch::Attempt]) -> String {
    attempts.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

/// A name from a file, fit for a one-line message: quoted, escaped, cut after 64 characters.
pub(crate) fn quoted(name: &str) -> String {
    const MOST_CHARS: usize = 64;
    let more = if name.chars().nth(MOST_CHARS).is_some() { "…" } else { "" };
    let short: String = name.chars().take(MOST_CHARS).flat_map(char::escape_debug).collect();
    format!("\"{short}{more}\"")
}

/// Another library's message, which may quote a file: control characters escaped, cut after 256
/// characters.
pub(crate) fn one_line(message: &str) -> String {
    const MOST_CHARS: usize = 256;
    let mut line = String::new();
    for char in message.chars().take(MOST_CHARS) {
        if char.is_control() {
            line.extend(char.escape_debug());
        } else {
            line.push(char);
        }
    }
    if message.chars().nth(MOST_CHARS).is_some() {
        line.push('…');
    }
    line
}
