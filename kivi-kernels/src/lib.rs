//! The cache operations as CubeCL kernels, written once and generic over the runtime.
//!
//! [`Gpu`] implements [`CacheBackend`](kivi_core::CacheBackend) on a client of any runtime; `kivi-wgpu`
//! and `kivi-cuda` open one. It consists of
//!
//! - [`Shape`]: where everything of a layer lies in its array of words, and [`order`]: how codes lie in
//!   words;
//! - the memory of a pool, [`GpuCache`]: places on the host, words on the device;
//! - the choice of a kernel for a [`Problem`] on a device with certain [`Limits`];
//! - [`kernels`], the device code.
//!
//! What a kernel writes is defined by `kivi-cpu-ref`: codes, scales and zeros bit for bit, floats within
//! a tolerance. Sums are in f32; [`Routine::Plane`] adds chains of 8 products in f16 first.
//!
//! CubeCL is known to this crate, and to those that open devices, alone.

mod cache;
mod canonical;
mod error;
mod gpu;
pub mod kernels;
mod launch;
mod memory;
pub mod order;
mod place;
mod routine;
mod shape;
mod step;

pub use cache::GpuCache;
pub use error::DeviceError;
pub use gpu::{Gpu, GpuMatrix, GpuOptions};
pub use kernels::attend::{AttendConfig, Unpack};
pub use routine::{Limits, Problem, Routine};
pub use shape::{Shape, Store};
