//! Kernels that only NVIDIA devices can run, on the emulator, against attention in f64.
//!
//! `cargo xtask codegen` runs these with the tools it installs; without `KIVI_CUDA_TOOLS` each
//! prints a line and passes.

mod emulated {
    pub(crate) mod cache;
    mod parity;
    mod splits;
}
