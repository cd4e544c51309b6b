//! The reference and the CPU backend against the numpy simulation of `tools/golden_attention.py`: outputs of every
//! row, and the packed cache at the end, bit for bit.

use half::f16;
use kivi_core::*;
use kivi_cpu::{Cpu, Isa};
use kivi_cpu_ref::CpuRef;
use safetensors::SafeTensors;

const GOLDEN: &[u8] = include_bytes!("../../kivi-core/tests/golden/kivi_attention.safetensors");
const PROMPT: usize = 100;
const TOKENS: usize = 264;
const KV_HEADS: usize = 2;
const QUERY_HEADS: usize = 4;
const HEAD_DIM: usize = 32;

struct Golden<'a>(SafeTensors<'a>);

impl Golden<'_> {
    fn f16s(&self, name: &str) -> Vec<f16> {
        let (pairs, _) = self.0.tensor(name).unwrap().data().as_chunks::<2>();
        pairs.iter().map(|bytes| f16::from_le_bytes(*bytes)).collect()
    }

    fn f32s(&self, name: &str) -> Vec<f32> {
        let (words, _) = self.0.tensor(name).unwrap().data().as_chunks::<4>();
        words.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
    }

    fn u32s(&self, name: &str) -> Vec<u32> {
        let (words, _) = self.0.tensor(name).unwrap().data().as_chunks::<4>();
        words.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    /// `[kv_heads, tokens, head_dim]` as rows of `kv_heads · head_dim`.
    fn rows(&self, name: &str) -> Vec<f32> {
        let data = self.f16s(name);
        let head = |t: usize, h: usize| data[(h * TOKENS + t) * HEAD_DIM..][..HEAD_DIM].iter();
        let row = |t| (0..KV_HEADS).flat_map(move |h| head(t, h));
        (0..TOKENS).flat_map(row).map(|x| x.to_f32()).collect()
    }
}

fn spec(config: &CacheConfig) -> PoolSpec {
    let layer = LayerSpec::new(config, KV_HEADS, HEAD_DIM);
    PoolSpec::for_context(config.clone(), vec![layer], 1, TOKENS).unwrap()
}

/// Runs one case, the generated tokens in steps of `cut`, and returns all outputs and the cache.
fn run<B: CacheBackend>(
    backend: &B,
    golden: &Golden,
    config: &CacheConfig,
    cut: usize,
) -> (Vec<f32>, CanonicalLayer) {
    let queries: Vec<f32> = golden.f16s("q").iter().map(|x| x.to_f32()).collect();
    let (keys, values) = (golden.rows("k"), golden.rows("v"));
    let spec = spec(config);
    let mut cache = backend.create_cache(&spec).unwrap();
    let mut state = CacheState::new(spec);
    let sequence = state.create_sequence().unwrap();
    state.begin_prompt(sequence, PROMPT).unwrap();
    let attention = Attention::new(QUERY_HEADS, 1.0 / (HEAD_DIM as f32).sqrt());

    let mut plan = StepPlan::default();
    let mut out = vec![0.0; TOKENS * QUERY_HEADS * HEAD_DIM];
    let mut begin = 0;
    while begin < TOKENS {
        let tokens = if begin == 0 { PROMPT } else { cut.min(TOKENS - begin) };
        let upload = |data: &[f32], heads: usize| {
            let width = heads * HEAD_DIM;
            backend.upload(tokens, width, &data[begin * width..][..tokens * width]).unwrap()
        };
        let (q, k, v) =
            (upload(&queries, QUERY_HEADS), upload(&keys, KV_HEADS), upload(&values, KV_HEADS));
        state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
        backend.begin_step(&mut cache, &plan).unwrap();
        backend.append(&mut cache, 0, &plan, &k, &v).unwrap();
        backend.quantize(&mut cache, 0, &plan).unwrap();
        let result = backend.attend(&cache, 0, &plan, &attention, &q).unwrap();
        backend.release(&mut cache, 0, &plan).unwrap();
        let width = QUERY_HEADS * HEAD_DIM;
        backend.read(&result, &mut out[begin * width..][..tokens * width]).unwrap();
        begin += tokens;
    }
    let layer = backend.export(&cache, 0, &state.layout(sequence).unwrap()).unwrap();
    (out, layer)
}

#[test]
fn reference_equals_the_numpy_simulation() {
    // The simulation sums in f64; 264 terms of f32 with weights that sum to 1.
    assert_eq!(equals_the_simulation(&CpuRef, 2e-5), 0);
}

#[test]
fn cpu_equals_the_numpy_simulation() {
    for isa in Isa::available() {
        // Operands `q∘s` of about 0.5 are rounded to 1/32512 of the largest (1/16256 at 8 bits): with 64 channels a
        // logit's standard deviation is 8e-5, and outputs average over few tokens.
        assert_eq!(equals_the_simulation(&Cpu::with_isa(2, isa).unwrap(), 2e-4), 0);
    }
}

/// Outputs of every row, and the packed bytes at the end; the number of cases that are not
/// supported.
fn equals_the_simulation<B: CacheBackend>(backend: &B, tolerance: f32) -> usize {
    let golden = Golden(SafeTensors::deserialize(GOLDEN).unwrap());
    let mut skipped = 0;
    let base = || CacheConfig::builder().group_size(32).residual_length(64);
    for (case, config) in [
        ("window", base()),
        ("sinks", base().sink_length(4)),
        ("block", base().value_residual(ValueResidual::Block)),
        ("k4v2", base().key(Format::KIVI4)),
        ("promoted", base().key(Format::KIVI2.promote(0.25).unwrap())),
        ("promoted_sinks", base().key(Format::KIVI2.promote(0.125).unwrap()).sink_length(4)),
    ] {
        let config = config.build().unwrap();
        if let Err(reason @ Error::Unsupported { .. }) = backend.create_cache(&spec(&config)) {
            println!("skipped {case}: {reason}");
            skipped += 1;
            continue;
        }
        for cut in [1, 7, 64, TOKENS] {
            let (out, layer) = run(backend, &golden, &config, cut);
            let expected = [golden.f32s("prompt_out"), golden.f32s(&format!("{case}.out"))];
            for (i, (found, expected)) in out.iter().zip(expected.concat()).enumerate() {
                let row = i / (QUERY_HEADS * HEAD_DIM);
                assert!(
                    (found - expected).abs() < tolerance,
                    "{case}, cut {cut}, row {row}: {found} {expected}"
                );
            }
            let keys = layer.packed_keys.unwrap();
            assert_eq!(keys.codes, golden.u32s(&format!("{case}.k_codes")), "{case}");
            assert_eq!(keys.scales, golden.f16s(&format!("{case}.k_scale")), "{case}");
            assert_eq!(keys.zeros, golden.f16s(&format!("{case}.k_zero")), "{case}");
            assert_eq!(keys.promoted.is_some(), case.starts_with("promoted"));
            if let Some(promoted) = keys.promoted {
                assert_eq!(promoted.mask, golden.u32s(&format!("{case}.k_mask")), "{case}");
                assert_eq!(promoted.lo, golden.u32s(&format!("{case}.k_lo")), "{case}");
            }
            let values = layer.packed_values.unwrap();
            assert_eq!(values.codes, golden.u32s(&format!("{case}.v_codes")), "{case}");
            assert_eq!(values.scales, golden.f16s(&format!("{case}.v_scale")), "{case}");
            assert_eq!(values.zeros, golden.f16s(&format!("{case}.v_zero")), "{case}");
        }
    }
    skipped
}
