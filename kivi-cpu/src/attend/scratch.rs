//! Buffers of one thread.

use super::{
    TILE,
    full::Full,
    operand::{Operands, Params, STRIPE},
    partial::Partial,
};
use crate::{cache::Geometry, isa::LANES};
use half::f16;
use kivi_core::KeyValue;
use std::ops::Range;

/// One query vector of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Query {
    /// Query head, counted within the head group.
    pub(super) head: usize,
    pub(super) position: usize,
    /// First position seen in full precision.
    pub(super) view: KeyValue<usize>,
}

/// What a query sees of a tile.
#[derive(Clone, Debug)]
pub(super) struct View {
    /// Tokens of the tile.
    pub(super) visible: Range<usize>,
    /// How many of the tile's first tokens are codes.
    pub(super) coded: KeyValue<usize>,
}

/// Buffers of one thread, of a size for the largest block so far.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// What the buffers have room for: kv heads, queries of each, head_dim and `G`.
    room: [usize; 4],
    /// Of each kv head.
    pub(super) queries: Vec<Query>,
    /// What each query sees of the tile.
    pub(super) views: Vec<View>,
    /// Queries of the kv head at hand times the softmax scale, `[queries, head_dim in stripes]`.
    pub(super) scaled: Rows,
    /// The same of each kv head; whose turn it is changes places with [`scaled`](Self::scaled).
    pub(super) heads: Vec<Rows>,
    /// Logits, then softmax weights, `[queries, TILE]`.
    pub(super) weights: Rows,
    /// The weights of tokens seen as codes of two queries, `[2, TILE]`.
    pub(super) coded: Rows,
    pub(super) operands: Operands,
    /// Queries that take part in what is being computed.
    pub(super) active: Vec<usize>,
    pub(super) params: ParamBuffer,
    pub(super) promoted: PromotedBuffer,
    /// Codes whose rows are not whole vectors, filled up.
    pub(super) padded: Vec<[u32; LANES]>,
    pub(super) full: Full,
    /// A query turned back to the beginning of a tile, `[head_dim]`, and the cosines and sines it is
    /// turned by.
    pub(super) turned: Vec<f32>,
    pub(super) angles: Vec<[f32; 2]>,
    /// For the split after the first one of a task.
    pub(super) partials: Vec<Partial>,
}

impl Scratch {
    /// Room for some kv heads and queries of each; what lies beyond a head's channels is zero.
    pub(super) fn resize(&mut self, kv_heads: usize, queries: usize, g: &Geometry) {
        let room = [kv_heads, queries, g.head_dim, g.group];
        if self.room == room {
            return;
        }
        self.room = room;
        let channels = g.head_dim.next_multiple_of(STRIPE);
        self.heads.resize_with(kv_heads, Rows::default);
        self.heads.iter_mut().for_each(|head| head.resize(queries, channels));
        self.weights.resize(queries, TILE);
        self.coded.resize(2, TILE);
        self.operands.resize(queries, channels.max(TILE));
        self.params.resize(channels.max(TILE));
        self.promoted.queries.resize(2, channels);
        self.full.resize(g);
    }

    /// Lists the queries for which `f` holds.
    pub(super) fn activate(&mut self, f: impl Fn(&View) -> bool) {
        let Self { views, active, .. } = self;
        active.clear();
        active.extend((0..views.len()).filter(|&query| f(&views[query])));
    }
}

/// What is picked from a group of keys with promoted channels.
#[derive(Debug, Default)]
pub(super) struct PromotedBuffer {
    /// The promoted channels, in ascending order.
    pub(super) channels: Vec<usize>,
    /// A quarter of these elements of two queries, then zeros, `[2, head_dim in stripes]`.
    pub(super) queries: Rows,
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

    pub(super) fn row_mut(&mut self, row: usize) -> &mut [[f32; LANES]] {
        &mut self.data[row * self.vectors..(row + 1) * self.vectors]
    }

    /// Two rows, the first one before the second.
    pub(super) fn two_rows_mut(&mut self, a: usize, b: usize) -> [&mut [[f32; LANES]]; 2] {
        let (head, tail) = self.data.split_at_mut(b * self.vectors);
        [&mut head[a * self.vectors..(a + 1) * self.vectors], &mut tail[..self.vectors]]
    }
}

/// Scales and zeros that do not lie side by side in memory, or do not fill a stripe.
#[derive(Debug, Default)]
pub(super) struct ParamBuffer {
    scales: Vec<f16>,
    zeros: Vec<f16>,
}

impl ParamBuffer {
    fn resize(&mut self, length: usize) {
        self.scales.resize(length, f16::ZERO);
        self.zeros.resize(length, f16::ZERO);
    }

    /// Sets elements from `first` on.
    pub(super) fn set(&mut self, first: usize, scales: &[f16], zeros: &[f16]) {
        self.scales[first..first + scales.len()].copy_from_slice(scales);
        self.zeros[first..first + zeros.len()].copy_from_slice(zeros);
    }

    /// Sets a range of elements to 0.
    pub(super) fn clear(&mut self, range: Range<usize>) {
        self.scales[range.clone()].fill(f16::ZERO);
        self.zeros[range].fill(f16::ZERO);
    }

    /// The first `length` elements, a multiple of [`STRIPE`].
    pub(super) fn get(&self, length: usize) -> Params<'_> {
        Params::new(&self.scales[..length], &self.zeros[..length])
    }
}
