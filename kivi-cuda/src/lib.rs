//! The cache kernels on NVIDIA devices.
//!
//! Building needs no CUDA. Running needs the driver and, because kernels are compiled when they are
//! first launched, NVRTC and the headers of the CUDA tool kit; [`open()`] finds out what is missing before
//! CubeCL would panic over it.
//!
//! ```no_run
//! use kivi_core::CacheBackend;
//! let backend = kivi_cuda::open(&kivi_cuda::CudaOptions::default())?;
//! println!("{}", backend.capabilities().device);
//! # Ok::<(), kivi_core::Error>(())
//! ```

mod open;

#[cfg(feature = "offline")]
pub mod offline;

pub use kivi_kernels::GpuOptions;
pub use open::{OpenError, client, devices};

use cubecl::cuda::CudaRuntime;
use kivi_kernels::Gpu;

/// Name of this backend on the command line.
pub const NAME: &str = "cuda";

/// The cache operations on an NVIDIA device.
pub type Cuda = Gpu<CudaRuntime>;

/// Which device is opened, and how it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct CudaOptions {
    /// Number of the device, as the driver counts them.
    pub device: usize,
    /// How kernels use the device.
    pub gpu: GpuOptions,
}

/// Opens a device.
///
/// # Errors
/// [`kivi_core::Error::Device`] that says in one line what is missing ([`OpenError`]), or that the device
/// does not run the first, small kernel.
pub fn open(options: &CudaOptions) -> kivi_core::Result<Cuda> {
    let client = client(options.device)?;
    let mut names = devices()?;
    let name = match options.device < names.len() {
        true => names.swap_remove(options.device),
        false => format!("device {}", options.device),
    };
    Gpu::new(NAME, name, client, options.gpu)
}
