//! Decode attention against an f64 evaluation of the same dequantized cache: `‖Δo‖₂/‖o‖₂` of every
//! head at most 1e-3, for every pair of widths, on every instruction set of this machine.

use half::f16;
use kivi_core::{
    Attention, CacheBackend, CacheConfig, CacheState, CanonicalLayer, Format, KeyValue, LayerSpec,
    PoolSpec, StepPlan, StepRequest,
};
use kivi_cpu::{Cpu, Isa};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};

const KV_HEADS: usize = 2;
const HEAD_GROUP: usize = 3;
const TOKENS: usize = 1500;
const BOUND: f64 = 1e-3;

/// Shapes of attention that stress different sums.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Independent normal keys, values and queries.
    Random,
    /// Key channels that are fifty times larger than the rest, as in real models.
    Outliers,
    /// One key matches the query, all others have no weight.
    OneHot,
    /// Queries so small that all weights are nearly equal, and outputs small beside their terms.
    NearUniform,
    /// The same, and all values of a token of one of two sizes: equal weights err alike.
    TwoScales,
}

const KINDS: [Kind; 5] =
    [Kind::Random, Kind::Outliers, Kind::OneHot, Kind::NearUniform, Kind::TwoScales];

struct Normal(ChaCha8Rng);

impl Normal {
    /// Sum of twelve uniform numbers, less 6.
    fn next(&mut self) -> f32 {
        (0..12).map(|_| self.0.next_u32() as f32 / 2f32.powi(32)).sum::<f32>() - 6.0
    }

    fn vector(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| self.next()).collect()
    }
}

struct Data {
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

fn data(kind: Kind, head_dim: usize) -> Data {
    let mut normal = Normal(ChaCha8Rng::seed_from_u64(7));
    let mut keys = normal.vector(TOKENS * KV_HEADS * head_dim);
    let mut values = normal.vector(TOKENS * KV_HEADS * head_dim);
    let mut queries = normal.vector(KV_HEADS * HEAD_GROUP * head_dim);
    match kind {
        Kind::Random => {}
        Kind::Outliers => {
            let outliers = keys.iter_mut().enumerate().filter(|(i, _)| i % head_dim % 21 == 3);
            outliers.for_each(|(_, k)| *k = 50.0 + 10.0 * *k);
        }
        Kind::OneHot => {
            for head in 0..KV_HEADS {
                let at = ((TOKENS / 3) * KV_HEADS + head) * head_dim;
                let query = &queries[head * HEAD_GROUP * head_dim..][..head_dim];
                for (k, q) in keys[at..at + head_dim].iter_mut().zip(query) {
                    *k = 4.0 * q;
                }
            }
        }
        Kind::NearUniform => queries.iter_mut().for_each(|q| *q *= 1e-3),
        Kind::TwoScales => {
            queries.fill(0.0);
            for (i, row) in values.chunks_mut(KV_HEADS * head_dim).enumerate() {
                let size = if i % 128 == 5 { 3.7 } else { 1.0 };
                row.iter_mut().for_each(|v| *v = size * v.signum() * (1.0 + (*v * 7.0).fract()));
                for (channel, v) in row.iter_mut().enumerate() {
                    // Both ends occur in every group, so that all scales of a size are equal.
                    match channel % 16 {
                        3 => *v = 2.0 * size,
                        7 => *v = -2.0 * size,
                        _ => {}
                    }
                }
            }
        }
    }
    Data { keys, values, queries }
}

/// The cache after `TOKENS` tokens, and what the last one's queries got.
struct Found {
    layer: CanonicalLayer,
    /// First position that the last row saw in full precision.
    view: KeyValue<usize>,
    out: Vec<f32>,
}

fn run(cpu: &Cpu, config: &CacheConfig, head_dim: usize, data: &Data) -> Found {
    let layer = LayerSpec::new(config, KV_HEADS, head_dim);
    let spec = PoolSpec::for_context(config.clone(), vec![layer], 1, TOKENS).unwrap();
    let mut cache = cpu.create_cache(&spec).unwrap();
    let mut state = CacheState::new(spec);
    let sequence = state.create_sequence().unwrap();
    let attention = Attention::new(KV_HEADS * HEAD_GROUP, 1.0 / (head_dim as f32).sqrt());
    let (width, query_width) = (KV_HEADS * head_dim, KV_HEADS * HEAD_GROUP * head_dim);
    let mut plan = StepPlan::default();
    let mut out = vec![0.0; query_width];
    for rows in [0..TOKENS - 1, TOKENS - 1..TOKENS] {
        let tokens = rows.len();
        let part = |x: &[f32]| {
            cpu.upload(tokens, width, &x[rows.start * width..rows.end * width]).unwrap()
        };
        state.plan(&[StepRequest { sequence, tokens }], &mut plan).unwrap();
        cpu.begin_step(&mut cache, &plan).unwrap();
        cpu.append(&mut cache, 0, &plan, &part(&data.keys), &part(&data.values)).unwrap();
        cpu.quantize(&mut cache, 0, &plan).unwrap();
        if tokens == 1 {
            let queries = cpu.upload(1, query_width, &data.queries).unwrap();
            let result = cpu.attend(&cache, 0, &plan, &attention, &queries).unwrap();
            cpu.read(&result, &mut out).unwrap();
        }
        cpu.release(&mut cache, 0, &plan).unwrap();
    }
    let layer = cpu.export(&cache, 0, &state.layout(sequence).unwrap()).unwrap();
    Found { layer, view: plan.sequences[0].views[0], out }
}

/// What the last row sees of keys or values, `[kv_heads, TOKENS, head_dim]`: codes up to `view`, and
/// from there on, as in the sinks, f16.
fn seen(found: &Found, head_dim: usize, data: &[f32], keys: bool) -> Vec<f64> {
    let (layer, sinks) = (&found.layer, found.layer.sinks.keys.tokens);
    let view = if keys { found.view.keys } else { found.view.values };
    let element = |i: usize| {
        let (head, token, channel) = (i / head_dim / TOKENS, i / head_dim % TOKENS, i % head_dim);
        let stored = data[(token * KV_HEADS + head) * head_dim + channel];
        if token < sinks || token >= view {
            return f16::from_f32(stored).to_f64();
        }
        let token = token - sinks;
        match (keys, &layer.packed_keys, &layer.packed_values) {
            (true, Some(keys), _) => keys.dequantize(head, token, channel).into(),
            (false, _, Some(values)) => values.dequantize(head, token, channel).into(),
            _ => f16::from_f32(stored).to_f64(),
        }
    };
    (0..KV_HEADS * TOKENS * head_dim).map(element).collect()
}

/// The largest relative error of a head.
fn worst(found: &Found, head_dim: usize, data: &Data) -> f64 {
    let keys = seen(found, head_dim, &data.keys, true);
    let values = seen(found, head_dim, &data.values, false);
    let heads = data.queries.chunks(head_dim).zip(found.out.chunks(head_dim)).enumerate();
    let error = |(head, (query, out)): (usize, (&[f32], &[f32]))| {
        let rows =
            head / HEAD_GROUP * TOKENS * head_dim..(head / HEAD_GROUP + 1) * TOKENS * head_dim;
        let logits = keys[rows.clone()].chunks(head_dim).map(|key| {
            let dot: f64 = key.iter().zip(query).map(|(k, &q)| k * f64::from(q)).sum();
            dot / (head_dim as f64).sqrt()
        });
        let logits: Vec<f64> = logits.collect();
        let largest = logits.iter().copied().fold(f64::MIN, f64::max);
        let total: f64 = logits.iter().map(|logit| (logit - largest).exp()).sum();
        let mut expected = vec![0.0; head_dim];
        for (logit, value) in logits.iter().zip(values[rows].chunks(head_dim)) {
            let weight = (logit - largest).exp() / total;
            expected.iter_mut().zip(value).for_each(|(sum, v)| *sum += weight * v);
        }
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        norm(&mut expected.iter().zip(out).map(|(e, &o)| e - f64::from(o)))
            / norm(&mut expected.iter().copied())
    };
    heads.map(error).fold(0.0, f64::max)
}

#[test]
fn every_head_is_within_a_thousandth() {
    let formats = [Format::KIVI2, Format::KIVI4, Format::KIVI8, Format::F16];
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        for kind in KINDS {
            let mut largest = 0f64;
            for key in formats {
                for value in formats {
                    let head_dim = if key == value { 128 } else { 64 };
                    let data = data(kind, head_dim);
                    let config = CacheConfig::builder().key(key).value(value).build().unwrap();
                    let found = worst(&run(&cpu, &config, head_dim, &data), head_dim, &data);
                    assert!(found <= BOUND, "{isa}, {kind:?}, {key}:{value}: {found:e}");
                    largest = largest.max(found);
                }
            }
            println!("{isa}: {kind:?}: relative error at most {largest:.1e}");
        }
    }
}

