//! The cache kernels on NVIDIA devices.
//!
//! Building needs no CUDA. Running needs the driver and, because kernels are compiled when they are
//! first launched, NVRTC and the headers of the CUDA tool kit; [`client`] finds out what is missing
//! before CubeCL would panic over it.

mod open;

#[cfg(feature = "offline")]
pub mod offline;

pub use open::{OpenError, client, devices};
