//! What a backend provides: the cache operations, and the dense operations of a decoder.

use crate::{
    Attention, CanonicalLayer, PoolSpec, Result, Rope, SequenceLayout, StepPlan, WeightData,
    WeightFormat, memory::MeasuredBytes,
};

/// What a backend can do and how it behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Name as on the command line.
    pub name: &'static str,
    /// The device and how it is used, for the start-up line: threads, instruction set.
    pub device: String,
    /// Whether a row's result is bit-identical for any batch, cut of the work and thread count.
    pub deterministic: bool,
    /// Whether [`CacheBackend::attend`] adds [`Attention::key_bias`].
    pub key_bias: bool,
}

impl Capabilities {
    /// Capabilities of a backend that implements nothing optional.
    pub fn new(name: &'static str, device: impl Into<String>, deterministic: bool) -> Self {
        Self { name, device: device.into(), deterministic, key_bias: false }
    }

    /// The same of one that adds key biases to the logits.
    pub fn with_key_bias(mut self) -> Self {
        self.key_bias = true;
        self
    }
}

/// The cache operations: enough for someone who has their own model code.
///
/// Operations are enqueued. An `Err` reports an invalid request at once; an error of the device
/// surfaces at [`CacheBackend::read`] and names the operation. For each layer of a step call
/// `append`, `quantize`, `attend` and `release` in this order, after one `begin_step`.
pub trait CacheBackend {
    /// A matrix of f32 on the device, `[rows, width]`.
    type Buffer: Send + Sync;
    /// The memory of a pool.
    type Cache: Send;

    /// What this backend can do.
    fn capabilities(&self) -> Capabilities;

    /// Copies `rows · width` elements to the device.
    ///
    /// # Errors
    /// When `data` has another length or the device is out of memory.
    fn upload(&self, rows: usize, width: usize, data: &[f32]) -> Result<Self::Buffer>;

    /// Waits for the device and copies a buffer into `out`.
    ///
    /// # Errors
    /// When `out` has another length, or any earlier operation failed.
    fn read(&self, buffer: &Self::Buffer, out: &mut [f32]) -> Result<()>;

    /// `[rows, width]` of a buffer.
    fn shape(&self, buffer: &Self::Buffer) -> [usize; 2];

    /// An empty pool.
    ///
    /// # Errors
    /// When the backend does not support a layer of the pool.
    fn create_cache(&self, spec: &PoolSpec) -> Result<Self::Cache>;

    /// Makes room for a step: forgets what was freed, copies pages, allocates new ones, and gives
    /// every residual the capacity of the step, unless [`append`](Self::append) does so for its
    /// layer.
    ///
    /// # Errors
    /// When the device is out of memory.
    fn begin_step(&self, cache: &mut Self::Cache, plan: &StepPlan) -> Result<()>;

    /// Rounds the rows of a step to the store type and stores them in full precision. Finite
    /// values beyond the range saturate and are counted ([`CacheBackend::saturated`]).
    ///
    /// `keys` (after RoPE) and `values` are `[rows, kv_heads · head_dim]`.
    ///
    /// # Errors
    /// When a buffer has another shape.
    fn append(
        &self,
        cache: &mut Self::Cache,
        layer: usize,
        plan: &StepPlan,
        keys: &Self::Buffer,
        values: &Self::Buffer,
    ) -> Result<()>;

    /// Quantizes the ranges of the plan from the full-precision copies into the pages.
    ///
    /// # Errors
    /// When `layer` does not exist.
    fn quantize(&self, cache: &mut Self::Cache, layer: usize, plan: &StepPlan) -> Result<()>;

    /// Causal attention of every row over its sequence, each token read as the row's view says.
    ///
    /// `queries` and the result are `[rows, query_heads · head_dim]`; softmax and sums accumulate
    /// in f32.
    ///
    /// # Errors
    /// When a buffer has another shape, or the parameters do not fit the layer.
    fn attend(
        &self,
        cache: &Self::Cache,
        layer: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &Self::Buffer,
    ) -> Result<Self::Buffer>;

    /// Gives up the full-precision copies that do not outlive the step.
    ///
    /// # Errors
    /// When `layer` does not exist.
    fn release(&self, cache: &mut Self::Cache, layer: usize, plan: &StepPlan) -> Result<()>;

    /// Copies one residual slot, sinks included, to that of a fork's layout, with the room that the
    /// layout says: the device half of a fork.
    ///
    /// # Errors
    /// When the device is out of memory.
    fn copy_slot(&self, cache: &mut Self::Cache, from: usize, to: &SequenceLayout) -> Result<()>;

