//! The cache kernels on every device that wgpu reaches.
