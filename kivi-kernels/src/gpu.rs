//! [`CacheBackend`] on a device.

use crate::{
    GpuCache, Limits, Problem, Routine, canonical,
    launch::{Attend, Device},
    step::{CodesList, Cutting},
};
use cubecl::{
    features::{MmaConfig, Plane},
    prelude::*,
    server::Handle,
};
use kivi_core::{
    Attention, CacheBackend, CanonicalLayer, Capabilities, Error, KeyValue, PoolSpec, Result,
    SequenceLayout, StepPlan, expect_len, memory::MeasuredBytes,
};

/// How a device is used; the default is what it says of itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct GpuOptions {
    /// Units of a plane, whose operations are used whatever the device announces; 0 for none.
    pub planes: Option<usize>,
    /// Takes denormal numbers to be kept or flushed instead of trying.
    pub denormals: Option<bool>,
    /// Bytes that the cache of one layer may take.
    pub layer_bytes: Option<usize>,
    /// Whether the device is the processor, for which loops are not unrolled.
    pub software: bool,
    /// Queries that a cube of the attention kernel takes, instead of as many as there are.
    pub queries: Option<usize>,
    /// The routine for codes, where it can be used, instead of the one that fits best.
    pub routine: Option<Routine>,
}

/// A device that runs the cache kernels.
pub struct Gpu<R: Runtime> {
    device: Device<R>,
    description: String,
    limits: Limits,
    /// Words of one layer's arena.
    max_words: usize,
}

impl<R: Runtime> std::fmt::Debug for Gpu<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpu").field("device", &self.description).finish_non_exhaustive()
    }
}

/// A matrix of f32 on the device, `[rows, width]`.
#[derive(Clone, Debug)]
pub struct GpuMatrix {
    rows: usize,
    width: usize,
    handle: Handle,
}

/// Bytes that the partial results of one launch may take.
const PARTIAL_BYTES: usize = 64 << 20;

impl<R: Runtime> Gpu<R> {
    /// A backend on an open client. `name` is its name on the command line, `device` says which device
    /// it is.
    ///
    /// # Errors
    /// [`Error::Device`] when the device does not run the first, small kernel.
    pub fn new(
        name: &'static str,
        device: impl Into<String>,
        client: ComputeClient<R>,
        options: GpuOptions,
    ) -> Result<Self> {
        let properties = client.properties();
        let hardware = &properties.hardware;
        let announced = client.features().plane.contains(Plane::Ops)
            && hardware.plane_size_min == hardware.plane_size_max;
        let announced = announced.then_some(hardware.plane_size_max as usize);
        let plane = options.planes.or(announced).filter(|&units| units > 0);
        let largest = usize::try_from(properties.memory.max_page_size).unwrap_or(usize::MAX);
        let largest = largest.min(options.layer_bytes.unwrap_or(usize::MAX));
        let mut limits = Limits {
            shared_memory: hardware.max_shared_memory_size,
            units: hardware.max_units_per_cube as usize,
            plane,
            denormals: false,
            software: options.software,
            queries: options.queries,
            pairs: false,
            matrix: false,
            routine: options.routine,
        };
        let device_name = device.into();
        let device = Device::new(name, client);
        let kept = device.keeps_denormals()?;
        limits.denormals = options.denormals.unwrap_or(kept);
        // Only where it matters: it fails to compile as WGSL.
        limits.pairs = plane == Some(32) && device.reads_pairs().unwrap_or(false);
        let half = half::f16::as_type_native_unchecked().storage_type();
        let full = f32::as_type_native_unchecked().storage_type();
        let product = MmaConfig { a_type: half, b_type: half, cd_type: full, m: 16, n: 8, k: 16 };
        limits.matrix = device.client.features().matmul.mma.contains(&product);
        let planes = plane.map_or("no planes".to_owned(), |units| format!("planes of {units}"));
        let codes = if limits.denormals { "codes as denormals" } else { "codes converted" };
        let description = format!("{device_name}, {planes}, {codes}");
        // Words are counted in 32 bits.
        let max_words = (largest / 4).min(1 << 30);
        Ok(Self { device, description, limits, max_words })
    }

