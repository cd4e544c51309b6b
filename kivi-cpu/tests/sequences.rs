//! Operations on cached sequences: taking tokens back, forks, moving between backends, reuse of
//! memory, damage that stays where it is. Each on the reference and on the CPU backend.

use kivi_core::{
    Attention, Bits, CacheBackend, CacheConfig, CacheState, Format, LayerSpec, PoolSpec,
    SequenceId, StepPlan, StepRequest, memory::MeasuredBytes,
};
use kivi_cpu::Cpu;
use kivi_cpu_ref::CpuRef;
use kivi_cpu_ref::parity::{Case, Sequence, SequenceData};

const KV_HEADS: usize = 2;
const HEAD_GROUP: usize = 3;
const HEAD_DIM: usize = 64;

/// A pool of one layer and what goes into it.
struct Pool<'b, B: CacheBackend> {
    backend: &'b B,
    state: CacheState,
    cache: B::Cache,
}

impl<'b, B: CacheBackend> Pool<'b, B> {
    fn new(backend: &'b B, config: &CacheConfig, window: Option<usize>) -> Self {
        let mut layer = LayerSpec::new(config, KV_HEADS, HEAD_DIM);
        layer.window = window;
        let spec = PoolSpec::for_context(config.clone(), vec![layer], 3, 1024).unwrap();
        let cache = backend.create_cache(&spec).unwrap();
        Self { backend, state: CacheState::new(spec), cache }
    }

    /// Appends the tokens of `data` at the sequence's next positions, `cut` at a time, and returns
    /// their outputs.
    fn append(
        &mut self,
        sequence: SequenceId,
        data: &SequenceData,
        count: usize,
        cut: usize,
    ) -> Vec<f32> {
        let attention = Attention::new(KV_HEADS * HEAD_GROUP, 0.125);
        let width = KV_HEADS * HEAD_DIM;
        let mut outputs = Vec::new();
        let mut plan = StepPlan::default();
        let mut left = count;
        while left > 0 {
            let tokens = left.min(cut);
            left -= tokens;
            self.state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
            let at = plan.sequences[0].positions();
            let upload = |data: &[f32], width: usize| {
                self.backend.upload(tokens, width, &data[at.start * width..at.end * width]).unwrap()
            };
            let queries = upload(&data.queries, width * HEAD_GROUP);
            let (keys, values) = (upload(&data.keys, width), upload(&data.values, width));
            self.backend.begin_step(&mut self.cache, &plan).unwrap();
            self.backend.append(&mut self.cache, 0, &plan, &keys, &values).unwrap();
            self.backend.quantize(&mut self.cache, 0, &plan).unwrap();
            let out = self.backend.attend(&self.cache, 0, &plan, &attention, &queries).unwrap();
            self.backend.release(&mut self.cache, 0, &plan).unwrap();
            let start = outputs.len();
            outputs.resize(start + tokens * width * HEAD_GROUP, f32::NAN);
            self.backend.read(&out, &mut outputs[start..]).unwrap();
        }
        outputs
    }

    fn export(&self, sequence: SequenceId) -> kivi_core::CanonicalLayer {
        self.backend.export(&self.cache, 0, &self.state.layout(sequence).unwrap()).unwrap()
    }
}

fn data(seed: u64, tokens: usize) -> SequenceData {
    let mut case = Case::new(CacheConfig::builder().build().unwrap());
    (case.kv_heads, case.head_group, case.head_dim) = (KV_HEADS, HEAD_GROUP, HEAD_DIM);
    case.seed = seed;
    SequenceData::new(&case, 0, Sequence { prompt: tokens, generated: 0 })
}

/// `first` up to `tokens`, then `second`.
fn spliced(first: &SequenceData, second: &SequenceData, tokens: usize) -> SequenceData {
    let splice =
        |a: &[f32], b: &[f32], width: usize| [&a[..tokens * width], &b[tokens * width..]].concat();
    let width = KV_HEADS * HEAD_DIM;
    SequenceData {
        queries: splice(&first.queries, &second.queries, width * HEAD_GROUP),
        keys: splice(&first.keys, &second.keys, width),
        values: splice(&first.values, &second.values, width),
    }
}

fn config() -> kivi_core::CacheConfig {
    let builder = CacheConfig::builder().residual_length(64).sink_length(4);
    builder.rollback_length(8).build().unwrap()
}

