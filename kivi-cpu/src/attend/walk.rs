//! One pass over one split of a sequence, for all queries of a block.

use super::{
    Block, SPLIT_TOKENS,
    partial::Partial,
    products::{query_keys, weighted_sum},
    tile::{Needs, Tile},
};
use crate::{
    Matrix,
    cache::{Geometry, LayerCache},
    isa::{Kernel, LANES, Simd, slices},
};
use kivi_core::{Attention, KeyValue};
use std::ops::Range;

/// What all blocks of a step have in common.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) layer: &'a LayerCache,
    /// Layer group, for the page tables.
    pub(super) group: usize,
    pub(super) attention: &'a Attention,
    pub(super) queries: &'a Matrix,
}

/// A block's pass over one split.
pub(super) struct Split<'a> {
    walk: Walk<'a>,
    block: &'a Block<'a>,
    split: usize,
}

/// One query vector of a block.
struct Query {
    /// Query head.
    head: usize,
    position: usize,
    /// First position seen in full precision.
    view: KeyValue<usize>,
    /// The query times the softmax scale.
    scaled: Vec<f32>,
}

impl<'a> Walk<'a> {
    pub(super) fn split(self, block: &'a Block<'a>, split: usize) -> Split<'a> {
        Split { walk: self, block, split }
    }

    /// `(number, row within the sequence, query head)` of every query of a block.
    pub(super) fn queries_of(
        &self,
        block: &Block<'_>,
    ) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
        let heads = self.attention.head_group(&self.layer.spec);
        let first = block.kv_head * heads;
        let rows = block.rows.clone();
        rows.flat_map(move |row| (first..first + heads).map(move |head| (row, head)))
            .enumerate()
            .map(|(number, (row, head))| (number, row, head))
    }

    fn prepare(&self, block: &Block<'_>) -> Vec<Query> {
        let head_dim = self.layer.geometry.head_dim;
        let sequence = block.sequence;
        let query = |(_, row, head): (usize, usize, usize)| {
            let vector =
                &self.queries.row(sequence.rows.start + row)[head * head_dim..][..head_dim];
            Query {
                head,
                position: sequence.before.tokens + row,
                view: sequence.views[row],
                scaled: vector.iter().map(|q| q * self.attention.scale).collect(),
            }
        };
        self.queries_of(block).map(query).collect()
    }

    /// Positions in `tile` that a query sees, counted within the tile.
    fn visible(&self, query: &Query, tile: &Range<usize>) -> Range<usize> {
        let window = self.layer.spec.window.unwrap_or(usize::MAX);
        let first = (query.position + 1).saturating_sub(window).max(tile.start);
        let end = tile.end.min(query.position + 1);
        first.saturating_sub(tile.start)..end.saturating_sub(tile.start)
    }

    /// How many of the tile's first tokens a query sees as codes.
    fn coded(&self, query: &Query, tile: &Range<usize>) -> KeyValue<usize> {
        if tile.start < self.layer.geometry.sinks {
            return KeyValue::both(0);
        }
        let seen = |(view, packs): (usize, bool)| if packs { view } else { 0 };
        let end = query.view.zip(self.layer.spec.packs()).map(seen);
        end.map(|end| end.clamp(tile.start, tile.end) - tile.start)
    }
}

/// Tiles of a split: those that start in it.
fn tiles(g: &Geometry, split: usize, end: usize) -> impl Iterator<Item = Range<usize>> {
    let (sinks, group) = (g.sinks, g.group);
    let split = split * SPLIT_TOKENS..end.min((split + 1) * SPLIT_TOKENS);
    let in_sinks = (0..sinks.min(split.end)).step_by(group).map(move |t| t..sinks.min(t + group));
    let first = sinks + split.start.saturating_sub(sinks).next_multiple_of(group);
    let after = (first..split.end.max(first)).step_by(group).map(move |t| t..t + group);
    let start = split.start;
    let from_start = move |tile: &Range<usize>| tile.start >= start;
    in_sinks.filter(from_start).chain(after).map(move |tile| tile.start..tile.end.min(end))
}

