#![doc = include_str!("../../README.md")]

#[cfg(feature = "cpu")]
pub use kivi_cpu as cpu;
#[cfg(feature = "cpu-ref")]
pub use kivi_cpu_ref as cpu_ref;
#[cfg(feature = "cuda")]
pub use kivi_cuda as cuda;
#[cfg(feature = "engine")]
pub use kivi_engine as engine;
#[cfg(feature = "models")]
pub use kivi_models as models;
#[cfg(feature = "wgpu")]
pub use kivi_wgpu as wgpu;

pub use kivi_core::*;
