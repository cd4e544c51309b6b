//! One pass over one split of a sequence, for all queries of a block.

use super::{
    Block, SPLIT_TOKENS, TILE,
    codes::{KeyCodes, ValueCodes},
    dots::Row,
    full::Source,
    operand::STRIPE,
    partial::Partial,
    products::{query_keys, weighted_sum},
    scratch::{Params, Query, Scratch},
};
use crate::{
    Matrix,
    cache::{Geometry, KeyOrder, LayerCache, Page, Slot, Tensor, ValueOrder},
    isa::{Kernel, LANES, Simd, slices},
};
use kivi_core::{Attention, Bits, KeyValue, PageId, SequencePlan, StepPlan};
use std::ops::Range;

/// What all blocks of a step have in common.
#[derive(Clone, Copy)]
pub(super) struct Walk<'a> {
    pub(super) layer: &'a LayerCache,
    /// Layer group, for the page tables.
    pub(super) group: usize,
    pub(super) plan: &'a StepPlan,
    pub(super) attention: &'a Attention,
    pub(super) queries: &'a Matrix,
}

/// A block's pass over one split.
pub(super) struct Split<'a> {
    walk: Walk<'a>,
    block: &'a Block,
    split: usize,
    scratch: &'a mut Scratch,
    partial: &'a mut Partial,
}

impl<'a> Walk<'a> {
    pub(super) fn split(
        self,
        block: &'a Block,
        split: usize,
        scratch: &'a mut Scratch,
        partial: &'a mut Partial,
    ) -> Split<'a> {
        Split { walk: self, block, split, scratch, partial }
    }

    /// `(row within the sequence, query head)` of every query of a block.
    pub(super) fn queries_of(&self, block: &Block) -> impl Iterator<Item = (usize, usize)> + use<> {
        let heads = self.attention.head_group(&self.layer.spec);
        let first = block.kv_head * heads;
        let rows = block.rows.clone();
        rows.flat_map(move |row| (first..first + heads).map(move |head| (row, head)))
    }

    fn prepare(&self, block: &Block, scratch: &mut Scratch) {
        let g = &self.layer.geometry;
        let sequence = &self.plan.sequences[block.sequence];
        scratch.queries.clear();
        scratch.queries.extend(self.queries_of(block).map(|(row, head)| Query {
            head,
            position: sequence.before.tokens + row,
            view: sequence.views[row],
        }));
        scratch.resize(scratch.queries.len(), g);
        for (number, (row, head)) in self.queries_of(block).enumerate() {
            let vector = &self.queries.row(sequence.rows.start + row)[head * g.head_dim..];
            let scaled = scratch.scaled.row_mut(number).as_flattened_mut();
            for (scaled, q) in scaled.iter_mut().zip(&vector[..g.head_dim]) {
                *scaled = q * self.attention.scale;
            }
        }
    }
}

/// A tile of a sequence, as one kv head sees it.
struct Tile<'a> {
    walk: Walk<'a>,
    sequence: &'a SequencePlan,
    slot: &'a Slot,
    kv_head: usize,
    positions: Range<usize>,
}

/// Tiles of a split: those that start in it.
fn tiles(g: &Geometry, split: usize, end: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let sinks = g.sinks;
    let split = split * SPLIT_TOKENS..end.min((split + 1) * SPLIT_TOKENS);
    let in_sinks = (0..sinks.min(split.end)).step_by(TILE).map(move |t| t..sinks.min(t + TILE));
    let first = sinks + split.start.saturating_sub(sinks).next_multiple_of(TILE);
    let after = (first..split.end.max(first)).step_by(TILE).map(move |t| t..t + TILE);
    let start = split.start;
    let from_start = move |tile: &Range<usize>| tile.start >= start;
    in_sinks.filter(from_start).chain(after).map(move |tile| tile.start..tile.end.min(end))
}

impl Kernel for Split<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { walk, block, split, scratch, partial } = self;
        let g = &walk.layer.geometry;
        let sequence = &walk.plan.sequences[block.sequence];
        walk.prepare(block, scratch);
        partial.reset(scratch.queries.len(), g.head_dim.next_multiple_of(LANES));
        let Some(Some(slot)) = walk.layer.slots.get(sequence.before.slot) else { return };
        let end = sequence.before.tokens + block.rows.end;
        for positions in tiles(g, split, end) {
            let tile = Tile { walk, sequence, slot, kv_head: block.kv_head, positions };
            if scratch.queries.iter().all(|query| tile.visible(query).is_empty()) {
                continue;
            }
            tile.logits(simd, scratch);
            tile.softmax(simd, scratch, partial);
            tile.sum_codes(simd, scratch, partial);
            tile.sum_full(simd, scratch, partial);
        }
    }
}

