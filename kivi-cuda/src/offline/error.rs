use std::path::PathBuf;

/// Why a kernel could not be compiled, assembled or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CodegenError {
    /// A tool is not in the folder; `cargo xtask codegen` installs them.
    #[error("{} is missing", .0.display())]
    Missing(PathBuf),
    /// A library or one of its functions cannot be loaded.
    #[error("cannot load {}: {source}", file.display())]
    Load {
        /// The library.
        file: PathBuf,
        /// The loader's message.
        source: libloading::Error,
    },
    /// A text passed to NVRTC holds a NUL byte.
    #[error("the source holds a NUL byte")]
    NulByte,
    /// NVRTC refused a call.
    #[error("{function} returned {result}")]
    Nvrtc {
        /// The function.
        function: &'static str,
        /// Its result, of the enum `nvrtcResult`.
        result: i32,
    },
    /// NVRTC found errors in the source.
    #[error("NVRTC: {log}")]
    Compile {
        /// What it printed.
        log: String,
    },
    /// A program failed.
    #[error("{tool}: {text}")]
    Tool {
        /// Its file.
        tool: String,
        /// What it printed.
        text: String,
    },
    /// A tool's output is not as expected.
    #[error("cannot read the output of a tool: {what}")]
    Unreadable {
        /// Which, and what is missing.
        what: String,
    },
    /// CubeCL refused a kernel.
    #[error("{problem}: CubeCL: {message}")]
    Kernel {
        /// The problem that launched it.
        problem: String,
        /// The compiler's message.
        message: String,
    },
    /// A problem launched other kernels or has other loops than it says.
    #[error("{problem}: expected {expected}, found {found}")]
    Unexpected {
        /// The problem.
        problem: String,
        /// What it says.
        expected: String,
        /// What there is.
        found: String,
    },
    /// The emulator met something that it does not know or that is wrong in the kernel.
    #[error("emulator: {what}")]
    Emulation {
        /// What it met.
        what: String,
    },
    /// A file cannot be read, written or started.
    #[error(transparent)]
    Io(#[from] std::io::Error),
}
