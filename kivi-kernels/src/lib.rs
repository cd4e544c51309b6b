//! The cache operations as CubeCL kernels, written once and generic over the runtime.

mod cache;
mod canonical;
mod error;
mod gpu;
pub mod kernels;
mod launch;
mod memory;
pub mod order;
mod routine;
mod shape;
mod step;

pub use cache::GpuCache;
pub use error::DeviceError;
pub use gpu::{Gpu, GpuMatrix, GpuOptions};
pub use kernels::attend::{AttendConfig, Unpack};
pub use routine::{Limits, Problem, Routine};
pub use shape::{Shape, Store};
