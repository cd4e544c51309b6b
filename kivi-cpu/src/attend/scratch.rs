//! Buffers of one thread.

use super::{
    TILE,
    full::Full,
    operand::{Operands, STRIPE},
    partial::Partial,
};
use crate::{
    cache::Geometry,
    isa::{LANES, Simd, slices},
};
use half::f16;
use kivi_core::{Bits, KeyValue};
use std::ops::Range;

/// One query vector of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    /// Query head.
    pub(super) head: usize,
    pub(super) position: usize,
    /// First position seen in full precision.
    pub(super) view: KeyValue<usize>,
}

/// Buffers of one thread, of a size for the largest block so far.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(super) queries: Vec<Query>,
    /// Queries times the softmax scale, `[queries, head_dim in stripes]`.
    pub(super) scaled: Rows,
    /// Logits, then softmax weights, `[queries, TILE]`.
    pub(super) weights: Rows,
    /// The weights of tokens seen as codes, `[TILE]`.
    pub(super) coded: Vec<[f32; LANES]>,
    pub(super) operands: Operands,
    /// Queries that take part in what is being computed.
    pub(super) active: Vec<usize>,
    pub(super) params: Params,
    /// Codes whose rows are not whole vectors, filled up.
    pub(super) padded: Vec<[u32; LANES]>,
    pub(super) full: Full,
    /// For the split after the first one of a task.
    pub(super) partial: Partial,
}

impl Scratch {
    pub(super) fn resize(&mut self, queries: usize, g: &Geometry) {
        let channels = g.head_dim.next_multiple_of(STRIPE);
        self.scaled.resize(queries, channels);
        self.weights.resize(queries, TILE);
        self.coded.resize(TILE / LANES, [0.0; LANES]);
        self.operands.resize(queries, channels.max(TILE));
        self.params.resize(channels.max(TILE));
        self.full.resize(g);
    }

    /// Folds the weights of an active query over the first `coded` tokens of a tile with the scales
    /// and zeros that have been set.
    #[inline(always)]
    pub(super) fn fold_values<S: Simd>(
        &mut self,
        simd: S,
        operand: usize,
        bits: Bits,
        coded: usize,
        skip_zeros: bool,
    ) {
        let mut weights = self.weights.row(self.active[operand]);
        if coded < TILE {
            let to = self.coded.as_flattened_mut();
            to[..coded].copy_from_slice(&weights.as_flattened()[..coded]);
            to[coded..].fill(0.0);
            weights = &self.coded;
        }
        let params = [&self.params.scales, &self.params.zeros];
        let [scales, zeros] = params.map(|params| &params[..TILE / LANES]);
        self.operands.fold(simd, operand, bits, [weights, scales, zeros], skip_zeros);
    }
}

/// A matrix of whole vectors.
#[derive(Debug, Default)]
pub(super) struct Rows {
    data: Vec<[f32; LANES]>,
    vectors: usize,
}

impl Rows {
    fn resize(&mut self, rows: usize, width: usize) {
        self.vectors = width / LANES;
        self.data.clear();
        self.data.resize(rows * self.vectors, [0.0; LANES]);
    }

    pub(super) fn row(&self, row: usize) -> &[[f32; LANES]] {
        &self.data[row * self.vectors..(row + 1) * self.vectors]
    }

    /// Two rows, the first one before the second.
    pub(super) fn two_rows_mut(&mut self, a: usize, b: usize) -> [&mut [[f32; LANES]]; 2] {
        let (head, tail) = self.data.split_at_mut(b * self.vectors);
        [&mut head[a * self.vectors..(a + 1) * self.vectors], &mut tail[..self.vectors]]
    }

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [[f32; LANES]] {
        &mut self.data[row * self.vectors..(row + 1) * self.vectors]
    }
}

/// Scales and zeros in f32: of the channels of a group of keys, or of the tokens of a tile of values.
#[derive(Debug, Default)]
pub(super) struct Params {
    pub(super) scales: Vec<[f32; LANES]>,
    pub(super) zeros: Vec<[f32; LANES]>,
}

impl Params {
    fn resize(&mut self, length: usize) {
        self.scales.resize(length / LANES, [0.0; LANES]);
        self.zeros.resize(length / LANES, [0.0; LANES]);
    }

    /// Sets elements from `first` on; says whether a zero is NaN.
    #[inline(always)]
    pub(super) fn set<S: Simd>(
        &mut self,
        simd: S,
        first: usize,
        scales: &[f16],
        zeros: &[f16],
    ) -> bool {
        let range = first..first + scales.len();
        let (to_scales, to_zeros) = (
            &mut self.scales.as_flattened_mut()[range.clone()],
            &mut self.zeros.as_flattened_mut()[range],
        );
        slices::f16_to_f32(simd, bytemuck::cast_slice(scales), to_scales);
        slices::f16_to_f32(simd, bytemuck::cast_slice(zeros), to_zeros);
        let zero = simd.splat(0.0);
        let mut poison = zero;
        for z in to_zeros.as_chunks::<LANES>().0 {
            poison = simd.mul_add(simd.load(z), zero, poison);
        }
        simd.sum(poison) != 0.0
    }

    /// Sets a range of elements to 0.
    pub(super) fn clear(&mut self, range: Range<usize>) {
        self.scales.as_flattened_mut()[range.clone()].fill(0.0);
        self.zeros.as_flattened_mut()[range].fill(0.0);
    }
}
