//! A CubeCL runtime that compiles every launched kernel to CUDA C++ and keeps the source; on
//! request it also runs it, on an emulator.
//!
//! Memory is the host's. Kernels are compiled by the compiler of
//! `cubecl-cuda` under the properties that crate announces for a real device of the same compute
//! capability, so that host code which asks for features takes the same branches.

use super::emulator::{self, Grid, HostStorage};
use super::shared::settle;
use super::{Architecture, CodegenError, Toolchain};
use cubecl::bytes::Bytes;
use cubecl::cuda::{CudaCompiler, CudaRuntime};
use cubecl::device::{Device, DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl::features::{AtomicUsage, Plane, TypeUsage};
use cubecl::future::DynFut;
use cubecl::ir::{
    DeviceProperties, ElemType, FloatKind, HardwareProperties, MemoryDeviceProperties, StorageType,
    TargetProperties, Type, VectorSize,
};
use cubecl::prelude::*;
use cubecl::profile::{ProfileDuration, TimingMethod};
use cubecl::server::{
    Binding, ComputeServer, CopyDescriptor, ExecutionMode, IoError, KernelArguments, ProfileError,
    ProfilingToken, ServerCommunication, ServerError, ServerUtilities,
};
use cubecl::stream_id::StreamId;
use cubecl::zspace::{Shape, Strides};
use cubecl::{CubeTask, MemoryConfiguration, MemoryUsage};
use cubecl_cpp::DialectWmmaCompiler;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    CompilationOptions, CppSupportedFeatures, register_mma_features, register_scaled_mma_features,
    register_wmma_features,
};
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::kernel::KernelMetadata;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{
    ManagedMemoryHandle, MemoryAllocationMode, MemoryManagement, MemoryManagementOptions,
};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource, StorageHandle};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// One launched kernel.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The name of the Rust function; all compile-time variants share it.
    pub entry: String,
    /// CUDA C++; shared arrays lie in the order of the code, where CubeCL's own places are random.
    pub source: String,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: usize,
    /// Threads per block, along each axis.
    pub block: [u32; 3],
}

impl Recorded {
    /// Threads per block.
    pub fn threads(&self) -> u32 {
        self.block.iter().product()
    }
}

/// Launches in order: kernels, or why one could not be compiled to CUDA C++.
type Log = Arc<Mutex<Vec<Result<Recorded, String>>>>;

/// Runs `launch` on a recorder for `architecture`; returns the kernels it launched.
///
/// # Errors
///
/// What `launch` returns, or CubeCL's compiler for the first kernel it refuses.
pub fn record(
    architecture: Architecture,
    launch: impl FnOnce(&ComputeClient<Recorder>) -> Result<(), String>,
) -> Result<Vec<Recorded>, String> {
    let client = Recorder::client(&RecorderDevice(architecture.version()));
    launch(&client)?;
    // Launches are queued to the device's own thread; this waits for them.
    cubecl::future::block_on(client.sync()).map_err(|error| error.to_string())?;
    let mut log = client.info().lock().unwrap_or_else(PoisonError::into_inner);
    log.drain(..).collect()
}

/// A client whose kernels are compiled with the tools in `tools` and run by an emulator.
///
/// What a kernel does wrong, and what the emulator does not know, is the error of the next
/// `sync()` or read. The first call decides on the tools of the process.
pub fn emulated(architecture: Architecture, tools: &Path) -> ComputeClient<Recorder> {
    TOOLS.get_or_init(|| tools.to_owned());
    Recorder::client(&RecorderDevice(architecture.version() + EMULATED))
}

/// Added to the index of a device whose kernels run.
const EMULATED: u16 = 1000;

/// Where the tools of emulated devices are.
static TOOLS: OnceLock<PathBuf> = OnceLock::new();

/// The recording runtime.
#[derive(Clone, Debug)]
pub struct Recorder;

/// A device that does not exist: its index is its compute capability, 90 for `sm_90`; 1000 more if
/// its kernels run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecorderDevice(u16);

impl Device for RecorderDevice {
    fn from_id(id: DeviceId) -> Self {
        Self(id.index_id)
    }

    fn to_id(&self) -> DeviceId {
        DeviceId { type_id: 0, index_id: self.0 }
    }
}

/// The server behind [`Recorder`].
pub struct RecorderServer {
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
    memory: MemoryManagement<HostStorage>,
    /// What kernels run with, unless they are only recorded.
    emulator: Option<Emulator>,
    /// The first thing that went wrong since the last `sync()`.
    failure: Option<String>,
}

