//! Texts to evaluate on.

use anyhow::{Result, anyhow};
use kivi::models::tokenizer::Tokenizer;
use std::path::Path;

/// The whole of a text file.
pub(in crate::cli) fn read_text(path: &Path) -> Result<String> {
    std::fs::read_to_string(path)
        .map_err(|error| anyhow!("cannot read {}: {error}", path.display()))
}

/// Tokens of a text file, without one for the beginning of a text.
pub(in crate::cli) fn read_tokens(path: &Path, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    Ok(tokenizer.encode(&read_text(path)?, false, false)?)
}
