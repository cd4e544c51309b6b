//! The loop over packed values: a tile times the softmax weights.

use super::{
    TILE,
    dots::{Product, Words},
    keys::params_ahead,
    operand::Params,
    partial::Partial,
    places::MIN_GROUP,
    scratch::{ParamBuffer, Scratch},
};
use crate::{
    cache::{ValueGroup, ValueLayout},
    isa::{Kernel, LANES, Simd},
};
use half::f16;
use std::ops::Range;

/// A row of words in whole vectors.
pub(super) type Row<'a> = &'a [[u32; LANES]];

/// The values of the groups of tokens of a tile, where there are some.
pub(super) type ValueGroups<'a> = [Option<ValueGroup<'a>>; TILE / MIN_GROUP];

/// Adds the weighted values of a tile to the active queries' sums.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) layout: ValueLayout,
    pub(super) scratch: &'a mut Scratch,
    pub(super) groups: &'a ValueGroups<'a>,
    /// Of the next tile.
    pub(super) next: &'a ValueGroups<'a>,
    pub(super) words: ValueWords<'a>,
    /// Tokens from here on do not count.
    pub(super) end: usize,
    pub(super) partial: &'a mut Partial,
}

/// All rows of a tile up to the last one that counts, those before the first one empty, and the rows
/// of the next tile, or the same again.
#[derive(Clone, Copy)]
pub(super) struct ValueWords<'a> {
    pub(super) rows: &'a [Row<'a>],
    pub(super) next: &'a [Row<'a>],
}

impl Words for ValueWords<'_> {
    #[inline(always)]
    fn get<const V: usize>(&self, row: usize, first: usize) -> &[[u32; LANES]; V] {
        let row = self.rows.get(row).copied().unwrap_or_default();
        let words = row.get(first..).and_then(<[_]>::first_chunk);
        words.unwrap_or(const { &[[0; LANES]; V] })
    }

    #[inline(always)]
    fn next(&self, row: usize, first: usize) -> *const [u32; LANES] {
        let next = self.next.get(row).copied().unwrap_or_default();
        next.as_ptr().wrapping_add(first)
    }
}

impl<const QUADS: usize> Kernel for ValueCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { layout, scratch, groups, next, words, end, partial } = self;
        let (head_dim, group) = (layout.order.channels, layout.group);
        for index in 0..head_dim.div_ceil(group) {
            let part = Channels { layout, index, end };
            part.ahead(simd, next);
            let vectors = index * group..head_dim.min((index + 1) * group);
            let vectors = vectors.start / LANES..vectors.end.div_ceil(LANES);
            for first in (0..scratch.active.len()).step_by(2) {
                part.fold::<S, QUADS>(simd, scratch, groups, first);
                let (operands, planes) = scratch.operands.pair(0);
                let (vectors, rows) = (vectors.clone(), words.rows.len());
                // Once is enough.
                let next = if first == 0 { words.next } else { words.rows };
                let words = ValueWords { next, ..words };
                let product = Product { words, rows, vectors, operands, planes, add: true };
                match scratch.active[first..] {
                    [a, b, ..] => {
                        product.run::<S, QUADS, 2>(simd, partial.two_sums_mut(a, b));
                    }
                    [a] => product.run::<S, QUADS, 1>(simd, [partial.sums_mut(a)]),
                    [] => {}
                }
            }
        }
    }
}

/// One group of channels of values.
#[derive(Clone, Copy)]
struct Channels {
    layout: ValueLayout,
    index: usize,
    /// Tokens from here on do not count.
    end: usize,
}