/// The compiler, and what it made of sources.
struct Emulator {
    tools: Result<Toolchain, CodegenError>,
    architecture: Architecture,
    compiled: HashMap<String, String>,
    /// CubeCL's sources differ from one time to the next in the names of variables.
    known: HashMap<KernelId, Recorded>,
}

impl std::fmt::Debug for RecorderServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RecorderServer").finish_non_exhaustive()
    }
}

impl DeviceService for RecorderServer {
    fn init(id: DeviceId) -> Self {
        let version = u32::from(id.index_id % EMULATED);
        let logger = Arc::new(ServerLogger::default());
        let layout = PitchedMemoryLayoutPolicy::new(ALIGNMENT);
        let properties = properties(version);
        // One allocation each, so that the emulator sees every access outside of one.
        let memory = MemoryManagement::from_configuration(
            HostStorage::default(),
            &properties.memory,
            MemoryConfiguration::ExclusivePages,
            logger.clone(),
            MemoryManagementOptions::new("host"),
        );
        let architecture = Architecture::ALL
            .into_iter()
            .find(|architecture| u32::from(architecture.version()) == version)
            .unwrap_or(Architecture::Sm90);
        let emulator = (id.index_id >= EMULATED).then(|| Emulator {
            tools: Toolchain::open(TOOLS.get().map_or(Path::new(""), PathBuf::as_path)),
            architecture,
            compiled: HashMap::new(),
            known: HashMap::new(),
        });
        let utilities = ServerUtilities::new(properties, logger, Log::default(), layout);
        let supports_features = CppSupportedFeatures {
            fast_math: true,
            fast_tanh: version >= 75,
            grid_constants: version >= 70,
            clusters: version >= 90,
            elect_sync: version >= 90,
        };
        let options = CompilationOptions { warp_size: 32, supports_features };
        Self { options, utilities: Arc::new(utilities), memory, emulator, failure: None }
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        self.utilities.clone()
    }
}

/// What `cuMallocPitch` aligns rows to.
const ALIGNMENT: usize = 512;

/// The properties that `cubecl-cuda` (0.10, `runtime.rs`) finds or sets on a real device, as far
/// as host code of kernels can ask for them.
fn properties(version: u32) -> DeviceProperties {
    let hardware = HardwareProperties {
        load_width: 128,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        // "Maximum amount of shared memory per thread block" of the CUDA programming guide.
        max_shared_memory_size: match version {
            80 => 163,
            90 | 100 => 227,
            _ => 99,
        } * 1024,
        max_cube_count: CudaRuntime::max_cube_count(),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(match version {
            80 => 108,
            90 => 132,
            120 => 170,
            _ => 128,
        }),
        num_tensor_cores: (version <= 100).then_some(4),
        min_tensor_cores_dim: Some(8),
        num_cpu_cores: None,
        max_vector_size: VectorSize::MAX,
    };
    let memory = MemoryDeviceProperties { max_page_size: 4 << 30, alignment: ALIGNMENT as u64 };
    let mut properties =
        DeviceProperties::new(Default::default(), memory, hardware, TimingMethod::System);

    register_supported_types(&mut properties);
    properties.register_type_usage(ElemType::Float(FloatKind::TF32), TypeUsage::Conversion);
    for (kind, vector) in [(FloatKind::F64, 1), (FloatKind::F16, 1), (FloatKind::F16, 2)] {
        let atomic = Type::new(StorageType::Atomic(ElemType::Float(kind)));
        let atomic = if vector == 1 { atomic } else { atomic.with_vector_size(vector) };
        properties.register_atomic_type_usage(atomic, AtomicUsage::Add | AtomicUsage::LoadStore);
    }

    let features = &mut properties.features;
    for plane in [Plane::Ops, Plane::Sync, Plane::NonUniformControlFlow] {
        features.plane.insert(plane);
    }
    features.copy_async = true;
    features.memory_reinterpret = true;
    features.alignment = true;
    features.cube_cluster = version >= 90;
    for kind in [FloatKind::F16, FloatKind::BF16] {
        features.matmul.ldmatrix.insert(ElemType::Float(kind).into());
        if version >= 90 {
            features.matmul.stmatrix.insert(ElemType::Float(kind).into());
        }
    }

    type Wmma = CudaWmmaCompiler;
    let architecture = CudaArchitecture { version };
    register_wmma_features(Wmma::supported_wmma_combinations(&architecture), &mut properties);
    register_mma_features(Wmma::supported_mma_combinations(&architecture), &mut properties);
    let scaled = Wmma::supported_scaled_mma_combinations(&architecture);
    register_scaled_mma_features(scaled, &mut properties);
    properties
}