/// Runs a generic function on both backends.
macro_rules! on_both {
    ($function:ident) => {
        $function(&CpuRef);
        $function(&Cpu::new(2).unwrap());
    };
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn truncation<B: CacheBackend>(backend: &B) {
    let (first, second) = (data(1, 400), data(2, 400));
    // Around block boundaries at 4 + 64·i, speculating up to 8 tokens and taking some back.
    for (tokens, wrong) in [(60, 8), (67, 3), (68, 8), (130, 5), (132, 1), (135, 8), (200, 7)] {
        let mixed = spliced(&first, &second, tokens);
        let mut pool = Pool::new(backend, &config(), None);
        let sequence = pool.state.create_sequence().unwrap();
        pool.append(sequence, &first, tokens + wrong, 1);
        pool.state.truncate(sequence, tokens).unwrap();
        let found = pool.append(sequence, &mixed, 80, 4);

        let mut plain = Pool::new(backend, &config(), None);
        let sequence_b = plain.state.create_sequence().unwrap();
        plain.append(sequence_b, &mixed, tokens, 1);
        let expected = plain.append(sequence_b, &mixed, 80, 1);
        assert_eq!(bits(&found), bits(&expected), "{tokens} tokens, {wrong} taken back");
        assert_eq!(pool.export(sequence), plain.export(sequence_b));
    }
}

/// Speculation, round after round: eight tokens forward, seven back.
fn speculation<B: CacheBackend>(backend: &B) {
    let (right, wrong) = (data(21, 500), data(22, 500));
    let mut pool = Pool::new(backend, &config(), None);
    let sequence = pool.state.create_sequence().unwrap();
    let mut found = pool.append(sequence, &right, 100, 1);
    for tokens in 100..300 {
        let drafted = spliced(&right, &wrong, tokens + 1);
        let rows = pool.append(sequence, &drafted, 8, 8);
        found.extend_from_slice(&rows[..rows.len() / 8]);
        pool.state.truncate(sequence, tokens + 1).unwrap();
    }
    let mut plain = Pool::new(backend, &config(), None);
    let other = plain.state.create_sequence().unwrap();
    let expected = plain.append(other, &right, 300, 1);
    assert!(bits(&found) == bits(&expected));
    // Token 307 was there once, so copies reach back to what 299 tokens need, even after one more.
    assert!(pool.state.truncate(sequence, 298).is_err());
    pool.append(sequence, &right, 1, 1);
    assert!(pool.state.truncate(sequence, 298).is_err());
    pool.state.truncate(sequence, 299).unwrap();
}

#[test]
fn rejected_drafts_leave_no_trace() {
    on_both!(speculation);
}

#[test]
fn tokens_taken_back_leave_no_trace() {
    on_both!(truncation);
}

fn forks<B: CacheBackend>(backend: &B) {
    let (first, second) = (data(3, 400), data(4, 400));
    for tokens in [3, 70, 140, 200] {
        let mixed = spliced(&first, &second, tokens);
        let mut pool = Pool::new(backend, &config(), None);
        let original = pool.state.create_sequence().unwrap();
        pool.append(original, &first, tokens, 1);
        let fork = pool.state.fork(original).unwrap();
        backend
            .copy_slot(&mut pool.cache, original.slot(), &pool.state.layout(fork).unwrap())
            .unwrap();
        // In turns, so that each writes to what the other shares.
        let (mut found_a, mut found_b) = (Vec::new(), Vec::new());
        for _ in 0..10 {
            found_a.extend(pool.append(original, &first, 9, 3));
            found_b.extend(pool.append(fork, &mixed, 9, 2));
        }
        for (data, found) in [(&first, found_a), (&mixed, found_b)] {
            let mut plain = Pool::new(backend, &config(), None);
            let sequence = plain.state.create_sequence().unwrap();
            plain.append(sequence, data, tokens, 1);
            let expected = plain.append(sequence, data, 90, 1);
            assert_eq!(bits(&found), bits(&expected), "fork after {tokens} tokens");
        }
        pool.state.remove(original).unwrap();
        pool.state.remove(fork).unwrap();
        assert_eq!(pool.state.used_pages(0), 0);
    }
}

#[test]
fn forks_do_not_see_each_other() {
    on_both!(forks);
}

fn moves<A: CacheBackend, B: CacheBackend>(from: &A, to: &B) {
    let data = data(5, 400);
    for (key, value) in [
        (Format::KIVI2, Format::KIVI2),
        (Format::KIVI4, Format::KIVI8),
        (Format::new(Some(Bits::Two), kivi_core::StoreDtype::Bf16), Format::F32),
        (Format::BF16, Format::F16),
    ] {
        let builder = CacheConfig::builder().key(key).value(value).sink_length(4);
        let config = builder.residual_length(64).build().unwrap();
        for tokens in [2, 67, 68, 200] {
            let mut pool = Pool::new(from, &config, None);
            let sequence = pool.state.create_sequence().unwrap();
            pool.append(sequence, &data, tokens, 1);
            let exported = pool.export(sequence);

            let mut other = Pool::new(to, &config, None);
            let adopted = other.state.adopt_sequence(tokens).unwrap();
            let layout = other.state.layout(adopted).unwrap();
            to.import(&mut other.cache, 0, &layout, &exported).unwrap();
            assert_eq!(other.export(adopted), exported, "{key}/{value}, {tokens} tokens");
            let (a, b) = (pool.append(sequence, &data, 70, 1), other.append(adopted, &data, 70, 1));
            assert_eq!(other.export(adopted), pool.export(sequence));
            let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0f32, f32::max);
            // One of the two rounds the factors of codes to 16 bits.
            assert!(worst < 1e-3, "{key}/{value}, {tokens} tokens: {worst}");
            // Contents of another length do not fit.
            let longer = other.state.adopt_sequence(tokens + 64).unwrap();
            let layout = other.state.layout(longer).unwrap();
            assert!(to.import(&mut other.cache, 0, &layout, &exported).is_err());
        }
    }
}