    /// What the choice of kernels rests on.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether words can be read as pairs of f16, which the fastest kernels need.
    ///
    /// # Errors
    /// [`Error::Device`] that names the kernel, when the device cannot compile it.
    pub fn reads_pairs(&self) -> Result<bool> {
        self.device.reads_pairs()
    }

    /// All keys and values of a layer of a sequence, `[tokens, kv_heads · head_dim]` each, codes as
    /// `code · scale + zero`.
    ///
    /// # Errors
    /// When the layout does not belong to the cache, or pages of it were dropped.
    pub fn dequantize(
        &self,
        cache: &GpuCache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<KeyValue<GpuMatrix>> {
        let (arena, memory) = cache.layer("dequantize", layer)?;
        layout.check("dequantize", &cache.spec)?;
        let shape = memory.shape;
        let group = cache.spec.group_of(layer);
        let matrix = |keys: bool| {
            let places = canonical::places(memory, group, layout, keys)?;
            let handle = self.device.dequantize(arena, shape, &places, keys)?;
            let width = shape.kv_heads * shape.head_dim;
            Ok::<_, Error>(GpuMatrix { rows: layout.tokens, width, handle })
        };
        Ok(KeyValue::new(matrix(true)?, matrix(false)?))
    }

    fn expect(&self, operation: &'static str, buffer: &GpuMatrix, shape: [usize; 2]) -> Result<()> {
        let found = [buffer.rows, buffer.width];
        if found == shape {
            return Ok(());
        }
        Err(Error::request(operation, format!("a buffer of {found:?}, expected {shape:?}")))
    }
}

impl<R: Runtime> CacheBackend for Gpu<R> {
    type Buffer = GpuMatrix;
    type Cache = GpuCache;

    fn capabilities(&self) -> Capabilities {
        // A compiler may contract differently for another number of queries.
        Capabilities::new(self.device.name, self.description.clone(), false)
    }

    fn upload(&self, rows: usize, width: usize, data: &[f32]) -> Result<GpuMatrix> {
        expect_len("upload", "data", data.len(), rows * width)?;
        let data = if data.is_empty() { &[0.0] } else { data };
        let handle = self.device.client.create_from_slice(f32::as_bytes(data));
        Ok(GpuMatrix { rows, width, handle })
    }

    fn read(&self, buffer: &GpuMatrix, out: &mut [f32]) -> Result<()> {
        expect_len("read", "output", out.len(), buffer.rows * buffer.width)?;
        let bytes = self.device.read("read", buffer.handle.clone())?;
        let found = f32::from_bytes(&bytes);
        out.copy_from_slice(&found[..out.len()]);
        Ok(())
    }

    fn shape(&self, buffer: &GpuMatrix) -> [usize; 2] {
        [buffer.rows, buffer.width]
    }

    fn create_cache(&self, spec: &PoolSpec) -> Result<GpuCache> {
        let cache = GpuCache::new(&self.device, spec, self.max_words)?;
        for memory in &cache.groups {
            let shape = memory.shape;
            // One query is what every form of attention needs at least.
            let problem = Problem { shape, head_group: 1, rows: 1, softcap: false, slopes: false };
            problem.blueprint(self.device.name, self.limits)?;
        }
        Ok(cache)
    }

    fn begin_step(&self, cache: &mut GpuCache, plan: &StepPlan) -> Result<()> {
        cache.begin_step(&self.device, plan)
    }

    fn append(
        &self,
        cache: &mut GpuCache,
        layer: usize,
        plan: &StepPlan,
        keys: &GpuMatrix,
        values: &GpuMatrix,
    ) -> Result<()> {
        let (arena, memory) = cache.layer("append", layer)?;
        let step = cache.step("append", layer, plan)?;
        let shape = memory.shape;
        let expected = [plan.rows, shape.kv_heads * shape.head_dim];
        for (buffer, first, words, store) in [
            (keys, 0, shape.key_width(), shape.key_store),
            (values, plan.rows, shape.value_width(), shape.value_store),
        ] {
            self.expect("append", buffer, expected)?;
            let rows = (&buffer.handle, plan.rows);
            let saturated = &cache.saturated;
            self.device.append(arena, rows, &step.places, first, words, store, saturated)?;
        }
        Ok(())
    }

