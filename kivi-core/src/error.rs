//! The one error type of the core and of every backend.

/// What can go wrong in the core or in a backend.
///
/// *Invalid* variants mean the caller asked for something that no device could do; the others mean
/// that this device, or this pool, cannot do it now. Messages are one line, lower-case, and hold the
/// numbers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A configuration value that is not allowed; the message says what is.
    #[error("invalid {name}: {value} ({allowed})")]
    InvalidConfig {
        /// The option as the command line spells it, without dashes.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A tensor, buffer or packed array whose shape does not fit the operation.
    #[error("{operation}: {what} has {found} elements, expected {expected}")]
    InvalidShape {
        /// The operation that was asked for.
        operation: &'static str,
        /// Which argument.
        what: &'static str,
        /// Its length.
        found: usize,
        /// The length the operation needs.
        expected: usize,
    },
    /// A request that contradicts the state of the cache.
    #[error("{operation}: {reason}")]
    InvalidRequest {
        /// The operation that was asked for.
        operation: &'static str,
        /// Why it cannot be done, with the numbers.
        reason: String,
    },
    /// Weight bytes that do not describe a tensor of their format.
    #[error("invalid {format} weight of shape {shape:?}: {reason}")]
    InvalidWeight {
        /// Name of the format.
        format: &'static str,
        /// `[rows, columns]`.
        shape: [usize; 2],
        /// What is wrong.
        reason: String,
    },
    /// The pool has no page or sequence slot left; nothing was changed.
    #[error("cache pool exhausted: {needed} {what} needed, {free} of {total} free")]
    PoolExhausted {
        /// `"pages"` or `"sequence slots"`.
        what: &'static str,
        /// How many the request needs.
        needed: usize,
        /// How many are free.
        free: usize,
        /// How many there are.
        total: usize,
    },
    /// A valid request that this backend does not implement.
    #[error("backend {backend} does not support {what}")]
    Unsupported {
        /// Name of the backend.
        backend: &'static str,
        /// What was asked for.
        what: String,
    },
    /// The device failed while it ran an operation.
    #[error("{operation} failed on {backend}: {source}")]
    Device {
        /// Name of the backend.
        backend: &'static str,
        /// The operation that failed.
        operation: &'static str,
        /// The device's own error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A snapshot that cannot be written, read or restored.
    #[error(transparent)]
    Snapshot(#[from] crate::SnapshotError),
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An [`Error::InvalidRequest`].
    pub fn request(operation: &'static str, reason: impl Into<String>) -> Self {
        Self::InvalidRequest { operation, reason: reason.into() }
    }

    /// An [`Error::InvalidConfig`].
    pub fn config(name: &'static str, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self::InvalidConfig { name, value: value.to_string(), allowed: allowed.into() }
    }
}

/// Checks that an argument has the length an operation needs.
///
/// # Errors
/// [`Error::InvalidShape`] when `found != expected`.
pub fn expect_len(
    operation: &'static str,
    what: &'static str,
    found: usize,
    expected: usize,
) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        Err(Error::InvalidShape { operation, what, found, expected })
    }
}