#[test]
fn sequences_move_between_backends() {
    let cpu = Cpu::new(2).unwrap();
    moves(&cpu, &CpuRef);
    moves(&CpuRef, &cpu);
    moves(&cpu, &cpu);
}

fn reuse<B: CacheBackend>(backend: &B) {
    let (first, second) = (data(6, 300), data(7, 300));
    let mut pool = Pool::new(backend, &config(), None);
    let old = pool.state.create_sequence().unwrap();
    pool.append(old, &first, 250, 50);
    let allocated = backend.measure(&pool.cache).allocated;
    pool.state.remove(old).unwrap();
    let new = pool.state.create_sequence().unwrap();
    let found = pool.append(new, &second, 250, 1);
    let mut plain = Pool::new(backend, &config(), None);
    let sequence = plain.state.create_sequence().unwrap();
    assert_eq!(bits(&found), bits(&plain.append(sequence, &second, 250, 1)));
    assert_eq!(backend.measure(&pool.cache).allocated, allocated, "memory is used again");
    let empty = MeasuredBytes { allocated, ..MeasuredBytes::default() };
    pool.state.remove(new).unwrap();
    pool.state.create_sequence().unwrap();
    let next = pool.state.create_sequence().unwrap();
    pool.append(next, &second, 1, 1);
    let measured = backend.measure(&pool.cache);
    assert_eq!(measured.codes + measured.scales_and_zeros, empty.codes, "nothing is left behind");
}

/// Pages that an adopted sequence takes over from a removed one keep what was imported.
fn adoption<B: CacheBackend>(backend: &B) {
    let data = data(23, 300);
    for format in [Format::F16, Format::KIVI2] {
        let config = CacheConfig::builder().key(format).value(format).build().unwrap();
        let mut source = Pool::new(backend, &config, None);
        let original = source.state.create_sequence().unwrap();
        source.append(original, &data, 200, 1);

        let mut pool = Pool::new(backend, &config, None);
        let old = pool.state.create_sequence().unwrap();
        pool.append(old, &data, 250, 250);
        pool.state.remove(old).unwrap();
        let adopted = pool.state.adopt_sequence(200).unwrap();
        let layout = pool.state.layout(adopted).unwrap();
        backend.import(&mut pool.cache, 0, &layout, &source.export(original)).unwrap();
        let found = pool.append(adopted, &data, 50, 1);
        assert_eq!(bits(&found), bits(&source.append(original, &data, 50, 1)));
        let (a, b) = (backend.measure(&pool.cache), backend.measure(&source.cache));
        assert_eq!(a.in_use(), b.in_use(), "{format}");
    }
}

#[test]
fn an_adopted_sequence_keeps_its_pages() {
    on_both!(adoption);
}

#[test]
fn a_slot_is_clean_for_its_next_sequence() {
    on_both!(reuse);
}

fn damage<B: CacheBackend>(backend: &B) {
    let config = CacheConfig::builder().residual_length(32).build().unwrap();
    let width = KV_HEADS * HEAD_DIM;
    let clean = data(8, 300);
    let mut bad = clean.clone();
    // Token 40: a NaN in a key of kv head 0, an infinity in a value of kv head 1.
    bad.keys[40 * width + 5] = f32::NAN;
    bad.values[40 * width + HEAD_DIM + 9] = f32::INFINITY;
    let heads = width * HEAD_GROUP;

    // Once the window has passed the group of the bad token, nothing is left of it.
    let run = |data: &SequenceData| {
        let mut pool = Pool::new(backend, &config, Some(80));
        let sequence = pool.state.create_sequence().unwrap();
        let out = pool.append(sequence, data, 300, 1);
        (out, pool.state.layout(sequence).unwrap())
    };
    let ((found, _), (expected, _)) = (run(&bad), run(&clean));
    let row = |out: &[f32], t: usize| bits(&out[t * heads..(t + 1) * heads]);
    for t in 0..40 {
        assert_eq!(row(&found, t), row(&expected, t), "row {t} came before the damage");
    }
    let seen = &found[100 * heads..101 * heads];
    assert!(seen[..HEAD_GROUP * HEAD_DIM].iter().all(|x| x.is_nan()), "a NaN key is not hidden");
    // Values are quantized in groups of 32 channels of one token: only channels 0 to 31 are gone.
    let value_head = &seen[HEAD_GROUP * HEAD_DIM..][..HEAD_DIM];
    assert!(value_head[..32].iter().all(|x| x.is_nan()));
    assert!(value_head[32..].iter().all(|x| x.is_finite()));
    for t in 40 + 32 + 80..300 {
        assert_eq!(row(&found, t), row(&expected, t), "row {t} cannot see the damage");
    }
}

