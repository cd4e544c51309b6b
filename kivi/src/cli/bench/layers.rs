//! Filled layers to attend over.

use super::{
    oracle::{View, relative_error},
    shape::{Bytes, Shape},
};
use anyhow::{Result, bail};
use half::f16;
use kivi::{
    Attention, Bits, CacheBackend, CacheConfig, CacheState, CanonicalLayer, FullTokens, KeyValue,
    LayerSpec, PackedKeys, PackedValues, SequenceLayout, StepPlan, StepRequest,
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use rayon::prelude::*;

/// A relative error above this is not the same attention.
pub(super) const TOLERANCE: f64 = 1e-3;

/// Multiplications in f64 that a check may take; two kv heads are always checked.
const CHECK_WORK: usize = 1 << 27;

/// Of this many key channels one is an outlier, as many times larger than the others.
const OUTLIER_EVERY: usize = 29;
const OUTLIER: f32 = 10.0;

/// Some layers, filled, and one step of all sequences, ready to attend.
pub(super) struct Layers<'b, B: CacheBackend> {
    backend: &'b B,
    shape: Shape,
    state: CacheState,
    cache: B::Cache,
    plan: StepPlan,
    attention: Attention,
    /// `[rows, query_heads · head_dim]`
    queries: Vec<f32>,
    uploaded: B::Buffer,
    count: usize,
}

impl<'b, B: CacheBackend> Layers<'b, B> {
    /// Imports random layers up to the step, and executes the step but for its attention.
    pub(super) fn fill(
        backend: &'b B,
        shape: Shape,
        config: &CacheConfig,
        bytes: Bytes,
        count: usize,
    ) -> Result<Self> {
        let spec = shape.pool(config, count)?;
        let layer = spec.group_layer(0).clone();
        let mut cache = backend.create_cache(&spec)?;
        let mut state = CacheState::new(spec);
        let mut random = Random::new();
        let mut requests = Vec::new();
        for _ in 0..shape.batch {
            let sequence = state.adopt_sequence(shape.filled())?;
            let layout = state.layout(sequence)?;
            for index in 0..count {
                let contents = random.layer(config, &layer, &layout)?;
                backend.import(&mut cache, index, &layout, &contents)?;
            }
            requests.push(StepRequest { sequence, tokens: shape.queries });
        }
        let (held, expected) = (backend.measure(&cache).in_use(), bytes.held * count);
        if held != expected {
            bail!("the cache holds {held} bytes, and should hold {expected}");
        }

        let mut plan = StepPlan::default();
        state.plan(&requests, &mut plan)?;
        backend.begin_step(&mut cache, &plan)?;
        let width = layer.kv_heads * layer.head_dim;
        let (heads, head_dim) = (plan.rows * layer.kv_heads, layer.head_dim);
        let keys = random.tokens(heads, head_dim, &key_sizes(head_dim));
        let values = random.tokens(heads, head_dim, &vec![1.0; head_dim]);
        let keys = backend.upload(plan.rows, width, &keys)?;
        let values = backend.upload(plan.rows, width, &values)?;
        for index in 0..count {
            backend.append(&mut cache, index, &plan, &keys, &values)?;
            backend.quantize(&mut cache, index, &plan)?;
        }
        let width = shape.heads.query * shape.head_dim;
        let queries = random.tokens(plan.rows, width, &vec![1.0; width]);
        let uploaded = backend.upload(plan.rows, width, &queries)?;
        let attention = Attention::new(shape.heads.query, 1.0 / (shape.head_dim as f32).sqrt());
        Ok(Self { backend, shape, state, cache, plan, attention, queries, uploaded, count })
    }

    /// What is timed: the attention of the step in one layer. The CPU backends have computed it when
    /// they return.
    pub(super) fn attend(&self, layer: usize) -> kivi::Result<B::Buffer> {
        self.backend.attend(&self.cache, layer, &self.plan, &self.attention, &self.uploaded)
    }

    /// Compares the last layer with [`View::attention`]: all rows and query heads of at least two kv
    /// heads, of the first and the last sequence. Returns the largest relative error.
    pub(super) fn check(&self) -> Result<f64> {
        let (layer, width) = (self.count - 1, self.shape.heads.query * self.shape.head_dim);
        let mut found = vec![0.0; self.plan.rows * width];
        self.backend.read(&self.attend(layer)?, &mut found)?;
        let mut worst = 0.0;
        let last = self.plan.sequences.len() - 1;
        for index in 0..=last {
            if index == 0 || index == last {
                worst = worse(worst, self.check_sequence(layer, index, &found)?);
            }
        }
        Ok(worst)
    }

