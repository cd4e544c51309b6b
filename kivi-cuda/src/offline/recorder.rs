//! A CubeCL runtime that compiles every launched kernel to CUDA C++ and keeps the source.
//!
//! Nothing runs: memory is empty, reads give zeros. Kernels are compiled by the compiler of
//! `cubecl-cuda` under the properties that crate announces for a real device of the same compute
//! capability, so that host code which asks for features takes the same branches.

use super::Architecture;
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
use cubecl::{CubeTask, MemoryUsage};
use cubecl_cpp::DialectWmmaCompiler;
use cubecl_cpp::cuda::arch::CudaArchitecture;
use cubecl_cpp::cuda::mma::CudaWmmaCompiler;
use cubecl_cpp::register_supported_types;
use cubecl_cpp::shared::{
    CompilationOptions, CppSupportedFeatures, register_mma_features, register_scaled_mma_features,
    register_wmma_features,
};
use cubecl_runtime::allocator::PitchedMemoryLayoutPolicy;
use cubecl_runtime::logging::ServerLogger;
use cubecl_runtime::memory_management::{ManagedMemoryHandle, MemoryAllocationMode};
use cubecl_runtime::storage::{ComputeStorage, ManagedResource};
use std::sync::{Arc, Mutex, PoisonError};

/// One launched kernel.
#[derive(Clone, Debug)]
pub struct Recorded {
    /// The name of the Rust function; all compile-time variants share it.
    pub entry: String,
    /// CUDA C++.
    pub source: String,
    /// Dynamic shared memory, in bytes.
    pub shared_bytes: usize,
    /// Threads per block.
    pub threads: u32,
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

/// The recording runtime.
#[derive(Clone, Debug)]
pub struct Recorder;

/// A device that does not exist: its index is its compute capability, 90 for `sm_90`.
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
#[derive(Debug)]
pub struct RecorderServer {
    options: CompilationOptions,
    utilities: Arc<ServerUtilities<Self>>,
}

impl DeviceService for RecorderServer {
    fn init(id: DeviceId) -> Self {
        let version = u32::from(id.index_id);
        let logger = Arc::new(ServerLogger::default());
        let layout = PitchedMemoryLayoutPolicy::new(ALIGNMENT);
        let utilities = ServerUtilities::new(properties(version), logger, Log::default(), layout);
        let supports_features = CppSupportedFeatures {
            fast_math: true,
            fast_tanh: version >= 75,
            grid_constants: version >= 70,
            clusters: version >= 90,
            elect_sync: version >= 90,
            ..Default::default()
        };
        let options = CompilationOptions { warp_size: 32, supports_features };
        Self { options, utilities: Arc::new(utilities) }
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

/// What cannot be answered without a device.
fn unsupported() -> ServerError {
    IoError::UnsupportedIoOperation { backtrace: Default::default() }.into()
}

impl ServerCommunication for RecorderServer {
    const SERVER_COMM_ENABLED: bool = false;
}

impl ComputeServer for RecorderServer {
    type Kernel = Box<dyn CubeTask<CudaCompiler>>;
    type Info = Log;
    type MemoryLayoutPolicy = PitchedMemoryLayoutPolicy;
    // Never made: nothing is stored.
    type Storage = <<CudaRuntime as Runtime>::Server as ComputeServer>::Storage;

    fn initialize_memory(&mut self, _: ManagedMemoryHandle, _: u64, _: StreamId) {}

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
        let zeros = |copy: CopyDescriptor| {
            let elements: usize = copy.shape.iter().product();
            Bytes::from_bytes_vec(vec![0; elements * copy.elem_size])
        };
        let zeros = descriptors.into_iter().map(zeros).collect();
        Box::pin(async move { Ok(zeros) })
    }

    fn write(&mut self, _: Vec<(CopyDescriptor, Bytes)>, _: StreamId) {}

    fn sync(&mut self, _: StreamId) -> DynFut<Result<(), ServerError>> {
        Box::pin(async { Ok(()) })
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
        _: CubeCount,
        _: KernelArguments,
        mode: ExecutionMode,
        _: StreamId,
    ) {
        let compiled =
            kernel.compile(&mut Default::default(), &self.options, mode, kernel.address_type());
        let recorded = match compiled {
            Ok(kernel) => Ok(Recorded {
                entry: kernel.entrypoint_name,
                source: kernel.source,
                shared_bytes: kernel.repr.map_or(0, |repr| repr.shared_memory_size()),
                threads: kernel.cube_dim.num_elems(),
            }),
            Err(error) => Err(error.to_string()),
        };
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
