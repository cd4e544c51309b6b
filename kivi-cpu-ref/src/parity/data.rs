//! Seeded keys, values and queries.

use super::{Case, Sequence};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};

/// What the data looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataKind {
    /// Independent, of about unit size.
    Normal,
    /// A few key channels fifty times larger than the rest, as in real models.
    OutlierChannels,
    /// Every token and channel the same.
    Constant,
    /// All zero.
    Zero,
    /// Zero but for one element per 37 tokens.
    OneOutlier,
    /// ±65504, the largest f16.
    Largest,
    /// Integers, so that ties between two levels are common.
    Ties,
    /// Values whose range is near the smallest scale that is not stored as 0.
    Tiny,
}

impl DataKind {
    /// Every kind.
    pub const ALL: [Self; 8] = [
        Self::Normal,
        Self::OutlierChannels,
        Self::Constant,
        Self::Zero,
        Self::OneOutlier,
        Self::Largest,
        Self::Ties,
        Self::Tiny,
    ];
}

/// Inputs of one sequence, `[tokens, heads, head_dim]` each.
#[derive(Clone, Debug)]
pub struct SequenceData {
    /// Query vectors of every token.
    pub queries: Vec<f32>,
    /// Key vectors.
    pub keys: Vec<f32>,
    /// Value vectors.
    pub values: Vec<f32>,
}

impl SequenceData {
    /// The inputs of sequence `index` of a case.
    pub fn new(case: &Case, index: usize, sequence: Sequence) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(case.seed ^ (index as u64) << 32);
        let tokens = sequence.prompt + sequence.generated;
        let width = case.kv_heads * case.head_dim;
        // The sum of three uniform numbers in ±1: mean 0, variance 1.
        let mut normal =
            || -> f32 { (0..3).map(|_| rng.next_u32() as f32 / (1u64 << 31) as f32 - 1.0).sum() };
        let mut fill = |width: usize, outliers: bool| -> Vec<f32> {
            (0..tokens * width)
                .map(|i| {
                    let (token, channel) = (i / width, i % width);
                    let x = normal();
                    match case.data {
                        DataKind::Normal => x,
                        DataKind::OutlierChannels if outliers && channel % 29 == 3 => 50.0 * x,
                        DataKind::OutlierChannels => x,
                        DataKind::Constant => 0.625,
                        DataKind::Zero => 0.0,
                        DataKind::OneOutlier if token % 37 == 5 && channel == 7 => 100.0,
                        DataKind::OneOutlier => 0.0,
                        DataKind::Largest => 65504f32.copysign(x),
                        DataKind::Ties => (2.0 * x).round_ties_even(),
                        DataKind::Tiny => x * 2f32.powi(-13),
                    }
                })
                .collect()
        };
        let (keys, values) = (fill(width, true), fill(width, false));
        let size = match case.data {
            // Logits of moderate size, so that the softmax is not a mere maximum.
            DataKind::Largest => 1e-5,
            _ => 1.0,
        };
        let queries = (0..tokens * width * case.head_group).map(|_| size * normal()).collect();
        Self { queries, keys, values }
    }
}