    fn check_sequence(&self, layer: usize, sequence: usize, found: &[f32]) -> Result<f64> {
        let plan = &self.plan.sequences[sequence];
        // Before the release, the full-precision copies of the state before are still there.
        let after = self.state.layout(plan.sequence)?;
        let layout = SequenceLayout { kept: plan.before.kept, ..after };
        let contents = self.backend.export(&self.cache, layer, &layout)?;
        let Shape { heads, head_dim, tokens, queries: rows, .. } = self.shape;
        let group = heads.query / heads.kv;
        let work_of_head = 2 * tokens * head_dim * group * rows;
        let checked = (CHECK_WORK / work_of_head).max(2).min(heads.kv);
        let width = heads.query * head_dim;
        let scale = f64::from(self.attention.scale);
        let queries = &self.queries;
        let errors = (0..checked * rows).into_par_iter().map(|index| {
            let (nth, row) = (index / rows, index % rows);
            // Spread out, the first and the last among them.
            let head = if checked > 1 { nth * (heads.kv - 1) / (checked - 1) } else { 0 };
            let (position, full_from) = (plan.before.tokens + row, plan.views[row]);
            let view = View { layer: &contents, head, head_dim, position, full_from };
            let start = (plan.rows.start + row) * width + head * group * head_dim;
            let range = start..start + group * head_dim;
            let exact = view.attention(scale, &queries[range.clone()]);
            let found = found[range].chunks_exact(head_dim);
            let errors = found.zip(exact.chunks_exact(head_dim));
            errors.map(|(found, exact)| relative_error(found, exact)).fold(0.0, worse)
        });
        Ok(errors.reduce(|| 0.0, worse))
    }
}

/// The larger of two errors; what is not a number is larger than anything.
fn worse(a: f64, b: f64) -> f64 {
    if a.is_nan() || b <= a { a } else { b }
}

/// Standard deviation of each key channel of a head: a few outliers, as in real models.
fn key_sizes(head_dim: usize) -> Vec<f32> {
    (0..head_dim).map(|c| if c % OUTLIER_EVERY == 3 { OUTLIER } else { 1.0 }).collect()
}

/// Random contents. Numbers are drawn once; what is filled takes them in turn from a random place,
/// so that a gigabyte takes no longer than to write it.
struct Random {
    rng: ChaCha8Rng,
    words: Vec<u32>,
    normal: Vec<f32>,
}

/// How many numbers are drawn: primes, so that no row of a tensor repeats the one before.
const WORDS: usize = 1_048_583;
const NORMALS: usize = 262_147;

