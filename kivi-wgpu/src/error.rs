//! What may be missing when a device is opened.

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No driver, or none that finds a device.
    #[error(
        "no Vulkan, Metal or DirectX 12 device found; install the driver of the GPU, or Mesa's \
         software driver (Debian: mesa-vulkan-drivers)"
    )]
    NoDevice,
    /// A device with a number there is none of.
    #[error("no device {wanted}; there are {found} (numbered from 0)")]
    NoSuchDevice {
        /// The number that was asked for.
        wanted: usize,
        /// How many there are.
        found: usize,
    },
    /// The driver refused the device.
    #[error("the driver refuses {device}: {source}")]
    Refused {
        /// Name of the device.
        device: String,
        /// The driver's own error.
        source: wgpu::RequestDeviceError,
    },
    /// The device does not run a kernel.
    #[error(transparent)]
    Device(#[from] kivi_core::Error),
}
