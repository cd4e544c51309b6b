//! A snapshot whose import fails half way leaves nothing behind.

use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, CanonicalLayer, Capabilities, Error,
    LayerSpec, ModelIdentity, PoolSpec, Result, Rope, RopeStyle, SequenceId, SequenceLayout,
    Snapshot, StepPlan, StepRequest, memory::MeasuredBytes,
};
use kivi_cpu_ref::CpuRef;

type Buffer = <CpuRef as CacheBackend>::Buffer;
type Cache = <CpuRef as CacheBackend>::Cache;

const LAYERS: usize = 3;
const WIDTH: usize = 2 * 32;

/// The reference, whose device fails when layer 1 is imported.
struct Failing;

impl CacheBackend for Failing {
    type Buffer = Buffer;
    type Cache = Cache;

    fn capabilities(&self) -> Capabilities {
        CpuRef.capabilities()
    }

    fn upload(&self, rows: usize, width: usize, data: &[f32]) -> Result<Buffer> {
        CpuRef.upload(rows, width, data)
    }

    fn read(&self, buffer: &Buffer, out: &mut [f32]) -> Result<()> {
        CpuRef.read(buffer, out)
    }

    fn shape(&self, buffer: &Buffer) -> [usize; 2] {
        CpuRef.shape(buffer)
    }

    fn create_cache(&self, spec: &PoolSpec) -> Result<Cache> {
        CpuRef.create_cache(spec)
    }

    fn begin_step(&self, cache: &mut Cache, plan: &StepPlan) -> Result<()> {
        CpuRef.begin_step(cache, plan)
    }

    fn append(
        &self,
        cache: &mut Cache,
        layer: usize,
        plan: &StepPlan,
        keys: &Buffer,
        values: &Buffer,
    ) -> Result<()> {
        CpuRef.append(cache, layer, plan, keys, values)
    }

    fn quantize(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        CpuRef.quantize(cache, layer, plan)
    }

    fn attend(
        &self,
        cache: &Cache,
        layer: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &Buffer,
    ) -> Result<Buffer> {
        CpuRef.attend(cache, layer, plan, attention, queries)
    }

    fn release(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        CpuRef.release(cache, layer, plan)
    }

    fn copy_slot(&self, cache: &mut Cache, from: usize, to: &SequenceLayout) -> Result<()> {
        CpuRef.copy_slot(cache, from, to)
    }

    fn export(
        &self,
        cache: &Cache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer> {
        CpuRef.export(cache, layer, layout)
    }

    fn import(
        &self,
        cache: &mut Cache,
        layer: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        if layer == 1 {
            let source = "no memory left".into();
            return Err(Error::Device { backend: "failing", operation: "import", source });
        }
        CpuRef.import(cache, layer, layout, contents)
    }

    fn measure(&self, cache: &Cache) -> MeasuredBytes {
        CpuRef.measure(cache)
    }

    fn saturated(&self, cache: &Cache) -> u64 {
        CpuRef.saturated(cache)
    }
}

fn pool() -> (CacheState, Cache) {
    let config = CacheConfig::builder().residual_length(32).sink_length(3).build().unwrap();
    let layer = LayerSpec::new(&config, 2, 32);
    let spec = PoolSpec::for_context(config, vec![layer; LAYERS], 2, 200).unwrap();
    let cache = CpuRef.create_cache(&spec).unwrap();
    (CacheState::new(spec), cache)
}

/// Appends made-up tokens and returns what the last layer attends to.
fn append(
    (state, cache): &mut (CacheState, Cache),
    sequence: SequenceId,
    tokens: usize,
) -> Vec<f32> {
    let mut plan = StepPlan::default();
    state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
    let first = plan.sequences[0].before.tokens * WIDTH;
    let rows = |salt: f32| -> Vec<f32> {
        (first..first + tokens * WIDTH).map(|i| (i as f32 * 0.37 + salt).sin()).collect()
    };
    CpuRef.begin_step(cache, &plan).unwrap();
    let mut out = vec![0.0; tokens * WIDTH];
    for layer in 0..LAYERS {
        let [queries, keys, values] = [0.1, 1.2, 2.3]
            .map(|salt| CpuRef.upload(tokens, WIDTH, &rows(salt + layer as f32)).unwrap());
        CpuRef.append(cache, layer, &plan, &keys, &values).unwrap();
        CpuRef.quantize(cache, layer, &plan).unwrap();
        let attention = Attention::new(2, 0.2);
        let attended = CpuRef.attend(cache, layer, &plan, &attention, &queries).unwrap();
        CpuRef.release(cache, layer, &plan).unwrap();
        CpuRef.read(&attended, &mut out).unwrap();
    }
    out
}

#[test]
fn an_import_that_fails_leaves_nothing_behind() {
    let rope = Rope { style: RopeStyle::Halves, frequencies: vec![1.0], attention_factor: 1.0 };
    let model = ModelIdentity { fingerprint: [7; 32], rope, key_bias_beside: vec![false; LAYERS] };
    let mut pool = pool();
    let sequence = pool.0.create_sequence().unwrap();
    append(&mut pool, sequence, 80);
    let tokens: Vec<u32> = (0..80).collect();
    let snapshot =
        Snapshot::of_sequence(&CpuRef, (&pool.1, &pool.0), sequence, &model, &tokens).unwrap();
    let free = pool.0.free_pages(0);

    let (state, cache) = (&mut pool.0, &mut pool.1);
    let error = snapshot.restore(&Failing, (cache, state), &model).unwrap_err();
    assert!(matches!(error, Error::Device { operation: "import", .. }), "{error}");
    assert_eq!(pool.0.free_pages(0), free);
    let taken = pool.0.create_sequence().expect("the slot is free again");
    pool.0.remove(taken).unwrap();

    // The first sequence and a restored one go on alike.
    let (state, cache) = (&mut pool.0, &mut pool.1);
    let restored = snapshot.restore(&CpuRef, (cache, state), &model).unwrap();
    let [a, b] = [sequence, restored].map(|id| append(&mut pool, id, 40));
    assert_eq!(a, b);
}
