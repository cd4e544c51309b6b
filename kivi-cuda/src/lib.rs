//! The cache kernels on NVIDIA devices.

#[cfg(feature = "offline")]
pub mod offline;
