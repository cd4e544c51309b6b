//! Logits against f64, read off the weights: with values that are unit vectors, channel `j` of an output
//! is the softmax weight of token `j`, and differences of logits are logarithms of ratios of weights.

use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, Format, LayerSpec, PoolSpec, StepPlan,
    StepRequest,
};
use kivi_wgpu::{GpuOptions, OpenError, WgpuOptions, open};

/// Tokens and channels of the test: as many values as there are unit vectors.
const TOKENS: usize = 192;

/// A number between −1 and 1 that looks random.
fn noise(index: usize, seed: usize) -> f32 {
    let mut x = (index as u32).wrapping_mul(0x9E37_79B9) ^ (seed as u32).wrapping_mul(0x85EB_CA6B);
    for _ in 0..2 {
        x = (x ^ (x >> 15)).wrapping_mul(0x2C1B_3C6D);
    }
    (x ^ (x >> 13)) as f32 / u32::MAX as f32 * 2.0 - 1.0
}

/// Differences of logits to that of the last token, computed in f64 from the cache's own codes, and
/// those the backend used.
fn logits(key: Format, options: &WgpuOptions) -> Option<(Vec<f64>, Vec<f64>)> {
    let backend = match open(options) {
        Err(error @ OpenError::NoDevice) => {
            println!("skipped: {error}");
            return None;
        }
        other => other.unwrap(),
    };
    let config = CacheConfig::builder().key(key).value(Format::F32).residual_length(32).build();
    let config = config.unwrap();
    let layer = LayerSpec::new(&config, 1, TOKENS);
    let spec = PoolSpec::for_context(config, vec![layer], 1, TOKENS).unwrap();
    let (mut cache, mut state) =
        (backend.create_cache(&spec).unwrap(), CacheState::new(spec.clone()));
    let sequence = state.create_sequence().unwrap();
    // Keys with channels of very different size.
    let row = |token: usize| -> Vec<f32> {
        let size = |channel: usize| if channel.is_multiple_of(37) { 8.0 } else { 0.5 };
        (0..TOKENS).map(|c| size(c) * noise(token * TOKENS + c, 1)).collect()
    };
    let query: Vec<f32> = (0..TOKENS).map(|channel| noise(channel, 2)).collect();
    let mut output = vec![f32::NAN; TOKENS];
    for token in 0..TOKENS {
        let mut plan = StepPlan::default();
        state.plan(&[StepRequest { sequence, tokens: 1 }], &mut plan).unwrap();
        let mut unit = vec![0.0; TOKENS];
        unit[token] = 1.0;
        let keys = backend.upload(1, TOKENS, &row(token)).unwrap();
        let values = backend.upload(1, TOKENS, &unit).unwrap();
        let queries = backend.upload(1, TOKENS, &query).unwrap();
        backend.begin_step(&mut cache, &plan).unwrap();
        backend.append(&mut cache, 0, &plan, &keys, &values).unwrap();
        backend.quantize(&mut cache, 0, &plan).unwrap();
        if token == TOKENS - 1 {
            let attention = Attention::new(1, 0.25);
            let found = backend.attend(&cache, 0, &plan, &attention, &queries).unwrap();
            backend.read(&found, &mut output).unwrap();
        }
        backend.release(&mut cache, 0, &plan).unwrap();
    }
    let layout = state.layout(sequence).unwrap();
    let exported = backend.export(&cache, 0, &layout).unwrap();
    let packed = exported.packed_keys.unwrap();
    assert_eq!(packed.tokens, TOKENS, "the last token closes a block");
    let dequantized = backend.dequantize(&cache, 0, &layout).unwrap().keys;
    let mut kernel = vec![f32::NAN; TOKENS * TOKENS];
    backend.read(&dequantized, &mut kernel).unwrap();
    let exact = |token: usize| -> f64 {
        let product = |channel: usize| {
            let key = packed.dequantize(0, token, channel);
            assert!((key - kernel[token * TOKENS + channel]).abs() <= 1e-6 * key.abs().max(1.0));
            f64::from(query[channel]) * f64::from(key)
        };
        (0..TOKENS).map(product).sum::<f64>() * 0.25
    };
    // The row itself sees its own token, and the block it closes, in full precision or as codes as its
    // view says: the last block is left out.
    let last = TOKENS - 33;
    let found = |token: usize| f64::from(output[token]).ln() - f64::from(output[last]).ln();
    let range = 0..last;
    let exact_last = exact(last);
    let expected = range.clone().map(|token| exact(token) - exact_last).collect();
    Some((expected, range.map(found).collect()))
}

#[test]
fn logits_are_within_a_thousandth_of_the_largest() {
    let promoted = Format::KIVI2.promote(0.25).unwrap();
    for key in [Format::KIVI2, Format::KIVI4, Format::KIVI8, promoted] {
        for denormals in [false, true] {
            for wgsl in [false, true] {
                let gpu = GpuOptions { denormals: Some(denormals), ..GpuOptions::default() };
                let options = WgpuOptions { wgsl, gpu, ..WgpuOptions::default() };
                let Some((expected, found)) = logits(key, &options) else { return };
                let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
                let errors = expected.iter().zip(&found).map(|(a, b)| (a - b).abs());
                let worst = errors.fold(0.0, |max, x| if x > max || x.is_nan() { x } else { max });
                println!("{key}: error {worst:.1e} of {largest:.1}, wgsl {wgsl}");
                assert!(largest > 1.0 && largest < 60.0, "{largest}");
                assert!(worst <= 1e-3 * largest, "{key}: {worst} of {largest}");
            }
        }
    }
}
