//! Opening a device, or saying in one line what is missing.

use cubecl::Runtime;
use cubecl::cuda::{CudaDevice, CudaRuntime};
use cubecl::prelude::ComputeClient;
use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_uint};
use std::path::{Path, PathBuf};

/// Why a device cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// There is no driver.
    #[error("no NVIDIA driver: cannot load {library}; install the driver of the device")]
    NoDriver {
        /// The library that cannot be loaded.
        library: &'static str,
    },
    /// The driver refuses to start.
    #[error("the NVIDIA driver refuses: {function} returned {code}{}", hint(*code))]
    Driver {
        /// The function that failed.
        function: &'static str,
        /// Its result, of the enum `CUresult`.
        code: i32,
    },
    /// There is a driver, but no device of this index.
    #[error("no NVIDIA device {index}: the driver has {count}")]
    NoDevice {
        /// The index asked for.
        index: usize,
        /// How many devices there are.
        count: usize,
    },
    /// There is no compiler for kernels.
    #[error(
        "no NVRTC, which compiles the kernels: cannot load {library}; install the CUDA tool kit \
         (11.2 or later) and have the library's folder in LD_LIBRARY_PATH"
    )]
    NoCompiler {
        /// The library that cannot be loaded.
        library: &'static str,
    },
    /// There is no CUDA tool kit where CubeCL looks for headers.
    #[error(
        "no CUDA tool kit, whose headers the kernels include; install it and set CUDA_PATH to its \
         folder"
    )]
    NoToolkit,
    /// The tool kit's folder lacks a header.
    #[error(
        "{} is missing, which the kernels include; set CUDA_PATH to the folder of a complete CUDA \
         tool kit",
        header.display()
    )]
    NoHeader {
        /// The file.
        header: PathBuf,
    },
}

impl From<OpenError> for kivi_core::Error {
    fn from(error: OpenError) -> Self {
        Self::Device { backend: "cuda", operation: "opening the device", source: Box::new(error) }
    }
}

/// What the common results of the driver mean for a user.
fn hint(code: i32) -> &'static str {
    match code {
        // CUDA_ERROR_NO_DEVICE
        100 => " (no device; in a container, pass it through)",
        // CUDA_ERROR_SYSTEM_DRIVER_MISMATCH
        803 => " (the driver's library and kernel module have different versions; restart)",
        // CUDA_ERROR_UNKNOWN
        999 => " (unknown; often the kernel module is not loaded)",
        _ => "",
    }
}

/// The client of the device with this index.
///
/// Looks at driver, device, compiler and headers first: CubeCL panics if one of them is missing.
///
/// # Errors
///
/// The first thing that is missing, and what to install or change.
pub fn client(index: usize) -> Result<ComputeClient<CudaRuntime>, OpenError> {
    let count = devices()?.len();
    if index >= count {
        return Err(OpenError::NoDevice { index, count });
    }
    load(COMPILER).map_err(|library| OpenError::NoCompiler { library })?;
    headers(cubecl::cuda::install::cuda_path().as_deref())?;
    Ok(CudaRuntime::client(&CudaDevice::new(index)))
}

/// Names of the devices, in the order of their indices.
///
/// # Errors
///
/// [`OpenError::NoDriver`], [`OpenError::Driver`].
pub fn devices() -> Result<Vec<String>, OpenError> {
    let driver = load(DRIVER).map_err(|library| OpenError::NoDriver { library })?;
    Driver(&driver).names()
}

/// Names of libraries in the order in which they are tried; the first is the one to report.
const DRIVER: &[&str] =
    if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] };
/// Those that cudarc, on which CubeCL is built, tries, too.
const COMPILER: &[&str] = if cfg!(windows) {
    &["nvrtc64_120_0.dll", "nvrtc64_130_0.dll", "nvrtc64_112_0.dll"]
} else {
    &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so.11"]
};

