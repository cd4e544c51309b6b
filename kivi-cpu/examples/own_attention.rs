//! The cache inside somebody else's attention: only `kivi-core` and `kivi-cpu`, no model code, slices
//! in and out.
//!
//! A layer of 8 query and 2 kv heads caches 1,000 tokens in 2 bits, as a prompt and then one by one, and
//! attends with each. The result is compared with attention over uncompressed keys and values.
//!
//! ```sh
//! cargo run --release -p kivi-cpu --example own_attention
//! ```

use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, LayerSpec, PoolSpec, Result, StepPlan,
    StepRequest,
};
use kivi_cpu::Cpu;

const QUERY_HEADS: usize = 8;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const PROMPT: usize = 700;
const TOKENS: usize = 1000;

fn main() -> Result<()> {
    // Once: the pool, the books and the memory.
    let backend = Cpu::new(2)?;
    let config = CacheConfig::builder().build()?;
    let layer = LayerSpec::new(&config, KV_HEADS, HEAD_DIM);
    let spec = PoolSpec::for_context(config, vec![layer], 1, TOKENS)?;
    let mut cache = backend.create_cache(&spec)?;
    let mut state = CacheState::new(spec);
    let attention = Attention::new(QUERY_HEADS, 1.0 / (HEAD_DIM as f32).sqrt());

    // Your model's queries, keys and values after RoPE: [tokens, heads · head_dim].
    let queries = numbers(TOKENS * QUERY_HEADS * HEAD_DIM, 1);
    let keys = numbers(TOKENS * KV_HEADS * HEAD_DIM, 2);
    let values = numbers(TOKENS * KV_HEADS * HEAD_DIM, 3);

    let sequence = state.create_sequence()?;
    state.begin_prompt(sequence, PROMPT)?;
    let mut plan = StepPlan::default();
    let mut attended = Vec::new();
    // The prompt at once, then token by token.
    let steps = std::iter::once(0..PROMPT).chain((PROMPT..TOKENS).map(|token| token..token + 1));
    for rows in steps {
        let of = |data: &[f32], heads: usize| {
            let width = heads * HEAD_DIM;
            backend.upload(rows.len(), width, &data[rows.start * width..rows.end * width])
        };
        // Once per step.
        state.plan(&[StepRequest { sequence, tokens: rows.len() }], &mut plan)?;
        backend.begin_step(&mut cache, &plan)?;
        // For each layer of the model; here there is one.
        let (k, v) = (of(&keys, KV_HEADS)?, of(&values, KV_HEADS)?);
        backend.append(&mut cache, 0, &plan, &k, &v)?;
        backend.quantize(&mut cache, 0, &plan)?;
        let q = of(&queries, QUERY_HEADS)?;
        let output = backend.attend(&cache, 0, &plan, &attention, &q)?;
        backend.release(&mut cache, 0, &plan)?;
        // [rows, query_heads · head_dim]: what the output projection takes.
        attended = vec![0.0; rows.len() * QUERY_HEADS * HEAD_DIM];
        backend.read(&output, &mut attended)?;
    }

    let exact = exact_attention(&queries, &keys, &values);
    let distance = |a: &[f32], b: &[f32]| {
        a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt()
    };
    let error = distance(&attended, &exact) / distance(&vec![0.0; exact.len()], &exact);
    let bytes = backend.measure(&cache).in_use();
    let f16 = TOKENS * 2 * KV_HEADS * HEAD_DIM * 2;
    println!(
        "{TOKENS} tokens in {bytes} bytes, {:.2} times smaller than f16",
        f16 as f64 / bytes as f64
    );
    println!("the newest token's attention differs by {:.1} % from exact attention", 100.0 * error);
    // Random keys and values are the hardest to quantize: 2 bits keep about this much of them.
    assert!(error < 0.5, "{error}");
    Ok(())
}

/// Softmax attention of the newest token over all tokens, in f64.
fn exact_attention(queries: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let newest = &queries[(TOKENS - 1) * QUERY_HEADS * HEAD_DIM..];
    let mut output = Vec::new();
    for head in 0..QUERY_HEADS {
        let query = &newest[head * HEAD_DIM..(head + 1) * HEAD_DIM];
        let kv_head = head / (QUERY_HEADS / KV_HEADS);
        let row = |data: &[f32], token: usize| {
            let at = (token * KV_HEADS + kv_head) * HEAD_DIM;
            data[at..at + HEAD_DIM].iter().map(|&x| f64::from(x)).collect::<Vec<_>>()
        };
        let weight = |token| {
            let dot: f64 = query.iter().zip(row(keys, token)).map(|(&q, k)| f64::from(q) * k).sum();
            (dot / (HEAD_DIM as f64).sqrt()).exp()
        };
        let weights: Vec<_> = (0..TOKENS).map(weight).collect();
        let total: f64 = weights.iter().sum();
        let mut sum = vec![0.0; HEAD_DIM];
        for (token, weight) in weights.iter().enumerate() {
            for (sum, value) in sum.iter_mut().zip(row(values, token)) {
                *sum += weight / total * value;
            }
        }
        output.extend(sum.iter().map(|&x| x as f32));
    }
    output
}

/// Numbers between -1 and 1 that look random.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}
