//! Packed pages of random codes, and attention over them in f64.

use cubecl::prelude::*;
use half::f16;
use kivi_cuda::offline::{Architecture, Recorder, emulated};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A client on the emulator, or a printed line.
pub(crate) fn client() -> Option<ComputeClient<Recorder>> {
    let Some(tools) = std::env::var_os("KIVI_CUDA_TOOLS") else {
        println!("skipped: KIVI_CUDA_TOOLS is not set; `cargo xtask codegen` sets it");
        return None;
    };
    Some(emulated(Architecture::Sm90, tools.as_ref()))
}

pub(crate) struct Random(ChaCha8Rng);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    pub(crate) fn word(&mut self) -> u32 {
        self.0.next_u32()
    }

    /// Uniform in `[low, high)`.
    pub(crate) fn uniform(&mut self, low: f32, high: f32) -> f32 {
        low + (high - low) * (self.word() >> 8) as f32 / (1 << 24) as f32
    }

    /// A scale in the low half and a zero in the high one.
    pub(crate) fn parameters(&mut self, scale: f32) -> u32 {
        let scale = f16::from_f32(self.uniform(0.05, 1.0) * scale);
        let zero = f16::from_f32(self.uniform(-2.0, 0.5) * scale.to_f32());
        u32::from(zero.to_bits()) << 16 | u32::from(scale.to_bits())
    }
}

/// `scale · code + zero`, exactly.
pub(crate) fn dequantize(parameters: u32, code: u32) -> f64 {
    let half = |bits: u32| f16::from_bits(bits as u16).to_f64();
    half(parameters & 0xffff) * f64::from(code) + half(parameters >> 16)
}

/// Code `index` of a word: code `2j + h` lies at bit `16·h + bits·j`.
pub(crate) fn code(word: u32, bits: usize, index: usize) -> u32 {
    (word >> (16 * (index % 2) + bits * (index / 2))) & ((1 << bits) - 1)
}

/// Pages of one layer, and what they hold: `[kv_head][token][head_dim]`.
pub(crate) struct Pages {
    pub(crate) arena: Vec<u32>,
    pub(crate) table: Vec<u32>,
    pub(crate) keys: Vec<Vec<Vec<f64>>>,
    pub(crate) values: Vec<Vec<Vec<f64>>>,
}

#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) key_bits: usize,
    pub(crate) value_bits: usize,
    pub(crate) group_size: usize,
    pub(crate) head_dim: usize,
    pub(crate) kv_heads: usize,
    pub(crate) page_tokens: usize,
    /// What scales are multiplied with, of keys and of values.
    pub(crate) magnitude: (f32, f32),
    /// What the scales of every sixteenth channel of keys are multiplied with, too.
    pub(crate) outliers: f32,
}

impl Pages {
    /// Pages for `tokens` tokens, in reverse order and with a gap before the first.
    pub(crate) fn random(shape: Shape, tokens: usize, random: &mut Random) -> Self {
        let Shape { key_bits, value_bits, group_size, head_dim, kv_heads, page_tokens, .. } = shape;
        let (key_word, value_word) = (32 / key_bits, 32 / value_bits);
        let page_groups = page_tokens / group_size;
        let value_groups = head_dim.div_ceil(group_size);
        let key_words = head_dim / key_word * group_size;
        // The parts of a page, as the layout has them.
        let key_parameters = kv_heads * page_groups * key_words;
        let value_codes = key_parameters + kv_heads * page_groups * head_dim;
        let value_parameters = value_codes + kv_heads * (page_tokens / value_word) * head_dim;
        let page_words = value_parameters + kv_heads * page_tokens * value_groups;

        let pages = tokens.div_ceil(page_tokens);
        let mut arena: Vec<u32> = (0..64 + pages * page_words).map(|_| random.word()).collect();
        let table: Vec<u32> =
            (0..pages).rev().map(|page| (64 + page * page_words) as u32).collect();
        for &base in &table {
            let base = base as usize;
            for (i, word) in arena[base + key_parameters..base + value_codes].iter_mut().enumerate()
            {
                // head_dim is a multiple of 16.
                let outlier = if i % 16 == 5 { shape.outliers } else { 1.0 };
                *word = random.parameters(shape.magnitude.0 * outlier);
            }
            for word in &mut arena[base + value_parameters..base + page_words] {
                *word = random.parameters(shape.magnitude.1);
            }
        }
        let key = |head: usize, token: usize, channel: usize| {
            let base = table[token / page_tokens] as usize;
            let (group, t) = (token % page_tokens / group_size, token % group_size);
            let run = head * page_groups + group;
            let word = arena[base + run * key_words + channel / key_word * group_size + t];
            let parameters = arena[base + key_parameters + run * head_dim + channel];
            dequantize(parameters, code(word, key_bits, channel % key_word))
        };
        let value = |head: usize, token: usize, channel: usize| {
            let base = table[token / page_tokens] as usize;
            let t = token % page_tokens;
            let row = head * (page_tokens / value_word) + t / value_word;
            let word = arena[base + value_codes + row * head_dim + channel];
            let at = (head * page_tokens + t) * value_groups + channel / group_size;
            let parameters = arena[base + value_parameters + at];
            dequantize(parameters, code(word, value_bits, t % value_word))
        };
        let all = |element: &dyn Fn(usize, usize, usize) -> f64| -> Vec<Vec<Vec<f64>>> {
            let token = |h, t| (0..head_dim).map(|c| element(h, t, c)).collect();
            (0..kv_heads).map(|h| (0..tokens).map(|t| token(h, t)).collect()).collect()
        };
        let (keys, values) = (all(&key), all(&value));
        Self { arena, table, keys, values }
    }
}

/// Attention of one row over tokens `range`: the logits, `Σ exp(l − max)` and the output.
pub(crate) fn attend(
    query: &[f32],
    scale: f64,
    cap: Option<f64>,
    keys: &[Vec<f64>],
    values: &[Vec<f64>],
    range: std::ops::Range<usize>,
) -> (Vec<f64>, f64, Vec<f64>) {
    let dot = |key: &Vec<f64>| -> f64 {
        let logit = scale * key.iter().zip(query).map(|(k, q)| k * f64::from(*q)).sum::<f64>();
        cap.map_or(logit, |cap| cap * (logit / cap).tanh())
    };
    let logits: Vec<f64> = keys[range.clone()].iter().map(dot).collect();
    let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = logits.iter().map(|l| (l - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    // Without values, only the logits are wanted.
    let values = values.get(range).unwrap_or_default();
    let channels = values.first().map_or(0, Vec::len);
    let sum = |c: usize| values.iter().zip(&weights).map(|(v, w)| v[c] * w).sum::<f64>();
    let output = (0..channels).map(|c| sum(c) / total).collect();
    (logits, total, output)
}
