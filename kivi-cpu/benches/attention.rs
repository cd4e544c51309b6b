//! Decode attention of one query token, one layer at a time out of several, so that the cache comes
//! from memory as it does in a model. `cargo bench -p kivi-cpu --bench attention [-- FILTER]`, under
//! `KIVI_CPU_ISA` and `KIVI_BENCH_THREADS` (default 2) if set. With `KIVI_BENCH_LAYERS`, that many
//! layers instead; with criterion's `--test`, one call, for counting instructions.
//!
//! Answers are checked by the tests and by `kivi bench attention`; this is for tuning.

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, Format, LayerSpec, PoolSpec, StepPlan,
    StepRequest,
};
use kivi_cpu::Cpu;
use std::time::Duration;

/// Tokens appended at once.
const CHUNK: usize = 2048;

/// Bytes of all layers together: well above a last-level cache.
const WORKING_SET: usize = 128 << 20;

/// Numbers in −1 … 1 that do not repeat soon.
fn noise(length: usize, seed: u32) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / 2f32.powi(31) - 1.0
    };
    (0..length).map(|_| next()).collect()
}

fn attention(c: &mut Criterion) {
    let threads = std::env::var("KIVI_BENCH_THREADS").map_or(2, |n| n.parse().expect("a number"));
    let cpu = Cpu::new(threads).expect("threads");
    let mut group = c.benchmark_group(format!("attention/{}", cpu.isa()));
    group.sample_size(10).warm_up_time(Duration::from_millis(300));
    group.measurement_time(Duration::from_secs(3));
    for tokens in [1024, 4096, 32768] {
        for (query_heads, kv_heads) in [(32, 32), (32, 8), (9, 3)] {
            for head_dim in [64, 128] {
                for format in [Format::KIVI2, Format::KIVI4, Format::KIVI8, Format::F16] {
                    let id = format!("{tokens}/{query_heads}-{kv_heads}/{head_dim}");
                    let shape = [tokens, query_heads, kv_heads, head_dim];
                    let mut case = None;
                    group.bench_function(BenchmarkId::new(id, format), |b| {
                        // Built only if the filter lets it through.
                        let case = case.get_or_insert_with(|| Case::new(&cpu, shape, format));
                        let mut layer = 0;
                        b.iter(|| {
                            layer = (layer + 1) % case.layers;
                            case.attend(&cpu, layer)
                        });
                    });
                }
            }
        }
    }
}

struct Case {
    cache: <Cpu as CacheBackend>::Cache,
    plan: StepPlan,
    attention: Attention,
    queries: <Cpu as CacheBackend>::Buffer,
    layers: usize,
}

impl Case {
    fn new(
        cpu: &Cpu,
        [tokens, query_heads, kv_heads, head_dim]: [usize; 4],
        format: Format,
    ) -> Self {
        let config = CacheConfig::builder().key(format).value(format).build().expect("a config");
        let width = kv_heads * head_dim;
        let bits = format.bits.map_or(16, |bits| bits.get() + 1);
        let layers = std::env::var("KIVI_BENCH_LAYERS").ok().and_then(|n| n.parse().ok());
        let layers =
            layers.unwrap_or_else(|| WORKING_SET.div_ceil(tokens * width * bits / 4).max(2));
        let spec = vec![LayerSpec::new(&config, kv_heads, head_dim); layers];
        let spec = PoolSpec::for_context(config, spec, 1, tokens + 1).expect("a pool");
        let mut cache = cpu.create_cache(&spec).expect("a cache");
        let mut state = CacheState::new(spec);
        let sequence = state.create_sequence().expect("a sequence");
        let mut plan = StepPlan::default();
        let upload = |rows: usize, width: usize, seed: usize| {
            cpu.upload(rows, width, &noise(rows * width, seed as u32)).expect("a buffer")
        };
        let chunks = (0..tokens - 1).step_by(CHUNK).map(|first| CHUNK.min(tokens - 1 - first));
        for (step, rows) in chunks.chain([1]).enumerate() {
            let (keys, values) = (upload(rows, width, 2 * step + 1), upload(rows, width, !step));
            state.plan(&[StepRequest { sequence, tokens: rows }], &mut plan).expect("a plan");
            cpu.begin_step(&mut cache, &plan).expect("a step");
            for layer in 0..layers {
                cpu.append(&mut cache, layer, &plan, &keys, &values).expect("room");
                cpu.quantize(&mut cache, layer, &plan).expect("codes");
                if step + 1 < tokens.div_ceil(CHUNK) {
                    cpu.release(&mut cache, layer, &plan).expect("a residual");
                }
            }
        }
        let queries = upload(1, query_heads * head_dim, 99);
        let attention = Attention::new(query_heads, 1.0 / (head_dim as f32).sqrt());
        Self { cache, plan, attention, queries, layers }
    }

    fn attend(&self, cpu: &Cpu, layer: usize) -> <Cpu as CacheBackend>::Buffer {
        cpu.attend(&self.cache, layer, &self.plan, &self.attention, &self.queries).expect("outputs")
    }
}

criterion_group!(benches, attention);
criterion_main!(benches);