#[test]
fn damage_stays_in_its_group() {
    on_both!(damage);
}

fn saturation<B: CacheBackend>(backend: &B) {
    let config = CacheConfig::builder().residual_length(32).build().unwrap();
    let mut data = data(9, 100);
    (data.keys[3], data.values[7]) = (1e6, -1e6);
    let mut pool = Pool::new(backend, &config, None);
    let sequence = pool.state.create_sequence().unwrap();
    pool.append(sequence, &data, 1, 1);
    assert_eq!(backend.saturated(&pool.cache), 2);
    let exported = pool.export(sequence);
    assert_eq!((exported.full.keys.data[3], exported.full.values.data[7]), (65504.0, -65504.0));
}

#[test]
fn overflow_saturates_and_is_counted() {
    on_both!(saturation);
}

/// The first rows of a batch, bit by bit, whatever the cut, the batch and the number of threads.
#[test]
fn results_do_not_depend_on_the_cut() {
    let data = data(10, 700);
    let mates = data_of_mates();
    let run = |threads: usize, cut: usize, with_mates: bool| {
        let cpu = Cpu::new(threads).unwrap();
        let config = CacheConfig::builder().residual_length(64).build().unwrap();
        let mut pool = Pool::new(&cpu, &config, None);
        if with_mates {
            for mate in &mates {
                let id = pool.state.create_sequence().unwrap();
                pool.append(id, mate, 100, 33);
            }
        }
        let sequence = pool.state.create_sequence().unwrap();
        bits(&pool.append(sequence, &data, 700, cut))
    };
    let expected = run(1, 1, false);
    for (threads, cut, with_mates) in [(2, 1, false), (3, 7, true), (1, 64, true), (2, 700, false)]
    {
        assert!(run(threads, cut, with_mates) == expected, "{threads} threads, steps of {cut}");
    }
}

fn data_of_mates() -> [SequenceData; 2] {
    [data(11, 100), data(12, 100)]
}

/// Rings get the capacity of a step when its tokens come, layer by layer: a long prompt does not lie
/// in the rings of all layers at once, and a step without its tokens is an error.
#[test]
fn a_prompt_lies_in_one_layers_ring_at_a_time() {
    let (cpu, config) = (Cpu::new(2).unwrap(), config());
    let (layers, tokens, width) = (8, 1024, KV_HEADS * HEAD_DIM);
    let spec = vec![LayerSpec::new(&config, KV_HEADS, HEAD_DIM); layers];
    let spec = PoolSpec::for_context(config, spec, 1, tokens).unwrap();
    let mut cache = cpu.create_cache(&spec).unwrap();
    let mut state = CacheState::new(spec);
    let sequence = state.create_sequence().unwrap();
    let mut plan = StepPlan::default();
    state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
    let upload = |width: usize| cpu.upload(tokens, width, &vec![1.0; tokens * width]).unwrap();
    let (keys, queries) = (upload(width), upload(width * HEAD_GROUP));
    cpu.begin_step(&mut cache, &plan).unwrap();
    let attention = Attention::new(KV_HEADS * HEAD_GROUP, 0.125);
    let early = cpu.attend(&cache, 0, &plan, &attention, &queries).unwrap_err();
    assert!(early.to_string().contains("append"), "{early}");
    let early = cpu.quantize(&mut cache, 0, &plan).unwrap_err();
    assert!(early.to_string().contains("append"), "{early}");
    let before = cpu.measure(&cache).allocated;
    // Keys and values, of two bytes.
    let prompt = 2 * 2 * tokens * width;
    for layer in 0..layers {
        cpu.append(&mut cache, layer, &plan, &keys, &keys).unwrap();
        let peak = cpu.measure(&cache).allocated - before;
        assert!(peak > prompt * 9 / 10 && peak < 2 * prompt, "{layer}: {peak} of {prompt}");
        cpu.quantize(&mut cache, layer, &plan).unwrap();
        cpu.attend(&cache, layer, &plan, &attention, &queries).unwrap();
        cpu.release(&mut cache, layer, &plan).unwrap();
    }
}