/// The contiguous rows of a copy: first byte and length.
fn rows(copy: &CopyDescriptor) -> Vec<(usize, usize)> {
    let size = copy.elem_size;
    let (Some((&columns, outer)), Some(strides)) = (copy.shape.split_last(), copy.strides.get(..))
    else {
        return vec![(0, size)];
    };
    let count: usize = outer.iter().product();
    let first = |mut index: usize| {
        let mut from = 0;
        for (axis, &length) in outer.iter().enumerate().rev() {
            from += index % length * strides[axis];
            index /= length;
        }
        from
    };
    (0..count).map(|index| (first(index) * size, columns * size)).collect()
}

/// What cannot be answered without a device.
fn unsupported() -> ServerError {
    IoError::UnsupportedIoOperation { backtrace: Default::default() }.into()
}

impl RecorderServer {
    /// Keeps the first of what goes wrong.
    fn note(&mut self, result: Result<(), String>) {
        if let Err(message) = result {
            self.failure.get_or_insert(message);
        }
    }

    /// The bytes of a buffer.
    fn bytes(&mut self, binding: &Binding) -> Result<&mut [u8], String> {
        let handle = self.place(binding)?;
        let bytes = self.memory.storage().bytes_mut(&handle);
        bytes.ok_or_else(|| "a buffer outside its allocation".to_owned())
    }

    fn place(&mut self, binding: &Binding) -> Result<StorageHandle, String> {
        let handle = self.memory.get_storage(binding.memory.clone());
        let handle = handle.map_err(|error| error.to_string())?;
        let handle = handle.offset_start(binding.offset_start.unwrap_or(0));
        // Allocations are rounded up; the buffer is what was asked for.
        Ok(handle.offset_end(handle.size().saturating_sub(binding.size_in_used())))
    }

    /// Compiles a kernel to CUDA C++.
    fn compile(
        &self,
        kernel: &dyn CubeTask<CudaCompiler>,
        mode: ExecutionMode,
    ) -> Result<Recorded, String> {
        let compiled =
            kernel.compile(&mut Default::default(), &self.options, mode, kernel.address_type());
        let kernel = compiled.map_err(|error| error.to_string())?;
        let bytes = kernel.repr.map_or(0, |repr| repr.shared_memory_size());
        let (source, shared_bytes) = settle(kernel.source, bytes);
        let block = [kernel.cube_dim.x, kernel.cube_dim.y, kernel.cube_dim.z];
        Ok(Recorded { entry: kernel.entrypoint_name, source, shared_bytes, block })
    }

    /// Compiles and runs a recorded kernel.
    fn emulate(
        &mut self,
        kernel: &Recorded,
        count: &CubeCount,
        arguments: &KernelArguments,
    ) -> Result<(), String> {
        let handles: Result<Vec<_>, _> =
            arguments.buffers.iter().map(|binding| self.place(binding)).collect();
        let storage = self.memory.storage();
        let pointers: Vec<_> = handles?.iter().map(|handle| storage.get(handle)).collect();
        let CubeCount::Static(x, y, z) = *count else {
            return Err("only launches of a size that the host knows are emulated".to_owned());
        };
        let info = &arguments.info;
        if !arguments.tensor_maps.is_empty() || info.dynamic_metadata_offset < info.data.len() {
            return Err("tensor maps and tensors are not emulated".to_owned());
        }
        let Some(Emulator { tools, architecture, compiled, .. }) = &mut self.emulator else {
            return Ok(());
        };
        if !compiled.contains_key(&kernel.source) {
            let tools = tools.as_ref().map_err(|error| error.to_string())?;
            let ptx = tools.ptx(&kernel.source, *architecture).map_err(|e| e.to_string())?;
            compiled.insert(kernel.source.clone(), ptx);
        }
        let grid =
            Grid { blocks: [x, y, z], threads: kernel.block, shared_bytes: kernel.shared_bytes };
        let ptx = &compiled[&kernel.source];
        emulator::run(ptx, grid, &pointers, &info.data, &mut storage.memory)
            .map_err(|error| format!("{}: {error}", kernel.entry))
    }
}

/// An error of a kernel, as CubeCL reports those of a device.
fn failed(message: String) -> ServerError {
    ServerError::Generic { reason: message, backtrace: Default::default() }
}

impl ServerCommunication for RecorderServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for RecorderServer {
    type Kernel = Box<dyn CubeTask<CudaCompiler>>;
    type Info = Log;
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    type Storage = HostStorage;

    fn initialize_memory(&mut self, memory: ManagedMemoryHandle, size: u64, _: StreamId) {
        let bound = self
            .memory
            .reserve(size)
            .and_then(|reserved| self.memory.bind(reserved, memory, 0))
            .map_err(|error| error.to_string());
        self.note(bound);
    }

