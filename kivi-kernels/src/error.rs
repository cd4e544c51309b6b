//! What a device may fail at.

/// The source of a [`kivi_core::Error::Device`] of a GPU backend.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The cache would outgrow what the device, or the option for it, allows.
    #[error(
        "out of device memory: {needed} bytes needed for one layer, at most {limit} allowed; \
         use a smaller pool or fewer bits"
    )]
    OutOfMemory {
        /// Bytes of one layer.
        needed: usize,
        /// Bytes one layer may have.
        limit: usize,
    },
    /// A kernel did not compile, or could not be launched.
    #[error("kernel {kernel} failed: {reason}")]
    Kernel {
        /// Name of the kernel.
        kernel: &'static str,
        /// What the device says, on one line.
        reason: String,
    },
    /// Everything else, a lost device among it.
    #[error("{0}")]
    Failed(String),
}

/// What a device says, on one line.
pub(crate) fn one_line(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    // Behind the word comes CubeCL's own call stack.
    lines.take_while(|line| !line.starts_with("Backtrace")).collect::<Vec<_>>().join("; ")
}