impl Random {
    fn new() -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(2402_02750);
        let words = (0..WORDS).map(|_| rng.next_u32()).collect();
        // The sum of three uniform numbers in ±1: mean 0, variance 1.
        let mut uniform = || rng.next_u32() as f32 / (1u64 << 31) as f32 - 1.0;
        let normal = (0..NORMALS).map(|_| uniform() + uniform() + uniform()).collect();
        Self { rng, words, normal }
    }

    /// Codes, all equally likely.
    fn codes(&mut self, out: &mut [u32]) {
        let start = self.rng.next_u32() as usize % WORDS;
        let words = self.words[start..].iter().chain(self.words.iter().cycle());
        for (out, &word) in out.iter_mut().zip(words) {
            *out = word;
        }
    }

    fn normals(&mut self) -> impl Iterator<Item = f32> + '_ {
        let start = self.rng.next_u32() as usize % NORMALS;
        self.normal[start..].iter().chain(self.normal.iter().cycle()).copied()
    }

    /// Scales and zeros of groups whose elements have the standard deviations `sizes` in turn: about
    /// four of them from the smallest to the largest element.
    fn params(&mut self, bits: Bits, sizes: &[f32], scales: &mut [f16], zeros: &mut [f16]) {
        let levels = bits.levels() as f32;
        let sizes = sizes.iter().cycle();
        let mut normals = self.normals();
        for ((scale, zero), size) in scales.iter_mut().zip(zeros).zip(sizes) {
            let (a, b) = (normals.next().unwrap_or(0.0), normals.next().unwrap_or(0.0));
            let range = size * (4.0 + 0.3 * a);
            *scale = f16::from_f32(range / levels);
            *zero = f16::from_f32(-0.5 * range + 0.3 * size * b);
        }
    }

    /// `[rows, width]`, with the standard deviation of each column.
    fn tokens(&mut self, rows: usize, width: usize, sizes: &[f32]) -> Vec<f32> {
        let mut data = vec![0.0; rows * width];
        let mut normals = self.normals();
        for row in data.chunks_exact_mut(width) {
            for ((x, size), normal) in row.iter_mut().zip(sizes).zip(&mut normals) {
                *x = size * normal;
            }
        }
        data
    }

    fn full(&mut self, layer: &LayerSpec, first: usize, end: usize, sizes: &[f32]) -> FullTokens {
        let tokens = end.saturating_sub(first);
        let data = self.tokens(layer.kv_heads * tokens, layer.head_dim, sizes);
        FullTokens { first, tokens, data }
    }

    /// One layer of one sequence.
    fn layer(
        &mut self,
        config: &CacheConfig,
        layer: &LayerSpec,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer> {
        let (sinks, g) = (config.sink_length(), config.group_size());
        let (outliers, plain) = (key_sizes(layer.head_dim), vec![1.0; layer.head_dim]);
        let shape = |end: usize| [layer.kv_heads, end - sinks, layer.head_dim];
        let keys = shape(layout.packed.keys);
        let mut packed_keys = PackedKeys::zeroed_for(layer.format.keys, g, keys)?;
        if let Some(keys) = &mut packed_keys {
            self.codes(&mut keys.codes);
            self.params(keys.bits, &outliers, &mut keys.scales, &mut keys.zeros);
            // The first channels are promoted: which ones makes no difference to the work.
            if let Some(promoted) = &mut keys.promoted {
                self.codes(&mut promoted.lo);
            }
        }
        let mut packed_values = None;
        if let Some(bits) = layer.format.values.bits {
            let mut values = PackedValues::zeroed(bits, g, shape(layout.packed.values))?;
            self.codes(&mut values.codes);
            // The last word of a row ends with zero bits.
            let used = layer.head_dim % bits.codes_per_word();
            if used > 0 {
                let row = layer.head_dim.div_ceil(bits.codes_per_word());
                for word in values.codes.iter_mut().skip(row - 1).step_by(row) {
                    *word &= (1 << (used * bits.get())) - 1;
                }
            }
            self.params(bits, &[1.0], &mut values.scales, &mut values.zeros);
            packed_values = Some(values);
        }
        let (n, packs) = (layout.tokens, layer.packs());
        let first = packs.zip(layout.kept).map(|(packs, kept)| if packs { kept } else { sinks });
        Ok(CanonicalLayer {
            packed_keys,
            packed_values,
            sinks: KeyValue::new(
                self.full(layer, 0, n.min(sinks), &outliers),
                self.full(layer, 0, n.min(sinks), &plain),
            ),
            full: KeyValue::new(
                self.full(layer, first.keys, n, &outliers),
                self.full(layer, first.values, n, &plain),
            ),
        })
    }
}

#[cfg(all(test, feature = "cpu-ref"))]
mod tests {
    use super::*;
    use crate::cli::bench::options::{Formats, Heads};

    /// The reference passes; one changed element of one query is noticed, wherever it is checked.
    #[test]
    fn a_wrong_answer_is_noticed() {
        let formats: Formats = "kivi2:kivi4".parse().unwrap();
        let heads = Heads { query: 4, kv: 2 };
        let shape = Shape { tokens: 130, heads, head_dim: 16, batch: 3, queries: 2, formats };
        let KeyValue { keys, values } = formats.0;
        let config = CacheConfig::builder().key(keys).value(values).residual_length(64);
        let config = config.sink_length(3).build().unwrap();
        let bytes = shape.bytes(&config).unwrap();
        let mut layers = Layers::fill(&kivi::cpu_ref::CpuRef, shape, &config, bytes, 2).unwrap();
        let error = layers.check().unwrap();
        assert!(error > 0.0 && error < 1e-5, "{error}");
        // `[rows, query_heads, head_dim]`: the first row, and the last of the last sequence.
        for element in [0, 5 * 64 + 3 * 16] {
            layers.queries[element] += 1.0;
            assert!(layers.check().unwrap() > TOLERANCE, "{element}");
            layers.queries[element] -= 1.0;
        }
        assert!(worse(worse(0.5, f64::NAN), 1.0).is_nan());
    }
}