    fn logger(&self) -> Arc<ServerLogger> {
        self.utilities.logger.clone()
    }

    fn utilities(&self) -> Arc<ServerUtilities<Self>> {
        self.utilities.clone()
    }

    fn read(
        &mut self,
        descriptors: Vec<CopyDescriptor>,
        _: StreamId,
    ) -> DynFut<Result<Vec<Bytes>, ServerError>> {
        let failure = self.failure.take();
        let read = |copy: CopyDescriptor| {
            let bytes = self.bytes(&copy.handle)?;
            let mut data = Vec::new();
            for (from, length) in rows(&copy) {
                let row = bytes.get(from..from + length);
                data.extend_from_slice(row.ok_or("a read outside the buffer")?);
            }
            Ok(Bytes::from_bytes_vec(data))
        };
        let data: Result<Vec<_>, String> = descriptors.into_iter().map(read).collect();
        let data = match failure {
            Some(message) => Err(message),
            None => data,
        };
        Box::pin(async move { data.map_err(failed) })
    }

    fn write(&mut self, descriptors: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {
        for (copy, data) in descriptors {
            let written = self.bytes(&copy.handle).and_then(|bytes| {
                let mut data = &data[..];
                for (from, length) in rows(&copy) {
                    let (row, rest) = data.split_at_checked(length).ok_or("too little data")?;
                    let target = bytes.get_mut(from..from + length);
                    target.ok_or("a write outside the buffer")?.copy_from_slice(row);
                    data = rest;
                }
                Ok(())
            });
            self.note(written);
        }
    }

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        let failure = self.failure.take();
        Box::pin(async move { failure.map_or(Ok(()), |message| Err(failed(message))) })
    }

    fn get_resource(
        &mut self,
        _: Binding,
        _: StreamId,
    ) -> Result<ManagedResource<<Self::Storage as ComputeStorage>::Resource>, ServerError> {
        Err(unsupported())
    }

    unsafe fn launch(
        &mut self,
        kernel: Self::Kernel,
        count: CubeCount,
        arguments: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let id = kernel.id();
        let known = self.emulator.as_ref().and_then(|emulator| emulator.known.get(&id));
        let recorded = match known {
            Some(known) => Ok(known.clone()),
            None => self.compile(kernel.as_ref(), mode),
        };
        if let (Some(emulator), Ok(recorded)) = (&mut self.emulator, &recorded) {
            emulator.known.entry(id).or_insert_with(|| recorded.clone());
        }
        if self.emulator.is_some() {
            // A process may launch thousands; they are not kept.
            let run = recorded.and_then(|kernel| self.emulate(&kernel, &count, &arguments));
            self.note(run);
            return;
        }
        self.utilities.info.lock().unwrap_or_else(PoisonError::into_inner).push(recorded);
    }

    fn flush(&mut self, _: StreamId) -> Result<(), ServerError> {
        Ok(())
    }

    fn memory_usage(&mut self, _: StreamId) -> Result<MemoryUsage, ServerError> {
        Err(unsupported())
    }

    fn memory_cleanup(&mut self, _: StreamId) {}

    fn start_profile(&mut self, _: StreamId) -> Result<ProfilingToken, ServerError> {
        Err(unsupported())
    }

    fn end_profile(
        &mut self,
        _: StreamId,
        _: ProfilingToken,
    ) -> Result<ProfileDuration, ProfileError> {
        Err(ProfileError::NotRegistered { backtrace: Default::default() })
    }

    fn allocation_mode(&mut self, _: MemoryAllocationMode, _: StreamId) {}
}

impl Runtime for Recorder {
    type Compiler = CudaCompiler;
    type Server = RecorderServer;
    type Device = RecorderDevice;

    fn client(device: &Self::Device) -> ComputeClient<Self> {
        ComputeClient::load(device)
    }

    fn name(_: &ComputeClient<Self>) -> &'static str {
        "cuda"
    }

    fn require_array_lengths() -> bool {
        CudaRuntime::require_array_lengths()
    }

    fn max_cube_count() -> (u32, u32, u32) {
        CudaRuntime::max_cube_count()
    }

    fn can_read_tensor(shape: &Shape, strides: &Strides) -> bool {
        CudaRuntime::can_read_tensor(shape, strides)
    }

    fn target_properties() -> TargetProperties {
        CudaRuntime::target_properties()
    }

    fn enumerate_devices(_: u16, _: &Log) -> Vec<DeviceId> {
        Architecture::ALL
            .iter()
            .map(|architecture| RecorderDevice(architecture.version()).to_id())
            .collect()
    }
}
