//! The cache operations as CubeCL kernels, written once and generic over the runtime.

pub mod kernels;
