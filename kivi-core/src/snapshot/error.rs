//! What can be wrong with a snapshot.

use std::{io, path::PathBuf};

/// Why a snapshot cannot be written, read or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The bytes are something else.
    #[error("not a snapshot: {reason}")]
    NotASnapshot {
        /// What was found instead.
        reason: String,
    },
    /// A snapshot of a version of the format that this program does not know.
    #[error("version {found} of the snapshot format, and this program reads {known}")]
    UnknownVersion {
        /// Version of the file.
        found: u32,
        /// The version that can be read.
        known: u32,
    },
    /// The bytes end too early.
    #[error("truncated snapshot: {found} of {needed} bytes of {part}")]
    Truncated {
        /// The part that is incomplete.
        part: String,
        /// Its bytes.
        needed: u64,
        /// Those that are there.
        found: u64,
    },
    /// The bytes are not those that were written: a checksum differs, or more follow.
    #[error("damaged snapshot: {reason}")]
    Damaged {
        /// What was found.
        reason: String,
    },
    /// Intact bytes, whose writer broke the rules of the format.
    #[error("invalid snapshot: {reason}")]
    Invalid {
        /// Which rule, with the numbers.
        reason: String,
    },
    /// A sound snapshot that another model made.
    #[error("snapshot of another model: {what} {found} instead of {expected}")]
    OtherModel {
        /// What differs.
        what: &'static str,
        /// That of the snapshot.
        found: String,
        /// That of the model it was to be used with.
        expected: String,
    },
    /// A sound snapshot of a cache with other contents than this one would hold.
    #[error("snapshot of another cache: {what} {found} instead of {expected}")]
    OtherCache {
        /// What differs.
        what: String,
        /// That of the snapshot.
        found: String,
        /// That of the cache it was to be restored to.
        expected: String,
    },
    /// The operating system failed.
    #[error("cannot {operation} the snapshot: {source}")]
    Io {
        /// `"read"` or `"write"`.
        operation: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// Another of these, with the file it concerns.
    #[error("{}: {error}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: Box<SnapshotError>,
    },
}

impl SnapshotError {
    /// The error itself, without the name of the file.
    pub fn root(&self) -> &Self {
        match self {
            Self::InFile { error, .. } => error.root(),
            other => other,
        }
    }

    pub(super) fn read(source: io::Error) -> Self {
        Self::Io { operation: "read", source }
    }

    pub(super) fn write(source: io::Error) -> Self {
        Self::Io { operation: "write", source }
    }

    pub(super) fn invalid(reason: impl ToString) -> Self {
        Self::Invalid { reason: reason.to_string() }
    }
}