impl Kernel for Split<'_> {
    type Output = Partial;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> Partial {
        let Self { walk, block, split } = self;
        let g = &walk.layer.geometry;
        let queries = walk.prepare(block);
        let mut tile = Tile::new(g);
        let mut scratch = Scratch::new(&tile, g);
        let mut partial = Partial::empty(queries.len(), tile.width);
        let end = block.sequence.before.tokens + block.rows.end;
        for positions in tiles(g, split, end) {
            let mut needs = Needs::default();
            let mut seen = false;
            for query in &queries {
                let visible = walk.visible(query, &positions);
                let coded = walk.coded(query, &positions);
                seen |= !visible.is_empty();
                let codes = coded.map(|coded| visible.start < coded);
                needs.codes = needs.codes.zip(codes).map(|(a, b)| a | b);
                let full = coded.map(|coded| coded < visible.end);
                needs.full = needs.full.zip(full).map(|(a, b)| a | b);
            }
            if !seen || !tile.load(simd, walk.layer, walk.group, block, positions.clone(), needs) {
                continue;
            }
            for (number, query) in queries.iter().enumerate() {
                let visible = walk.visible(query, &positions);
                if !visible.is_empty() {
                    let coded = walk.coded(query, &positions);
                    scratch.logits(simd, walk.attention, &tile, query, coded.keys > 0, &visible);
                    scratch.accumulate(
                        simd,
                        g,
                        &tile,
                        &mut partial,
                        number,
                        coded.values,
                        &visible,
                    );
                }
            }
        }
        partial
    }
}

/// Buffers for one query and one tile.
struct Scratch {
    /// `q∘s`.
    folded: Vec<f32>,
    /// Logits, then softmax weights, of the tile's tokens.
    weights: Vec<f32>,
    /// `p_t s_t`.
    scaled: Vec<f32>,
}

impl Scratch {
    fn new(tile: &Tile, g: &Geometry) -> Self {
        let buffer = |length| vec![0.0; length];
        Self {
            folded: buffer(g.head_dim),
            weights: buffer(tile.stride),
            scaled: buffer(tile.stride),
        }
    }

    /// Logits of the tile's tokens; only the visible ones mean anything.
    #[inline(always)]
    fn logits<S: Simd>(
        &mut self,
        simd: S,
        attention: &Attention,
        tile: &Tile,
        query: &Query,
        coded: bool,
        visible: &Range<usize>,
    ) {
        let length = tile.positions.len().next_multiple_of(LANES);
        let logits = &mut self.weights[..length];
        if coded {
            let keys = &tile.codes.keys;
            for ((folded, q), s) in self.folded.iter_mut().zip(&query.scaled).zip(&keys.scales) {
                *folded = q * s;
            }
            query_keys(simd, &self.folded, &keys.codes, tile.stride, logits);
            let zero = slices::dot(simd, &query.scaled, &keys.zeros);
            for logit in logits {
                *logit += zero;
            }
        } else {
            query_keys(simd, &query.scaled, &tile.full.keys, tile.stride, logits);
        }
        let plain = attention.softcap.is_none() && attention.alibi_slopes.is_none();
        if !plain {
            let first = tile.positions.start;
            for token in visible.clone() {
                // The scale is in the query already.
                let dot = self.weights[token] / attention.scale;
                self.weights[token] =
                    attention.logit(query.head, query.position, first + token, dot);
            }
        }
    }

    /// Adds the visible tokens' weights and weighted values to a query's running state.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // one inner step, kept in registers by inlining
    fn accumulate<S: Simd>(
        &mut self,
        simd: S,
        g: &Geometry,
        tile: &Tile,
        partial: &mut Partial,
        number: usize,
        coded: usize,
        visible: &Range<usize>,
    ) {
        let weights = &mut self.weights[visible.clone()];
        let largest = slices::max(simd, weights);
        if largest == f32::NEG_INFINITY && weights.iter().all(|&w| w == largest) {
            // No weight at all, and no maximum to measure it by.
            return;
        }
        let factor = partial.raise(number, largest);
        let denominator = slices::exp_in_place(simd, weights, partial.maximum[number]);
        partial.denominator[number] = partial.denominator[number] * factor + denominator;
        let sums = partial.sums_mut(number);
        if factor != 1.0 {
            for sum in &mut *sums {
                *sum *= factor;
            }
        }
        let codes = visible.start..visible.end.min(coded);
        if !codes.is_empty() {
            let values = &tile.codes.values;
            let weights = &self.weights[codes.clone()];
            let rows = &values.codes[codes.start * tile.width..];
            for (group, first) in (0..g.head_dim).step_by(g.group).enumerate() {
                let params = group * g.group + codes.start..group * g.group + codes.end;
                let scaled = &mut self.scaled[..weights.len()];
                for ((scaled, p), s) in
                    scaled.iter_mut().zip(weights).zip(&values.scales[params.clone()])
                {
                    *scaled = p * s;
                }
                let channels = first..tile.width.min(first + g.group);
                weighted_sum(simd, scaled, rows, tile.width, channels.clone(), sums);
                let zero = slices::dot(simd, weights, &values.zeros[params]);
                for sum in &mut sums[channels] {
                    *sum += zero;
                }
            }
        }
        let full = visible.start.max(coded)..visible.end;
        if !full.is_empty() {
            let rows = &tile.full.values[full.start * tile.width..];
            weighted_sum(simd, &self.weights[full], rows, tile.width, 0..tile.width, sums);
        }
    }
}
