//! One pass over one split of a sequence, for all queries of a block.

use super::{
    Block, SPLIT_TOKENS, TILE,
    full::Source,
    keys::KeyCodes,
    partial::Partial,
    places::{MIN_GROUP, Place, Places},
    products::{query_keys, weighted_sum},
    promoted::PromotedCodes,
    scratch::{Query, Scratch, View},
    values::{Row, ValueCodes, ValueGroups, ValueWords, pad_value_rows, value_rows},
};
use crate::{
    Matrix,
    cache::{Geometry, KeyGroup, KeyLayout, LayerCache, Slot, ValueGroup, ValueLayout},
    isa::{Kernel, LANES, Simd, slices},
};
use kivi_core::{Attention, Bits, KeyBias, StepPlan};
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
    /// Of each kv head.
    partials: &'a mut Vec<Partial>,
}

impl<'a> Walk<'a> {
    pub(super) fn split(
        self,
        block: &'a Block,
        split: usize,
        scratch: &'a mut Scratch,
        partials: &'a mut Vec<Partial>,
    ) -> Split<'a> {
        Split { walk: self, block, split, scratch, partials }
    }

    /// `(row within the sequence, query head)` of every query of a kv head of a block.
    pub(super) fn queries_of(
        &self,
        block: &Block,
        kv_head: usize,
    ) -> impl Iterator<Item = (usize, usize)> + use<> {
        let heads = self.attention.head_group(&self.layer.spec);
        let first = kv_head * heads;
        let rows = block.rows.clone();
        rows.flat_map(move |row| (first..first + heads).map(move |head| (row, head)))
    }

    fn prepare(&self, block: &Block, scratch: &mut Scratch) {
        let g = &self.layer.geometry;
        let sequence = &self.plan.sequences[block.sequence];
        scratch.queries.clear();
        scratch.queries.extend(self.queries_of(block, 0).map(|(row, head)| Query {
            head,
            position: sequence.before.tokens + row,
            view: sequence.views[row],
        }));
        scratch.resize(block.kv_heads.len(), scratch.queries.len(), g);
        for (kv_head, rows) in block.kv_heads.clone().zip(&mut scratch.heads) {
            for (number, (row, head)) in self.queries_of(block, kv_head).enumerate() {
                let vector = &self.queries.row(sequence.rows.start + row)[head * g.head_dim..];
                let scaled = rows.row_mut(number).as_flattened_mut();
                for (scaled, q) in scaled.iter_mut().zip(&vector[..g.head_dim]) {
                    *scaled = q * self.attention.scale;
                }
            }
        }
    }
}

/// A tile of a sequence, as one kv head sees it.
pub(super) struct Tile<'a> {
    walk: Walk<'a>,
    slot: &'a Slot,
    kv_head: usize,
    positions: Range<usize>,
    pages: Places<'a>,
    /// The kv head that is read after this one, and where.
    next: (usize, Places<'a>),
}

/// Tiles of a split: those that start in it.
fn tiles(g: &Geometry, number: usize, end: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let sinks = g.sinks;
    let split = number * SPLIT_TOKENS..end.min((number + 1) * SPLIT_TOKENS);
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
        let Self { walk, block, split, scratch, partials } = self;
        let g = &walk.layer.geometry;
        let sequence = &walk.plan.sequences[block.sequence];
        let kv_heads = block.kv_heads.clone();
        walk.prepare(block, scratch);
        partials.resize_with(kv_heads.len(), Partial::default);
        for partial in partials.iter_mut() {
            partial.reset(scratch.queries.len(), g.head_dim.next_multiple_of(LANES));
        }
        let Some(Some(slot)) = walk.layer.slots.get(sequence.before.slot) else { return };
        let end = sequence.before.tokens + block.rows.end;
        let mut known: Option<Places<'_>> = None;
        for positions in tiles(g, split, end) {
            let start = positions.start;
            let pages = known.take().unwrap_or_else(|| walk.places(sequence, start));
            // The tile after the sinks is not one further.
            known = (start >= g.sinks).then(|| walk.places(sequence, start + TILE));
            let Scratch { views, queries, .. } = scratch;
            views.clear();
            views.extend(queries.iter().map(|query| walk.view(query, &positions)));
            if views.iter().all(|view| view.visible.is_empty()) {
                continue;
            }
            for (number, partial) in partials.iter_mut().enumerate() {
                let kv_head = kv_heads.start + number;
                let next = if kv_head + 1 < kv_heads.end {
                    (kv_head + 1, pages)
                } else {
                    (kv_heads.start, known.unwrap_or_default())
                };
                let positions = positions.clone();
                let tile = Tile { walk, slot, kv_head, positions, pages, next };
                std::mem::swap(&mut scratch.scaled, &mut scratch.heads[number]);
                tile.attend(simd, scratch, partial);
                std::mem::swap(&mut scratch.scaled, &mut scratch.heads[number]);
            }
        }
    }
}