    /// One layer of one sequence in canonical form, as it is: with an open segment, or after a
    /// truncation, it may hold more or fewer full-precision tokens than an adopted sequence of the
    /// same length takes.
    ///
    /// # Errors
    /// When the layout does not belong to the cache, or pages of it were dropped.
    fn export(
        &self,
        cache: &Self::Cache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer>;

    /// Fills an adopted sequence ([`adopt_sequence`](crate::CacheState::adopt_sequence)) with one
    /// layer in canonical form.
    ///
    /// # Errors
    /// When the contents do not have the shape of the layout.
    fn import(
        &self,
        cache: &mut Self::Cache,
        layer: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()>;

    /// Bytes of the backend's own buffers. Tokens that were taken back count until they are
    /// overwritten.
    fn measure(&self, cache: &Self::Cache) -> MeasuredBytes;

    /// How many elements were saturated by [`CacheBackend::append`] so far.
    fn saturated(&self, cache: &Self::Cache) -> u64;
}

/// The dense operations of a decoder, coarse enough to be fast without a graph compiler.
///
/// Activations are [`CacheBackend::Buffer`]s of shape `[rows, width]`.
pub trait DecoderBackend: CacheBackend + Send + Sync {
    /// A weight on the device.
    type Weight: Send + Sync;

    /// Runs `step`, which issues operations of this backend, where they are cheapest to issue: on a
    /// thread of the backend's own, say, with the others at hand. What operations do and return is the
    /// same inside and outside.
    fn run<R: Send>(&self, step: impl FnOnce() -> R + Send) -> R {
        step()
    }

    /// The form in which a weight format is kept on the device: itself, or what it is converted to.
    fn kept_as(&self, format: WeightFormat) -> WeightFormat;

    /// Takes a weight, converting it as [`DecoderBackend::kept_as`] says.
    ///
    /// # Errors
    /// When the device is out of memory.
    fn load(&self, data: WeightData) -> Result<Self::Weight>;

    /// Rows `tokens` of a `[vocabulary, width]` weight: `[tokens, width]`.
    ///
    /// # Errors
    /// When a token is not below the vocabulary size.
    fn embed(&self, table: &Self::Weight, tokens: &[u32]) -> Result<Self::Buffer>;

    /// `x / √(mean(x²) + epsilon) · weight`, row by row (RMSNorm).
    ///
    /// # Errors
    /// When the weight is not `[1, width]`.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        weight: &Self::Weight,
        epsilon: f32,
    ) -> Result<Self::Buffer>;

    /// `x · weightᵀ + bias`: a weight `[out, in]` maps `[rows, in]` to `[rows, out]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn linear(
        &self,
        x: &Self::Buffer,
        weight: &Self::Weight,
        bias: Option<&Self::Weight>,
    ) -> Result<Self::Buffer>;

    /// Several layers of the same input, as [`DecoderBackend::linear`] computes each of them.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn linear_many<const N: usize>(
        &self,
        x: &Self::Buffer,
        layers: [(&Self::Weight, Option<&Self::Weight>); N],
    ) -> Result<[Self::Buffer; N]> {
        let mut outputs = [const { None }; N];
        for (output, (weight, bias)) in outputs.iter_mut().zip(layers) {
            *output = Some(self.linear(x, weight, bias)?);
        }
        Ok(outputs.map(|output| output.expect("every element was just filled")))
    }

    /// The cosines and sines of a step ([`Rope::angles`]), `[rows, rotary_dim]`, to be used by all its
    /// layers.
    ///
    /// # Errors
    /// When the device is out of memory.
    fn prepare_rope(&self, rope: &Rope, plan: &StepPlan) -> Result<Self::Buffer> {
        self.upload(plan.rows, rope.rotary_dim(), &rope.angles(plan))
    }

    /// Rotates the heads of queries and keys, then appends keys and values to the cache.
    ///
    /// Queries are `[rows, query_heads · head_dim]`, keys and values `[rows, kv_heads · head_dim]`,
    /// angles as [`DecoderBackend::prepare_rope`] made them.
    ///
    /// # Errors
    /// When the shapes do not fit.
    #[allow(clippy::too_many_arguments)] // one fused device operation
    fn rotate_and_append(
        &self,
        cache: &mut Self::Cache,
        layer: usize,
        plan: &StepPlan,
        rope: &Rope,
        angles: &Self::Buffer,
        qkv: [&mut Self::Buffer; 3],
    ) -> Result<()>;

    /// `(silu(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ`: the gated MLP of Llama. `gate` and `up` are
    /// `[intermediate, width]`, `down` is `[width, intermediate]`.
    ///
    /// # Errors
    /// When the shapes do not fit.
    fn gated_mlp(
        &self,
        x: &Self::Buffer,
        gate: &Self::Weight,
        up: &Self::Weight,
        down: &Self::Weight,
    ) -> Result<Self::Buffer>;

    /// `x += y`.
    ///
    /// # Errors
    /// When the shapes differ.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer) -> Result<()>;

    /// The given rows of `x`, in the given order.
    ///
    /// # Errors
    /// When a row does not exist.
    fn select_rows(&self, x: &Self::Buffer, rows: &[usize]) -> Result<Self::Buffer>;
}
