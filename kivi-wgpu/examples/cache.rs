//! A quantized cache on a GPU, or on Mesa's software driver where there is none, inside somebody else's
//! attention: 4,096 tokens are appended and attended to, taken back and forked, exported, and imported
//! on the reference, which holds the same bytes and gives the same answers.
//!
//! ```sh
//! cargo run --release --package kivi-wgpu --features vulkan --example cache
//! ```

use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, LayerSpec, PoolSpec, Result, SequenceId,
    StepPlan, StepRequest,
};
use kivi_cpu_ref::CpuRef;
use kivi_wgpu::{WgpuOptions, open};

/// Shape of the one layer of the example.
const QUERY_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;

/// Tokens of the cache.
const TOKENS: usize = 4096;

/// A pool on a backend, and its bookkeeping.
struct Pool<'a, B: CacheBackend> {
    backend: &'a B,
    cache: B::Cache,
    state: CacheState,
}

impl<'a, B: CacheBackend> Pool<'a, B> {
    fn new(backend: &'a B, spec: &PoolSpec) -> Result<Self> {
        let (cache, state) = (backend.create_cache(spec)?, CacheState::new(spec.clone()));
        Ok(Self { backend, cache, state })
    }

    /// Appends tokens and returns what their queries see, `[tokens, query_heads · head_dim]`; with
    /// `attend` false nothing, which saves a software device minutes. Your model would compute the
    /// rows; here they are made from the positions.
    fn step(&mut self, sequence: SequenceId, tokens: usize, attend: bool) -> Result<Vec<f32>> {
        let mut plan = StepPlan::default();
        self.state.plan(&[StepRequest { sequence, tokens }], &mut plan)?;
        let matrix = |width: usize, seed: usize| -> Vec<f32> {
            plan.positions().flat_map(|p| (0..width).map(move |c| noise(p, c, seed))).collect()
        };
        let (width, query_width) = (KV_HEADS * HEAD_DIM, QUERY_HEADS * HEAD_DIM);
        let keys = self.backend.upload(plan.rows, width, &matrix(width, 1))?;
        let values = self.backend.upload(plan.rows, width, &matrix(width, 2))?;
        let queries = self.backend.upload(plan.rows, query_width, &matrix(query_width, 3))?;

        self.backend.begin_step(&mut self.cache, &plan)?;
        // Once for every layer:
        self.backend.append(&mut self.cache, 0, &plan, &keys, &values)?;
        self.backend.quantize(&mut self.cache, 0, &plan)?;
        if !attend {
            self.backend.release(&mut self.cache, 0, &plan)?;
            return Ok(Vec::new());
        }
        let attention = Attention::new(QUERY_HEADS, 1.0 / (HEAD_DIM as f32).sqrt());
        let output = self.backend.attend(&self.cache, 0, &plan, &attention, &queries)?;
        self.backend.release(&mut self.cache, 0, &plan)?;
        let mut rows = vec![f32::NAN; plan.rows * query_width];
        self.backend.read(&output, &mut rows)?;
        Ok(rows)
    }
}

/// A number between −1 and 1 that looks random.
fn noise(position: usize, channel: usize, seed: usize) -> f32 {
    let mut x = (position as u32 * 65_537) ^ (channel as u32 * 7919) ^ (seed as u32 * 104_729);
    for _ in 0..2 {
        x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
    }
    (x ^ (x >> 13)) as f32 / u32::MAX as f32 * 2.0 - 1.0
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // NaN is the largest of all.
    differences.fold(0.0, |max, x| if x > max || x.is_nan() { x } else { max })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The software driver is named explicitly if you want it beside a real GPU.
    let gpu = open(&WgpuOptions::default())?;
    println!("device: {}", gpu.capabilities().device);

    let config = CacheConfig::builder().rollback_length(8).build()?;
    let layer = LayerSpec::new(&config, KV_HEADS, HEAD_DIM);
    let spec = PoolSpec::for_context(config, vec![layer], 2, TOKENS + 64)?;
    let mut pool = Pool::new(&gpu, &spec)?;

    // Most of it as a prompt in chunks, the rest token by token.
    let sequence = pool.state.create_sequence()?;
    pool.state.begin_prompt(sequence, TOKENS - 20)?;
    while pool.state.tokens(sequence)? < TOKENS - 20 {
        let left = TOKENS - 20 - pool.state.tokens(sequence)?;
        pool.step(sequence, left.min(512), false)?;
    }
    let mut last = Vec::new();
    for _ in 0..20 {
        last = pool.step(sequence, 1, true)?;
    }
    let bytes = gpu.measure(&pool.cache);
    let f16 = 2 * 2 * TOKENS * KV_HEADS * HEAD_DIM;
    let smaller = f16 as f64 / bytes.in_use() as f64;
    println!("{TOKENS} tokens in {} bytes, {smaller:.2} times smaller than f16", bytes.in_use());

    // Take back four tokens and append them again: the same answer.
    pool.state.truncate(sequence, TOKENS - 4)?;
    let again = pool.step(sequence, 4, true)?;
    let again = &again[again.len() - last.len()..];
    println!("after a truncation by 4 tokens: difference {:e}", largest_difference(&last, again));
    assert!(largest_difference(&last, again) < 1e-5);

    // A fork shares the full pages and goes its own way.
    let fork = pool.state.fork(sequence)?;
    gpu.copy_slot(&mut pool.cache, sequence.slot(), &pool.state.layout(fork)?)?;
    let (one, other) = (pool.step(sequence, 3, true)?, pool.step(fork, 3, true)?);
    println!("a fork: difference {:e}", largest_difference(&one, &other));
    assert!(largest_difference(&one, &other) < 1e-5);
    pool.state.remove(fork)?;

    // The canonical form is the same everywhere. A sequence can be adopted unless it was truncated just
    // now, so some tokens more.
    pool.step(sequence, 8, true)?;
    let layout = pool.state.layout(sequence)?;
    let exported = gpu.export(&pool.cache, 0, &layout)?;
    let mut reference = Pool::new(&CpuRef, &spec)?;
    let adopted = reference.state.adopt_sequence(layout.tokens)?;
    let layout = reference.state.layout(adopted)?;
    CpuRef.import(&mut reference.cache, 0, &layout, &exported)?;
    assert_eq!(CpuRef.export(&reference.cache, 0, &layout)?, exported);
    println!("exported and imported on the reference: identical");

    let (gpu_row, reference_row) =
        (pool.step(sequence, 1, true)?, reference.step(adopted, 1, true)?);
    let difference = largest_difference(&gpu_row, &reference_row);
    println!("the next token on both: difference {difference:e}");
    assert!(difference < 1e-5);
    Ok(())
}