impl Walk<'_> {
    fn view(&self, query: &Query, tile: &Range<usize>) -> View {
        let LayerCache { spec, geometry, .. } = self.layer;
        let first = (query.position + 1).saturating_sub(spec.window.unwrap_or(usize::MAX));
        let first = first.max(tile.start);
        let end = tile.end.min(query.position + 1);
        let visible = first.saturating_sub(tile.start)..end.saturating_sub(tile.start);
        let coded = query.view.zip(spec.packs()).map(|(view, packs)| {
            let end = if packs && tile.start >= geometry.sinks { view } else { 0 };
            end.clamp(tile.start, tile.end) - tile.start
        });
        View { visible, coded }
    }
}

impl<'a> Tile<'a> {
    fn geometry(&self) -> &'a Geometry {
        &self.walk.layer.geometry
    }

    /// Adds what this tile contributes to the outputs of the head's queries.
    #[inline(always)]
    fn attend<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        self.logits(simd, scratch);
        self.add_key_bias(simd, scratch);
        self.softmax(simd, scratch, partial);
        self.sum_codes(simd, scratch, partial);
        self.sum_full(simd, scratch, partial);
    }

    /// A group of keys of this head, or of the one read next.
    fn keys(&self, index: usize, layout: KeyLayout) -> [Option<KeyGroup<'a>>; 2] {
        let find = |head: usize, place: Place<'a>| {
            let (page, token) = place?;
            page.key_group(self.geometry(), layout, [head, token])
        };
        [find(self.kv_head, self.pages[index]), find(self.next.0, self.next.1[index])]
    }

    /// As [`keys`](Self::keys), of values.
    fn values(&self, index: usize, layout: ValueLayout) -> [Option<ValueGroup<'a>>; 2] {
        let find = |head: usize, place: Place<'a>| {
            let (page, token) = place?;
            page.value_group(self.geometry(), layout, [head, token])
        };
        [find(self.kv_head, self.pages[index]), find(self.next.0, self.next.1[index])]
    }

    fn source(&self, group: usize) -> Source<'a> {
        let page = self.pages[group].map(|(page, _)| page);
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
        for (index, tokens) in self.groups().enumerate() {
            let sees = |view: &View, as_codes: bool| {
                let overlaps = view.visible.start < tokens.end && tokens.start < view.visible.end;
                overlaps && (tokens.start < view.coded.keys) == as_codes
            };
            scratch.activate(|view| sees(view, true));
            if !scratch.active.is_empty()
                && let Some(bits) = self.walk.layer.spec.format.keys.bits
                && let layout = g.key_layout(bits)
                && let [Some(group), next] = self.keys(index, layout)
            {
                let (order, first) = (layout.order, tokens.start / LANES);
                match bits {
                    Bits::Two => simd.call(KeyCodes::<4> { scratch, order, group, first, next }),
                    Bits::Four => simd.call(KeyCodes::<2> { scratch, order, group, first, next }),
                    Bits::Eight => simd.call(KeyCodes::<1> { scratch, order, group, first, next }),
                }
                if let Some(order) = layout.promoted {
                    simd.call(PromotedCodes { scratch, order, group, first, next });
                }
            }
            scratch.activate(|view| sees(view, false));
            if scratch.active.is_empty() {
                continue;
            }
            let first = self.positions.start;
            let positions = first + tokens.start..first + tokens.end;
            scratch.full.load_keys(simd, self.source(index), positions);
            for &query in &scratch.active {
                let scaled = &scratch.scaled.row(query).as_flattened()[..g.head_dim];
                let logits = scratch.weights.row_mut(query).as_flattened_mut();
                // The last group may be cut short in the middle of a vector, but not in memory.
                let logits = &mut logits[tokens.start..tokens.start + g.group];
                query_keys(simd, scaled, &scratch.full.keys, g.group, logits);
            }
        }
    }

    /// Adds the part of the logits that the cached keys do not hold: each query, turned back to the
    /// beginning of the tile, times the rotated biases of a tile that begins at 0.
    #[inline(always)]
    fn add_key_bias<S: Simd>(&self, simd: S, scratch: &mut Scratch) {
        const { assert!(KeyBias::BLOCK == TILE) };
        let Some(bias) = &self.walk.attention.key_bias else { return };
        let head_dim = self.geometry().head_dim;
        let Scratch { views, scaled, weights, turned, angles, .. } = scratch;
        bias.angles(self.positions.start, angles);
        for (query, view) in views.iter().enumerate() {
            if view.visible.is_empty() {
                continue;
            }
            turned.clear();
            turned.extend_from_slice(&scaled.row(query).as_flattened()[..head_dim]);
            bias.turn_back(turned, angles);
            let logits = weights.row_mut(query).as_flattened_mut();
            weighted_sum(simd, turned, bias.block(self.kv_head), TILE, 0..TILE, logits);
        }
    }

    /// Turns logits into weights relative to the running maximum, 0 where a token is not visible.
    #[inline(always)]
    fn softmax<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        let attention = self.walk.attention;
        let plain = attention.softcap.is_none() && attention.alibi_slopes.is_none();
        let first = self.kv_head * attention.head_group(&self.walk.layer.spec);
        for (number, query) in scratch.queries.iter().enumerate() {
            let visible = scratch.views[number].visible.clone();
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
                    weights[token] =
                        attention.logit(first + query.head, query.position, position, dot);
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
        let Some(bits) = self.walk.layer.spec.format.values.bits else { return };
        let sees = |view: &View| view.visible.start..view.visible.end.min(view.coded.values);
        scratch.activate(|view| !sees(view).is_empty());
        let seen = scratch.active.iter().map(|&query| sees(&scratch.views[query]));
        let all = seen.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let Some(Range { start, end }) = all else { return };
        let (layout, per_word) = (self.geometry().value_layout(bits), bits.codes_per_word());
        let mut padded = std::mem::take(&mut scratch.padded);
        // At 8 bits a row is four tokens.
        let mut rows: [Row<'_>; TILE / 4] = [&[]; TILE / 4];
        let words = start / per_word..end.div_ceil(per_word);
        let mut groups: ValueGroups<'a> = [None; TILE / MIN_GROUP];
        let mut next = groups;
        for i in 0..TILE / layout.group {
            [groups[i], next[i]] = self.values(i, layout);
        }
        let (groups, next) = (&groups, &next);
        let mut next_rows: [Row<'_>; TILE / 4] = [&[]; TILE / 4];
        if layout.order.width().is_multiple_of(LANES) {
            value_rows(layout, groups, &mut rows[..words.end]);
            rows[..words.start].fill(&[]);
            value_rows(layout, next, &mut next_rows);
        } else {
            pad_value_rows(layout, groups, words.clone(), &mut padded, &mut rows);
        }
        let words = ValueWords { rows: &rows[..words.end], next: &next_rows };
        match bits {
            Bits::Two => {
                simd.call(ValueCodes::<4> { layout, scratch, groups, next, words, end, partial });
            }
            Bits::Four => {
                simd.call(ValueCodes::<2> { layout, scratch, groups, next, words, end, partial });
            }
            Bits::Eight => {
                simd.call(ValueCodes::<1> { layout, scratch, groups, next, words, end, partial });
            }
        }
        scratch.padded = padded;
    }

    /// Adds the weighted values that are seen in full precision.
    #[inline(always)]
    fn sum_full<S: Simd>(&self, simd: S, scratch: &mut Scratch, partial: &mut Partial) {
        for (index, group) in self.groups().enumerate() {
            let sees = |view: &View| {
                let View { visible, coded } = view;
                visible.start.max(coded.values).max(group.start)..visible.end.min(group.end)
            };
            scratch.activate(|view| !sees(view).is_empty());
            let seen = scratch.active.iter().map(|&query| sees(&scratch.views[query]).start);
            let Some(start) = seen.min() else { continue };
            let first = self.positions.start;
            let positions = first + start..first + group.end;
            scratch.full.load_values(simd, self.source(index), positions);
            let width = scratch.full.width;
            for &query in &scratch.active {
                let seen = sees(&scratch.views[query]);
                let rows = &scratch.full.values[(seen.start - start) * width..];
                let weights = &scratch.weights.row(query).as_flattened()[seen];
                weighted_sum(
                    simd,
                    weights,
                    rows,
                    width,
                    0..width,
                    partial.sums_mut(query).as_flattened_mut(),
                );
            }
        }
    }
}
