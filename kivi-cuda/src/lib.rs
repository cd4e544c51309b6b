//! The cache kernels on NVIDIA devices.
