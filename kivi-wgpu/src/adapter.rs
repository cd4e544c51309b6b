//! Finding a device.

use crate::OpenError;
use cubecl::{future::block_on, wgpu::WgpuDevice};
use wgpu::{Adapter, Backend, Backends, DeviceType, Features, Instance};

/// A device that can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterInfo {
    /// Its name.
    pub name: String,
    /// The interface it is reached through: `vulkan`, `metal`, `dx12`.
    pub interface: String,
    /// Whether it is the processor, in software.
    pub software: bool,
}

/// All devices, in the order of their numbers.
pub fn adapters() -> Vec<AdapterInfo> {
    let infos = all(&instance()).into_iter().map(|adapter| adapter.get_info());
    let info = |info: wgpu::AdapterInfo| AdapterInfo {
        interface: info.backend.to_string(),
        software: info.device_type == DeviceType::Cpu,
        name: info.name,
    };
    infos.map(info).collect()
}

fn instance() -> Instance {
    let descriptor = wgpu::InstanceDescriptor {
        backends: Backends::PRIMARY,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    };
    Instance::new(descriptor)
}

fn all(instance: &Instance) -> Vec<Adapter> {
    block_on(instance.enumerate_adapters(Backends::PRIMARY))
}

/// The device with a number, or the best one, and its number among those of its own kind.
pub(crate) fn choose(wanted: Option<usize>) -> Result<(Instance, Adapter, usize), OpenError> {
    let instance = instance();
    let mut adapters = all(&instance);
    let kinds: Vec<DeviceType> =
        adapters.iter().map(|adapter| adapter.get_info().device_type).collect();
    let best = kinds.iter().position(|&kind| kind != DeviceType::Cpu).unwrap_or(0);
    let found = adapters.len();
    let index = match wanted {
        _ if found == 0 => return Err(OpenError::NoDevice),
        Some(wanted) if wanted >= found => return Err(OpenError::NoSuchDevice { wanted, found }),
        Some(wanted) => wanted,
        None => best,
    };
    let number = kinds[..index].iter().filter(|&&kind| kind == kinds[index]).count();
    Ok((instance, adapters.swap_remove(index), number))
}

/// The device as CubeCL names it.
pub(crate) fn device(info: &wgpu::AdapterInfo, number: usize) -> WgpuDevice {
    match info.device_type {
        DeviceType::DiscreteGpu => WgpuDevice::DiscreteGpu(number),
        DeviceType::IntegratedGpu => WgpuDevice::IntegratedGpu(number),
        DeviceType::VirtualGpu => WgpuDevice::VirtualGpu(number),
        DeviceType::Cpu => WgpuDevice::Cpu,
        DeviceType::Other => WgpuDevice::DefaultDevice,
    }
}

/// Opens a device with everything it offers.
pub(crate) fn request(adapter: &Adapter) -> Result<(wgpu::Device, wgpu::Queue), OpenError> {
    let features = adapter.features();
    let descriptor = wgpu::DeviceDescriptor {
        // Those that are still experiments are not used.
        required_features: features
            .difference(Features::MAPPABLE_PRIMARY_BUFFERS)
            .difference(Features::all_experimental_mask()),
        required_limits: adapter.limits(),
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..wgpu::DeviceDescriptor::default()
    };
    block_on(adapter.request_device(&descriptor))
        .map_err(|source| OpenError::Refused { device: adapter.get_info().name, source })
}

/// The language kernels are compiled to.
pub(crate) fn shader(backend: Backend) -> &'static str {
    if cfg!(feature = "metal") && backend == Backend::Metal { "MSL" } else { "WGSL" }
}