/// Keys with promoted channels, also where these do not fill whole words and the tail of both planes
/// is canonical.
#[test]
fn promoted_channels_are_as_accurate() {
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        for kind in KINDS {
            let mut largest = 0f64;
            for share in [0.25, 0.125] {
                for head_dim in [128, 100] {
                    let data = data(kind, head_dim);
                    let key = Format::KIVI2.promote(share).unwrap();
                    let config = CacheConfig::builder().key(key).build().unwrap();
                    let found = run(&cpu, &config, head_dim, &data);
                    let plane = found.layer.packed_keys.as_ref().unwrap().promoted.as_ref();
                    let count = (share * head_dim as f64).ceil() as usize;
                    assert_eq!(plane.map(|plane| plane.count), Some(count));
                    let found = worst(&found, head_dim, &data);
                    assert!(found <= BOUND, "{isa}, {kind:?}, {key}, {head_dim}: {found:e}");
                    largest = largest.max(found);
                }
            }
            println!("{isa}: {kind:?}: relative error at most {largest:.1e}");
        }
    }
}

/// Odd dimensions, every group size, sinks.
#[test]
fn shapes_do_not_matter() {
    for isa in Isa::available() {
        let cpu = Cpu::with_isa(2, isa).unwrap();
        for (i, group) in [16, 32, 64, 128].into_iter().enumerate() {
            for head_dim in [20, 72, 80, 100, 256] {
                let data = data(Kind::Random, head_dim);
                let config = CacheConfig::builder().group_size(group).sink_length(5 * i);
                let found = run(&cpu, &config.build().unwrap(), head_dim, &data);
                let found = worst(&found, head_dim, &data);
                assert!(found <= BOUND, "{isa}, G = {group}, head_dim {head_dim}: {found:e}");
            }
        }
    }
}
