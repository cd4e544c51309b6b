//! What the kernels become on NVIDIA devices, without one.
//!
//! [`record`] drives real launch code on a runtime that keeps the CUDA C++ CubeCL generates;
//! [`Toolchain`] compiles that with NVIDIA's tools; [`inspect`] counts the instructions that a
//! cache element costs; [`Report`] says what follows on devices whose figures are published.
//! `cargo xtask codegen` puts these together over [`problems`]. A client of [`emulated`] also runs
//! what was compiled, on an emulator, so that tests see the results of matrix units and shuffles.

mod devices;
mod emulator;
mod error;
mod machine_code;
mod nvrtc;
mod problems;
mod recorder;
mod report;
mod shared;
mod toolchain;

pub use devices::{Architecture, DEVICES, Device, Limits};
pub use error::CodegenError;
pub use machine_code::{CodeLoop, MachineCode, Masks, inspect};
pub use problems::{Launch, Problem, problems};
pub use recorder::{Recorded, Recorder, RecorderDevice, RecorderServer, emulated, record};
pub use report::{Kernel, Loop, Report};
pub use toolchain::{Assembled, Toolchain};
