//! Decoding takes no memory from the allocator once it has run: the operations of a step use what
//! earlier steps gave back. Only new pages of the cache are allocated.

use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, DecoderBackend, LayerSpec, PoolSpec, Result,
    StepPlan, StepRequest, WeightData, WeightFormat,
};
use kivi_cpu::{Cpu, Weight};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged; a counter does not touch memory that is handed out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WIDTH: usize = 256;
const INTERMEDIATE: usize = 768;
const VOCABULARY: usize = 2000;

/// A layer of a decoder without its attention, and the logits.
struct Model {
    norm: Weight,
    bias: Weight,
    qkv: [Weight; 3],
    output: Weight,
    mlp: [Weight; 3],
    embedding: Weight,
}

impl Model {
    fn new(cpu: &Cpu) -> Self {
        let load = |format: WeightFormat, shape| {
            let bytes = vec![0x31; format.tensor_bytes(shape).unwrap()];
            cpu.load(WeightData::new(format, shape, bytes.into()).unwrap()).unwrap()
        };
        Self {
            norm: load(WeightFormat::F32, [1, WIDTH]),
            bias: load(WeightFormat::F16, [1, WIDTH]),
            qkv: [WeightFormat::Q4_0, WeightFormat::Q4_1, WeightFormat::Q5_0]
                .map(|format| load(format, [WIDTH, WIDTH])),
            output: load(WeightFormat::Q6K, [WIDTH, WIDTH]),
            mlp: [
                load(WeightFormat::Q4K, [INTERMEDIATE, WIDTH]),
                load(WeightFormat::Q4K, [INTERMEDIATE, WIDTH]),
                load(WeightFormat::Q5K, [WIDTH, INTERMEDIATE]),
            ],
            embedding: load(WeightFormat::Q8_0, [VOCABULARY, WIDTH]),
        }
    }

    fn step(&self, cpu: &Cpu, tokens: &[u32], logits: &mut [f32]) -> Result<()> {
        let mut x = cpu.embed(&self.embedding, tokens)?;
        for _ in 0..3 {
            let h = cpu.rms_norm(&x, &self.norm, 1e-5)?;
            let layers = self.qkv.each_ref().map(|weight| (weight, Some(&self.bias)));
            let [queries, keys, values] = cpu.linear_many(&h, layers)?;
            drop((keys, values));
            cpu.add(&mut x, &cpu.linear(&queries, &self.output, None)?)?;
            let h = cpu.rms_norm(&x, &self.norm, 1e-5)?;
            let [gate, up, down] = &self.mlp;
            cpu.add(&mut x, &cpu.gated_mlp(&h, gate, up, down)?)?;
        }
        let last = cpu.select_rows(&x, &[tokens.len() - 1])?;
        cpu.read(&cpu.linear(&last, &self.embedding, None)?, logits)
    }
}

/// One test, since the counter is common to all threads.
#[test]
fn a_step_allocates_nothing_after_the_first() {
    dense_steps();
    cache_steps();
}

fn dense_steps() {
    for threads in [1, 2] {
        let cpu = Cpu::new(threads).unwrap();
        let model = Model::new(&cpu);
        let tokens: Vec<u32> = (0..32).collect();
        let mut logits = vec![0.0; VOCABULARY];
        for rows in [1, 7, 32] {
            let tokens = &tokens[..rows];
            let allocations = cpu.run(|| {
                // Threads that join in late set themselves up then.
                for _ in 0..20 {
                    model.step(&cpu, tokens, &mut logits).unwrap();
                }
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                for _ in 0..20 {
                    model.step(&cpu, tokens, &mut logits).unwrap();
                }
                ALLOCATIONS.load(Ordering::Relaxed) - before
            });
            assert_eq!(allocations, 0, "{threads} threads, {rows} rows");
        }
    }
}

/// A step of the cache: append, quantize (a value leaves the residual in every step), attend, release.
/// Within a page and a block of keys it allocates nothing; the plan, made once for all layers, is not
/// counted.
fn cache_steps() {
    const HEADS: usize = 2;
    const HEAD_DIM: usize = 64;
    for threads in [1, 2] {
        let cpu = Cpu::new(threads).unwrap();
        let config = CacheConfig::builder().build().unwrap();
        let layer = LayerSpec::new(&config, HEADS, HEAD_DIM);
        let spec = PoolSpec::for_context(config, vec![layer], 1, 4096).unwrap();
        let mut cache = cpu.create_cache(&spec).unwrap();
        let mut state = CacheState::new(spec);
        let sequence = state.create_sequence().unwrap();
        let attention = Attention::new(3 * HEADS, 0.125);
        let mut plan = StepPlan::default();
        let data = vec![0.5; 1250 * 3 * HEADS * HEAD_DIM];
        let allocations = cpu.run(|| {
            let mut step = |tokens: usize| -> Result<usize> {
                let rows = |heads: usize| {
                    let width = heads * HEAD_DIM;
                    cpu.upload(tokens, width, &data[..tokens * width])
                };
                let (queries, keys, values) = (rows(3 * HEADS)?, rows(HEADS)?, rows(HEADS)?);
                state.plan(&[StepRequest { sequence, tokens }], &mut plan)?;
                let before = ALLOCATIONS.load(Ordering::Relaxed);
                cpu.begin_step(&mut cache, &plan)?;
                cpu.append(&mut cache, 0, &plan, &keys, &values)?;
                cpu.quantize(&mut cache, 0, &plan)?;
                cpu.attend(&cache, 0, &plan, &attention, &queries)?;
                cpu.release(&mut cache, 0, &plan)?;
                Ok(ALLOCATIONS.load(Ordering::Relaxed) - before)
            };
            // 1290 tokens are 20 pages and 10 more: the next page begins at 1344, the next block of keys at 1408.
            step(1250).unwrap();
            (0..40).for_each(|_| {
                step(1).unwrap();
            });
            (0..40).map(|_| step(1).unwrap()).sum::<usize>()
        });
        assert_eq!(allocations, 0, "{threads} threads");
    }
}
