//! The error type of this crate.

/// What can go wrong in an engine.
///
/// *Invalid* variants mean that no engine could do what was asked; the others that this one cannot,
/// or not now. Messages are one line and lower-case.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option of the builder that is not allowed, or contradicts another one.
    #[error("invalid {name}: {value} ({allowed})")]
    InvalidOption {
        /// The option.
        name: &'static str,
        /// What was given.
        value: String,
        /// What would have been accepted.
        allowed: String,
    },
    /// A request that cannot be answered by any engine.
    #[error("invalid request: {reason}")]
    InvalidRequest {
        /// Why, with the numbers.
        reason: String,
    },
    /// A request whose cache would not fit the pool even alone.
    #[error(
        "{tokens} tokens need up to {needed} bytes of cache, more than the {budget} of the whole pool"
    )]
    TooLarge {
        /// Prompt and answer.
        tokens: usize,
        /// Bytes they may need.
        needed: usize,
        /// The engine's `kv_memory`.
        budget: usize,
    },
    /// As many requests wait as may.
    #[error("{waiting} requests are waiting already")]
    QueueFull {
        /// How many.
        waiting: usize,
    },
    /// The engine was shut down before the request was answered.
    #[error("the engine has stopped")]
    Stopped,
    /// The model or the device failed.
    #[error(transparent)]
    Model(#[from] kivi_models::Error),
}

impl From<kivi_core::Error> for Error {
    fn from(error: kivi_core::Error) -> Self {
        Self::Model(error.into())
    }
}

impl Error {
    pub(crate) fn option(name: &'static str, value: impl ToString, allowed: &str) -> Self {
        Self::InvalidOption { name, value: value.to_string(), allowed: allowed.into() }
    }

    pub(crate) fn request(reason: impl Into<String>) -> Self {
        Self::InvalidRequest { reason: reason.into() }
    }
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
