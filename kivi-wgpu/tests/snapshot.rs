//! Snapshots of the reference on a GPU: restored there, they are the same to the last bit, and so is
//! what comes back.

use kivi_core::{
    Bits, CacheBackend, CacheConfig, CacheState, Format, KeyValue, LayerSpec, ModelIdentity,
    PoolSpec, Rope, RopeStyle, SequenceId, Snapshot, StepPlan, StepRequest, StoreDtype,
    ValueResidual,
};
use kivi_cpu_ref::CpuRef;
use kivi_wgpu::{OpenError, Wgpu, WgpuOptions, open};

const KV_HEADS: usize = 2;
/// Not a multiple of the group, so that value rows end in a short one.
const HEAD_DIM: usize = 72;
const WIDTH: usize = KV_HEADS * HEAD_DIM;

fn device() -> Option<Wgpu> {
    match open(&WgpuOptions::default()) {
        Err(error @ OpenError::NoDevice) => {
            println!("skipped: {error}");
            None
        }
        other => Some(other.unwrap_or_else(|error| panic!("{error}"))),
    }
}

struct Pool<B: CacheBackend> {
    state: CacheState,
    cache: B::Cache,
}

fn pool<B: CacheBackend>(backend: &B, config: &CacheConfig, layers: &[LayerSpec]) -> Pool<B> {
    let spec = PoolSpec::for_context(config.clone(), layers.to_vec(), 2, 512).unwrap();
    let cache = backend.create_cache(&spec).unwrap();
    Pool { state: CacheState::new(spec), cache }
}

/// Appends made-up tokens; nothing has to be read for a snapshot.
fn append<B: CacheBackend>(backend: &B, pool: &mut Pool<B>, sequence: SequenceId, tokens: usize) {
    let mut plan = StepPlan::default();
    pool.state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
    let first = plan.sequences[0].before.tokens * WIDTH;
    let rows = |salt: f32| -> Vec<f32> {
        (first..first + tokens * WIDTH).map(|i| (i as f32 * 0.37 + salt).sin()).collect()
    };
    backend.begin_step(&mut pool.cache, &plan).unwrap();
    for layer in 0..pool.state.spec().layers().len() {
        let [keys, values] = [1.2, 2.3]
            .map(|salt| backend.upload(tokens, WIDTH, &rows(salt + layer as f32)).unwrap());
        backend.append(&mut pool.cache, layer, &plan, &keys, &values).unwrap();
        backend.quantize(&mut pool.cache, layer, &plan).unwrap();
        backend.release(&mut pool.cache, layer, &plan).unwrap();
    }
}

/// Name, configuration, and the formats of layers that differ from it.
fn caches() -> Vec<(&'static str, CacheConfig, Vec<KeyValue<Format>>)> {
    let small = || CacheConfig::builder().residual_length(64);
    let both = |format: Format| small().key(format).value(format);
    let promoted = Format::KIVI2.promote(0.25).unwrap();
    let bf16 = Format::new(Some(Bits::Four), StoreDtype::Bf16);
    let mixed = vec![
        KeyValue::new(promoted, Format::KIVI4),
        KeyValue::new(Format::F16, Format::KIVI2),
        KeyValue::new(Format::KIVI8, Format::F32),
    ];
    let uniform = |builder: kivi_core::CacheConfigBuilder| (builder.build().unwrap(), vec![]);
    [
        ("kivi2", uniform(both(Format::KIVI2))),
        ("kivi4", uniform(both(Format::KIVI4))),
        ("kivi8", uniform(both(Format::KIVI8))),
        ("f16", uniform(both(Format::F16))),
        ("bf16", uniform(both(Format::BF16))),
        ("f32", uniform(both(Format::F32))),
        ("kivi2+", uniform(small().key(promoted).value(Format::KIVI2).sink_length(32))),
        ("over bf16", uniform(both(bf16))),
        ("blocks", uniform(both(Format::KIVI2).value_residual(ValueResidual::Block))),
        ("rollback", uniform(both(Format::KIVI2).rollback_length(40).sink_length(3))),
        ("mixed layers", (small().sink_length(5).build().unwrap(), mixed)),
    ]
    .into_iter()
    .map(|(name, (config, formats))| (name, config, formats))
    .collect()
}

#[test]
fn snapshots_of_the_reference_are_the_same_on_the_gpu() {
    let Some(gpu) = device() else { return };
    for (what, config, formats) in caches() {
        let mut layers = vec![LayerSpec::new(&config, KV_HEADS, HEAD_DIM); 2];
        if !formats.is_empty() {
            let layer = layers[0].clone();
            let of = |format| LayerSpec { format, ..layer.clone() };
            layers = formats.into_iter().map(of).collect();
        }
        let rope = Rope { style: RopeStyle::Halves, frequencies: vec![1.0], attention_factor: 1.0 };
        let key_bias_beside = vec![false; layers.len()];
        let model = ModelIdentity { fingerprint: [7; 32], rope, key_bias_beside };
        for length in [1, 64, 201] {
            let mut own = pool(&CpuRef, &config, &layers);
            let sequence = own.state.create_sequence().unwrap();
            append(&CpuRef, &mut own, sequence, length);
            let tokens: Vec<u32> = (0..length as u32).collect();
            let place = (&own.cache, &own.state);
            let snapshot =
                Snapshot::of_sequence(&CpuRef, place, sequence, &model, &tokens).unwrap();

            // Where pages have been used before.
            let mut other = pool(&gpu, &config, &layers);
            let gone = other.state.create_sequence().unwrap();
            append(&gpu, &mut other, gone, 130);
            other.state.remove(gone).unwrap();
            let place = (&mut other.cache, &mut other.state);
            let restored = snapshot.restore(&gpu, place, &model).unwrap();
            let place = (&other.cache, &other.state);
            let back = Snapshot::of_sequence(&gpu, place, restored, &model, &tokens).unwrap();
            assert!(back == snapshot, "{what}, {length} tokens");

            // What is appended on top is quantized from the same full-precision copies.
            append(&CpuRef, &mut own, sequence, 70);
            append(&gpu, &mut other, restored, 70);
            let layout = own.state.layout(sequence).unwrap();
            let gpu_layout = other.state.layout(restored).unwrap();
            for layer in 0..layers.len() {
                let expected = CpuRef.export(&own.cache, layer, &layout).unwrap();
                let found = gpu.export(&other.cache, layer, &gpu_layout).unwrap();
                assert!(found == expected, "{what}, {length} tokens, layer {layer}, 70 later");
            }
        }
    }
}