impl<'a> Tile<'a> {
    fn geometry(&self) -> &'a Geometry {
        &self.walk.layer.geometry
    }

    /// Tokens of the tile that a query sees.
    fn visible(&self, query: &Query) -> Range<usize> {
        let (tile, window) = (&self.positions, self.walk.layer.spec.window.unwrap_or(usize::MAX));
        let first = (query.position + 1).saturating_sub(window).max(tile.start);
        let end = tile.end.min(query.position + 1);
        first.saturating_sub(tile.start)..end.saturating_sub(tile.start)
    }

    /// How many of the tile's first tokens a query sees as codes.
    fn coded(&self, query: &Query) -> KeyValue<usize> {
        let tile = &self.positions;
        if tile.start < self.geometry().sinks {
            return KeyValue::both(0);
        }
        let seen = |(view, packs): (usize, bool)| if packs { view } else { 0 };
        let end = query.view.zip(self.walk.layer.spec.packs()).map(seen);
        end.map(|end| end.clamp(tile.start, tile.end) - tile.start)
    }

    /// The page of a token of the tile, and the token's number in it.
    fn page(&self, token: usize) -> Option<(&'a Page, usize)> {
        let position = self.positions.start + token;
        if position < self.geometry().sinks {
            return None;
        }
        let (index, token) = self.geometry().locate(position);
        let id = *self.sequence.before.tables[self.walk.group].get(index)?;
        if id == PageId::DROPPED {
            return None;
        }
        let page = self.walk.layer.pages.get(id.index())?.as_ref()?;
        Some((page, token))
    }

    fn source(&self, token: usize) -> Source<'a> {
        let page = self.page(token).map(|(page, _)| page);
        Source { geometry: self.geometry(), slot: self.slot, page, head: self.kv_head }
    }

    /// The groups of tokens of the tile.
    fn groups(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (tokens, group) = (self.positions.len(), self.geometry().group);
        (0..tokens).step_by(group).map(move |first| first..tokens.min(first + group))
    }

    /// Logits of the tile's tokens; only the visible ones mean anything.
    #[inline(always)]
    fn logits<S: Simd>(&self, simd: S, scratch: &mut Scratch) {
        let g = self.geometry();
        for group in self.groups() {
            let sees = |query: &Query, as_codes: bool| {
                let visible = self.visible(query);
                let overlaps = visible.start < group.end && group.start < visible.end;
                overlaps && (group.start < self.coded(query).keys) == as_codes
            };
            self.activate(scratch, |query| sees(query, true));
            if !scratch.active.is_empty()
                && let Some((page, token)) = self.page(group.start)
                && let Tensor::Packed { codes, scales, zeros } = &page.keys
                && let Some(bits) = self.walk.layer.spec.format.keys.bits
            {
                let row = (self.kv_head * g.page_tokens + token) / g.group;
                let params = row * g.head_dim..(row + 1) * g.head_dim;
                scratch.params.set(simd, 0, &scales[params.clone()], &zeros[params]);
                let padding = g.head_dim..g.head_dim.next_multiple_of(STRIPE);
                scratch.params.clear(padding);
                let order = g.key_order(bits);
                let codes = &codes[row * order.words()..][..order.words()];
                self.prefetch_keys(simd, order, group.start + TILE);
                let first = group.start / LANES;
                match bits {
                    Bits::Two => simd.call(KeyCodes::<4> { scratch, order, codes, first }),
                    Bits::Four => simd.call(KeyCodes::<2> { scratch, order, codes, first }),
                    Bits::Eight => simd.call(KeyCodes::<1> { scratch, order, codes, first }),
                }
            }
            self.activate(scratch, |query| sees(query, false));
            if scratch.active.is_empty() {
                continue;
            }
            let first = self.positions.start;
            let positions = first + group.start..first + group.end;
            scratch.full.load_keys(simd, self.source(group.start), positions);
            for &query in &scratch.active {
                let scaled = &scratch.scaled.row(query).as_flattened()[..g.head_dim];
                let logits = scratch.weights.row_mut(query).as_flattened_mut();
                // The last group may be cut short in the middle of a vector, but not in memory.
                let logits = &mut logits[group.start..group.start + g.group];
                query_keys(simd, scaled, &scratch.full.keys, g.group, logits);
            }
        }
    }

    /// Lists the queries for which `f` holds.
    fn activate(&self, scratch: &mut Scratch, f: impl Fn(&Query) -> bool) {
        let Scratch { queries, active, .. } = scratch;
        active.clear();
        active.extend((0..queries.len()).filter(|&query| f(&queries[query])));
    }

    /// Turns logits into weights relative to the running maximum, 0 where a token is not visible.
    #[inline(always)]
    fn softmax<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        let attention = self.walk.attention;
        let plain = attention.softcap.is_none() && attention.alibi_slopes.is_none();
        for (number, query) in scratch.queries.iter().enumerate() {
            let visible = self.visible(query);
            let weights = scratch.weights.row_mut(number).as_flattened_mut();
            if visible.is_empty() {
                weights.fill(0.0);
                continue;
            }
            if !plain {
                for token in visible.clone() {
                    let position = self.positions.start + token;
                    // The scale is in the query already.
                    let dot = weights[token] / attention.scale;
                    weights[token] = attention.logit(query.head, query.position, position, dot);
                }
            }
            let (before, rest) = weights.split_at_mut(visible.start);
            let (seen, after) = rest.split_at_mut(visible.len());
            before.fill(0.0);
            after.fill(0.0);
            let largest = slices::max(simd, seen);
            if largest == f32::NEG_INFINITY && seen.iter().all(|&weight| weight == largest) {
                // No weight at all, and no maximum to measure it by.
                seen.fill(0.0);
                continue;
            }
            let maximum = partial.raise(number, largest);
            partial.add_denominator(number, slices::exp_in_place(simd, seen, maximum));
        }
    }

    /// Adds the weighted values that are seen as codes.
    #[inline(always)]
    fn sum_codes<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        let g = self.geometry();
        let Some(bits) = self.walk.layer.spec.format.values.bits else { return };
        let sees = |query: &Query| {
            let (visible, coded) = (self.visible(query), self.coded(query).values);
            visible.start..visible.end.min(coded)
        };
        self.activate(scratch, |query| !sees(query).is_empty());
        let mut tokens = TILE..0;
        for &query in &scratch.active {
            let seen = sees(&scratch.queries[query]);
            tokens = tokens.start.min(seen.start)..tokens.end.max(seen.end);
        }
        if tokens.is_empty() {
            return;
        }
        let order = g.value_order(bits);
        let per_word = bits.codes_per_word();
        let words = tokens.start / per_word..tokens.end.div_ceil(per_word);
        let mut padded = std::mem::take(&mut scratch.padded);
        // At 8 bits a row is four tokens.
        let mut rows: [Row<'_>; TILE / 4] = [&[]; TILE / 4];
        self.value_rows(order, words.clone(), &mut padded, &mut rows);
        // Rows before the first one that counts are empty.
        let rows = &rows[..words.end];
        let groups = g.head_dim.div_ceil(g.group);
        for index in 0..groups {
            self.prefetch_values(simd, order, index, groups);
            let skip_zeros = self.value_params(simd, index, tokens.end, &mut scratch.params)
                || self.walk.layer.spec.window.is_some();
            for operand in 0..scratch.active.len() {
                let query = scratch.active[operand];
                let coded = sees(&scratch.queries[query]).end;
                scratch.fold_values(simd, operand, bits, coded, skip_zeros);
            }
            let channels = index * g.group..g.head_dim.min((index + 1) * g.group);
            match bits {
                Bits::Two => {
                    simd.call(ValueCodes::<4> { scratch, rows, channels, partial });
                }
                Bits::Four => {
                    simd.call(ValueCodes::<2> { scratch, rows, channels, partial });
                }
                Bits::Eight => {
                    simd.call(ValueCodes::<1> { scratch, rows, channels, partial });
                }
            }
        }
        scratch.padded = padded;
    }

    /// The rows of words of values, in whole vectors: copied to `padded` if they are not.
    fn value_rows<'b>(
        &self,
        order: ValueOrder,
        words: Range<usize>,
        padded: &'b mut Vec<[u32; LANES]>,
        rows: &mut [Row<'b>],
    ) where
        'a: 'b,
    {
        let find = |row: usize| {
            let (page, token) = self.page(row * order.bits.codes_per_word())?;
            let Tensor::Packed { codes, .. } = &page.values else { return None };
            let first = order.words(self.kv_head * self.geometry().page_tokens + token);
            codes.get(first..first + order.width())
        };
        if order.width().is_multiple_of(LANES) {
            for row in words {
                rows[row] = find(row).unwrap_or_default().as_chunks().0;
            }
            return;
        }
        let vectors = order.width().div_ceil(LANES);
        padded.clear();
        padded.resize(words.len() * vectors, [0; LANES]);
        for (row, to) in words.clone().zip(padded.chunks_exact_mut(vectors)) {
            let found = find(row).unwrap_or_default();
            to.as_flattened_mut()[..found.len()].copy_from_slice(found);
        }
        for (row, to) in words.zip(padded.chunks_exact(vectors)) {
            rows[row] = to;
        }
    }

    /// Scales and zeros of group `index` of the channels, of tokens up to `end`; 0 from there on.
    /// Says whether a zero is NaN.
    #[inline(always)]
    fn value_params<S: Simd>(
        &self,
        simd: S,
        index: usize,
        end: usize,
        params: &mut Params,
    ) -> bool {
        let g = self.geometry();
        let groups = g.head_dim.div_ceil(g.group);
        let mut poisoned = false;
        let mut filled = 0;
        for group in self.groups().take_while(|group| group.start < end) {
            let length = group.len().min(end - group.start);
            if let Some((page, token)) = self.page(group.start)
                && let Tensor::Packed { scales, zeros, .. } = &page.values
            {
                let row = (self.kv_head * groups + index) * g.page_tokens + token;
                let range = row..row + length;
                let (scales, zeros) = (&scales[range.clone()], &zeros[range]);
                poisoned |= params.set(simd, group.start, scales, zeros);
            } else {
                params.clear(group.start..group.start + length);
            }
            filled = group.start + length;
        }
        params.clear(filled..TILE);
        poisoned
    }

    /// Asks for a group of keys of the next tile: this one's work hides the way from memory, which
    /// the hardware cannot foresee, for pages lie anywhere.
    #[inline(always)]
    fn prefetch_keys<S: Simd>(&self, simd: S, order: KeyOrder, token: usize) {
        let g = self.geometry();
        if let Some((page, token)) = self.page(token)
            && let Tensor::Packed { codes, scales, zeros } = &page.keys
        {
            let row = (self.kv_head * g.page_tokens + token) / g.group;
            prefetch(simd, &codes[row * order.words()..][..order.words()]);
            prefetch(simd, &scales[row * g.head_dim..][..g.head_dim]);
            prefetch(simd, &zeros[row * g.head_dim..][..g.head_dim]);
        }
    }

    /// Asks for the `index`-th part of the values of the next tile.
    #[inline(always)]
    fn prefetch_values<S: Simd>(&self, simd: S, order: ValueOrder, index: usize, groups: usize) {
        let g = self.geometry();
        for first in (0..TILE).step_by(g.group) {
            if let Some((page, token)) = self.page(TILE + first)
                && let Tensor::Packed { codes, scales, zeros } = &page.values
            {
                let row = (self.kv_head * groups + index) * g.page_tokens + token;
                prefetch(simd, &scales[row..row + g.group]);
                prefetch(simd, &zeros[row..row + g.group]);
                let words = order.words(g.group);
                let first = order.words(self.kv_head * g.page_tokens + token);
                let part = words * index / groups..words * (index + 1) / groups;
                prefetch(simd, &codes[first + part.start..first + part.end]);
            }
        }
    }

    /// Adds the weighted values that are seen in full precision.
    #[inline(always)]
    fn sum_full<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        for group in self.groups() {
            let sees = |query: &Query| {
                let (visible, coded) = (self.visible(query), self.coded(query).values);
                visible.start.max(coded).max(group.start)..visible.end.min(group.end)
            };
            self.activate(scratch, |query| !sees(query).is_empty());
            let mut tokens = group.end..group.end;
            for &query in &scratch.active {
                tokens.start = tokens.start.min(sees(&scratch.queries[query]).start);
            }
            if tokens.is_empty() {
                continue;
            }
            let first = self.positions.start;
            let positions = first + tokens.start..first + tokens.end;
            scratch.full.load_values(simd, self.source(group.start), positions);
            let width = scratch.full.width;
            for &query in &scratch.active {
                let seen = sees(&scratch.queries[query]);
                let rows = &scratch.full.values[(seen.start - tokens.start) * width..];
                let weights = &scratch.weights.row(query).as_flattened()[seen];
                weighted_sum(simd, weights, rows, width, 0..width, partial.sums_mut(query));
            }
        }
    }
}

/// Asks for the cache lines of `x`.
#[inline(always)]
fn prefetch<S: Simd, T>(simd: S, x: &[T]) {
    const LINE: usize = 64;
    for element in x.iter().step_by(LINE / size_of::<T>()) {
        simd.prefetch(std::ptr::from_ref(element).cast());
    }
}