    fn quantize(&self, cache: &mut GpuCache, layer: usize, plan: &StepPlan) -> Result<()> {
        let (arena, memory) = cache.layer("quantize", layer)?;
        let step = cache.step("quantize", layer, plan)?;
        self.device.quantize_keys(arena, memory.shape, &step.keys)?;
        self.device.quantize_values(arena, memory.shape, &step.values)
    }

    fn attend(
        &self,
        cache: &GpuCache,
        layer: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &GpuMatrix,
    ) -> Result<GpuMatrix> {
        let (arena, memory) = cache.layer("attend", layer)?;
        let step = cache.step("attend", layer, plan)?;
        attention.validate(&memory.spec)?;
        if attention.key_bias.is_some() {
            let (backend, what) = (self.device.name, "key biases beside the cache".into());
            return Err(Error::Unsupported { backend, what });
        }
        let shape = memory.shape;
        let width = attention.query_heads * shape.head_dim;
        self.expect("attend", queries, [plan.rows, width])?;
        let head_group = attention.head_group(&memory.spec);
        let problem = Problem {
            shape,
            head_group,
            rows: plan.sequences.iter().map(|sequence| sequence.rows.len()).max().unwrap_or(0),
            softcap: attention.softcap.is_some(),
            slopes: attention.alibi_slopes.is_some(),
        };
        let config = problem.blueprint(self.device.name, self.limits)?;
        let elements = plan.rows * width;
        let handle = self.device.client.empty(4 * elements.max(1));
        let item_bytes = 4 * shape.kv_heads * config.queries * (shape.head_dim + 2);
        let cutting = Cutting {
            head_group,
            queries: config.queries,
            split: config.split,
            sinks: shape.sinks,
            window: memory.spec.window,
            max_items: (PARTIAL_BYTES / item_bytes).clamp(1, crate::shape::MAX_CUBES),
        };
        let codes = problem
            .of_codes(self.limits)
            .map(|config| CodesList::new(config, &step.tables_on_host, head_group, &cutting, plan));
        let codes = codes.filter(|codes| codes.splits > 0);
        let partial = codes.as_ref().map(|codes| {
            let inputs = (&queries.handle, arena);
            self.device.attend_codes(codes, inputs, attention, plan.sequences.len())
        });
        let partial = partial.transpose()?;
        let job = Attend {
            queries: (&queries.handle, elements),
            arena,
            tables: &step.tables,
            views_at: step.views_at,
            attention,
            window: memory.spec.window,
            head_group,
            config,
            output: &handle,
            codes: partial.as_ref(),
        };
        let starts = codes.as_ref().map(|codes| &codes.tokens[..]);
        for work in cutting.work(plan, starts) {
            self.device.attend(&job, &work)?;
        }
        Ok(GpuMatrix { rows: plan.rows, width, handle })
    }

    fn release(&self, cache: &mut GpuCache, layer: usize, plan: &StepPlan) -> Result<()> {
        let (arena, _) = cache.layer("release", layer)?;
        let step = cache.step("release", layer, plan)?;
        self.device.copy_within(arena, &step.releases)
    }

    fn copy_slot(&self, cache: &mut GpuCache, from: usize, to: &SequenceLayout) -> Result<()> {
        cache.copy_slot(&self.device, from, to)
    }

    fn export(
        &self,
        cache: &GpuCache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer> {
        canonical::export(&self.device, cache, layer, layout)
    }

    fn import(
        &self,
        cache: &mut GpuCache,
        layer: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        canonical::import(&self.device, cache, layer, layout, contents)
    }

    fn measure(&self, cache: &GpuCache) -> MeasuredBytes {
        cache.measure()
    }

    fn saturated(&self, cache: &GpuCache) -> u64 {
        match self.device.read("read", cache.saturated.clone()) {
            Ok(bytes) => u32::from_bytes(&bytes).first().copied().unwrap_or(0).into(),
            Err(error) => {
                tracing::error!("the count of saturated elements is lost: {error}");
                0
            }
        }
    }
}
