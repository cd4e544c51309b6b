//! The file of `kivi run --session`.

use anyhow::{Result, anyhow, bail};
use kivi::{DecoderBackend, SequenceId, Snapshot, models::Session};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A conversation that is kept in a file.
pub(super) struct SessionFile {
    path: PathBuf,
    /// Tokens of the conversation when the file was opened.
    tokens: Vec<u32>,
    /// What the file held, until it is restored; `None` if there was none.
    found: Option<Snapshot>,
}

/// A file that was written.
#[derive(Clone, Copy, Serialize)]
pub(super) struct SavedSession {
    tokens: usize,
    bytes: u64,
}

impl SessionFile {
    /// Reads and verifies the file, if there is one; otherwise it is to be created.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let exists = path
            .try_exists()
            .map_err(|error| anyhow!("cannot read {}: {error}", path.display()))?;
        let found = if exists { Some(Snapshot::load(path)?) } else { None };
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if let Some(folder) = folder
            && !folder.is_dir()
        {
            bail!("cannot write {}: {} is not a folder", path.display(), folder.display());
        }
        let tokens = found.as_ref().map_or(Vec::new(), |found| found.tokens().to_vec());
        Ok(Self { path: path.to_owned(), tokens, found })
    }

    /// Tokens of the conversation when the file was opened.
    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The sequence of the file, or an empty one.
    pub(super) fn sequence<B: DecoderBackend>(
        &mut self,
        session: &mut Session<B>,
    ) -> Result<SequenceId> {
        // Taken, so that the contents are not in memory twice.
        match self.found.take() {
            None => Ok(session.create_sequence()?),
            Some(snapshot) => session
                .restore(&snapshot)
                .map_err(|error| anyhow!("{}: {error}", self.path.display())),
        }
    }

    /// Writes the sequence, which holds `tokens`, in place of what was there.
    pub(super) fn save<B: DecoderBackend>(
        &self,
        session: &Session<B>,
        sequence: SequenceId,
        tokens: &[u32],
    ) -> Result<SavedSession> {
        let bytes = session.snapshot(sequence, tokens)?.save(&self.path)?;
        Ok(SavedSession { tokens: tokens.len(), bytes })
    }

    /// One line about the file.
    pub(super) fn describe(&self, saved: SavedSession) -> String {
        let SavedSession { tokens, bytes } = saved;
        format!("session: {tokens} tokens in {}, {bytes} bytes", self.path.display())
    }
}