impl Channels {
    /// Scales and zeros of a group of tokens.
    #[inline(always)]
    fn params<'a>(self, group: &Option<ValueGroup<'a>>) -> Option<[&'a [f16]; 2]> {
        let ValueGroup { scales, zeros, .. } = group.as_ref()?;
        let range = self.index * self.layout.group..(self.index + 1) * self.layout.group;
        Some([scales.get(range.clone())?, zeros.get(range)?])
    }

    /// Those of all tokens of a tile where they lie, if all of them count.
    #[inline(always)]
    fn parts<'a>(self, groups: &ValueGroups<'a>) -> Option<[Params<'a>; TILE / MIN_GROUP]> {
        if self.end < TILE {
            return None;
        }
        let mut parts = [Params::default(); TILE / MIN_GROUP];
        for (part, group) in parts.iter_mut().zip(&groups[..TILE / self.layout.group]) {
            let [scales, zeros] = self.params(group)?;
            *part = Params::new(scales, zeros);
        }
        Some(parts)
    }

    /// Those of the tokens that count, gathered.
    fn gather(self, groups: &ValueGroups<'_>, params: &mut ParamBuffer) {
        let length = self.layout.group;
        params.clear(0..TILE);
        for (group, first) in groups.iter().zip((0..self.end).step_by(length)) {
            if let Some([scales, zeros]) = self.params(group) {
                let counted = length.min(self.end - first);
                params.set(first, &scales[..counted], &zeros[..counted]);
            }
        }
    }

    /// Folds two active queries' weights, or the last one's.
    #[inline(always)]
    fn fold<S: Simd, const QUADS: usize>(
        self,
        simd: S,
        scratch: &mut Scratch,
        groups: &ValueGroups<'_>,
        first: usize,
    ) {
        let Scratch { operands, active, weights, coded, params, views, .. } = scratch;
        let found = self.parts(groups);
        let gathered;
        let params = match &found {
            Some(parts) => &parts[..TILE / self.layout.group],
            None => {
                self.gather(groups, params);
                gathered = [params.get(TILE)];
                &gathered
            }
        };
        let active = &active[first..active.len().min(first + 2)];
        if active.iter().any(|&query| views[query].coded.values < TILE) {
            for (i, &query) in active.iter().enumerate() {
                let length = views[query].coded.values;
                let to = coded.row_mut(i).as_flattened_mut();
                to[..length].copy_from_slice(&weights.row(query).as_flattened()[..length]);
                to[length..].fill(0.0);
            }
            let rows = (&*coded, &[0, 1][..active.len()]);
            operands.fold_rows::<S, QUADS>(simd, 0, rows, params);
        } else {
            operands.fold_rows::<S, QUADS>(simd, 0, (weights, active), params);
        }
    }

    /// Asks for the scales and zeros of the next tile.
    #[inline(always)]
    fn ahead<S: Simd>(self, simd: S, next: &ValueGroups<'_>) {
        for group in &next[..TILE / self.layout.group] {
            let Some(params) = self.params(group) else { return };
            params.iter().for_each(|params| params_ahead(simd, params));
        }
    }
}

/// The rows of words of values, which are whole vectors.
pub(super) fn value_rows<'a>(layout: ValueLayout, groups: &ValueGroups<'a>, rows: &mut [Row<'a>]) {
    let ValueLayout { order, group } = layout;
    for (rows, group) in rows.chunks_mut(group / order.bits.codes_per_word()).zip(groups) {
        let words = group.map_or(&[][..], |group| group.codes);
        for (row, words) in rows.iter_mut().zip(words.chunks_exact(order.width())) {
            *row = words.as_chunks().0;
        }
    }
}

/// The rows of words of values, which are not whole vectors: copied and filled up.
pub(super) fn pad_value_rows<'a>(
    layout: ValueLayout,
    groups: &ValueGroups<'_>,
    words: Range<usize>,
    padded: &'a mut Vec<[u32; LANES]>,
    rows: &mut [Row<'a>],
) {
    let ValueLayout { order, group } = layout;
    let (per_group, vectors) = (group / order.bits.codes_per_word(), order.width().div_ceil(LANES));
    padded.clear();
    padded.resize(words.len() * vectors, [0; LANES]);
    for (row, to) in words.clone().zip(padded.chunks_exact_mut(vectors)) {
        let codes = groups[row / per_group].map_or(&[][..], |group| group.codes);
        let found = codes.chunks_exact(order.width()).nth(row % per_group).unwrap_or_default();
        to.as_flattened_mut()[..found.len()].copy_from_slice(found);
    }
    for (row, to) in words.zip(padded.chunks_exact(vectors)) {
        rows[row] = to;
    }
}