/// The first library of `names` that can be loaded, or the first name.
fn load(names: &[&'static str]) -> Result<Library, &'static str> {
    // SAFETY: these are NVIDIA's libraries, whose initialisers have no requirements; cudarc loads
    // the same ones.
    let loaded = names.iter().find_map(|name| unsafe { Library::new(*name) }.ok());
    loaded.ok_or(names[0])
}

/// Headers that kernels include, in the folder of a tool kit. The third is what the second
/// includes and some packages lack.
const HEADERS: [&str; 3] = ["cuda_fp16.h", "mma.h", "crt/mma.h"];

fn headers(toolkit: Option<&Path>) -> Result<(), OpenError> {
    let include = toolkit.ok_or(OpenError::NoToolkit)?.join("include");
    let missing = HEADERS.iter().map(|name| include.join(name)).find(|header| !header.is_file());
    missing.map_or(Ok(()), |header| Err(OpenError::NoHeader { header }))
}

/// The driver's interface, as far as it is needed before CubeCL takes over.
struct Driver<'a>(&'a Library);

impl Driver<'_> {
    fn names(&self) -> Result<Vec<String>, OpenError> {
        type Init = unsafe extern "C" fn(c_uint) -> c_int;
        type Count = unsafe extern "C" fn(*mut c_int) -> c_int;
        type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;

        let init: Symbol<'_, Init> = self.function("cuInit")?;
        // SAFETY: the flags must be 0. The signature is that of `cuda.h`, as below.
        checked("cuInit", unsafe { init(0) })?;
        let get_count: Symbol<'_, Count> = self.function("cuDeviceGetCount")?;
        let mut count = 0;
        // SAFETY: `count` is written.
        checked("cuDeviceGetCount", unsafe { get_count(&raw mut count) })?;
        let get_name: Symbol<'_, Name> = self.function("cuDeviceGetName")?;
        let name = |device| {
            let mut name: [c_char; 128] = [0; 128];
            // SAFETY: at most 127 bytes and a NUL are written. A device's handle is its index
            // (`cuDeviceGet` returns it unchanged, and `CUdevice` is an int).
            let result = unsafe { get_name(name.as_mut_ptr(), 128, device) };
            checked("cuDeviceGetName", result)?;
            // SAFETY: the driver ended the name with a NUL within the array.
            Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
        };
        (0..count).map(name).collect()
    }

    /// A function of the driver; one that lacks it is no driver that can be used.
    fn function<T>(&self, name: &'static str) -> Result<Symbol<'_, T>, OpenError> {
        // SAFETY: the callers' types are those of `cuda.h`, unchanged since CUDA 2.
        unsafe { self.0.get(name) }.map_err(|_| OpenError::NoDriver { library: DRIVER[0] })
    }
}

fn checked(function: &'static str, code: c_int) -> Result<(), OpenError> {
    if code == 0 { Ok(()) } else { Err(OpenError::Driver { function, code }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_is_named() {
        let missing = load(&["libkivi-has-no-such-library.so", "nor-this.so"]).err();
        assert_eq!(missing, Some("libkivi-has-no-such-library.so"));
    }

    #[test]
    fn a_header_that_is_missing_is_named() {
        assert!(matches!(headers(None), Err(OpenError::NoToolkit)));
        let toolkit = tempfile::tempdir().unwrap();
        let include = toolkit.path().join("include");
        std::fs::create_dir_all(include.join("crt")).unwrap();
        for header in HEADERS {
            let error = headers(Some(toolkit.path())).unwrap_err();
            assert!(error.to_string().contains(header), "{error}");
            std::fs::write(include.join(header), "").unwrap();
        }
        assert!(headers(Some(toolkit.path())).is_ok());
    }

    /// Whatever this machine has: a device, or one line.
    #[test]
    fn opening_gives_a_device_or_one_line() {
        for index in [0, 1000] {
            if let Err(error) = client(index) {
                let message = error.to_string();
                assert!(!message.is_empty() && !message.contains('\n'), "{message}");
                println!("{message}");
                let core = kivi_core::Error::from(error).to_string();
                assert!(core.starts_with("opening the device failed on cuda: "), "{core}");
            }
        }
    }

    #[test]
    fn results_of_the_driver() {
        assert!(checked("cuInit", 0).is_ok());
        let message = checked("cuInit", 100).unwrap_err().to_string();
        assert!(message.contains("cuInit returned 100 (no device"), "{message}");
    }
}
