//! The cache kernels of [`kivi_kernels`] on every device that wgpu reaches: Vulkan, Metal, DirectX 12,
//! and Mesa's software driver where there is no GPU.
//!
//! With the feature `vulkan` kernels reach a Vulkan device as SPIR-V, otherwise, and everywhere else,
//! as WGSL (with `metal`, on Metal as MSL). Opening needs a driver; building needs nothing.
//!
//! ```no_run
//! use kivi_core::CacheBackend;
//! let backend = kivi_wgpu::open(&kivi_wgpu::WgpuOptions::default())?;
//! println!("{}", backend.capabilities().device);
//! # Ok::<(), kivi_wgpu::OpenError>(())
//! ```

mod adapter;
mod error;

pub use adapter::{AdapterInfo, adapters};
pub use error::OpenError;
pub use kivi_kernels::GpuOptions;

use cubecl::{
    Runtime,
    wgpu::{RuntimeOptions, WgpuRuntime, WgpuSetup, init_device},
};
use kivi_kernels::Gpu;

/// Name of this backend on the command line.
pub const NAME: &str = "wgpu";

/// The cache operations on a device of wgpu.
pub type Wgpu = Gpu<WgpuRuntime>;

/// Which device is opened, and how it is used.
#[derive(Clone, Copy, Debug, Default)]
pub struct WgpuOptions {
    /// Number of the device in [`adapters`]; the first one that is not software, if not given, and
    /// the software driver if there is no other.
    pub adapter: Option<usize>,
    /// WGSL even where SPIR-V is possible.
    pub wgsl: bool,
    /// How kernels use the device.
    pub gpu: GpuOptions,
}

/// Opens a device.
///
/// # Errors
/// [`OpenError`] when there is no driver, no such device, or the device does not work.
pub fn open(options: &WgpuOptions) -> Result<Wgpu, OpenError> {
    let (instance, adapter, number) = adapter::choose(options.adapter)?;
    let info = adapter.get_info();
    let spirv = cfg!(feature = "vulkan") && info.backend == wgpu::Backend::Vulkan && !options.wgsl;
    let client = if spirv {
        // CubeCL asks the driver for more than wgpu knows of.
        WgpuRuntime::client(&adapter::device(&info, number))
    } else {
        let (device, queue) = adapter::request(&adapter)?;
        // The compiler follows this backend; any other than Vulkan and Metal means WGSL.
        let backend = match info.backend {
            wgpu::Backend::Vulkan => wgpu::Backend::BrowserWebGpu,
            other => other,
        };
        let setup = WgpuSetup { instance, adapter, device, queue, backend };
        WgpuRuntime::client(&init_device(setup, RuntimeOptions::default()))
    };
    let shader = if spirv { "SPIR-V" } else { adapter::shader(info.backend) };
    let description = format!("{} ({}, {shader})", info.name, info.backend);
    let software = options.gpu.software || info.device_type == wgpu::DeviceType::Cpu;
    let gpu = GpuOptions { software, ..options.gpu };
    Ok(Gpu::new(NAME, description, client, gpu)?)
}
