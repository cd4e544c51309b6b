//! The loop over packed values: a tile times the softmax weights.

use super::{
    TILE,
    dots::{Product, Words},
    keys::params_ahead,
    partial::Partial,
    scratch::{ParamBuffer, Scratch},
    walk::{Place, Tile},
};
use crate::{
    cache::{Geometry, Page, Tensor, ValueOrder},
    isa::{Kernel, LANES, Simd},
};
use half::f16;

/// A row of words in whole vectors.
pub(super) type Row<'a> = &'a [[u32; LANES]];

/// Adds the weighted values of a tile to the active queries' sums.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) tile: &'a Tile<'a>,
    pub(super) scratch: &'a mut Scratch,
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
    fn get<const V: usize>(&self, row: usize, first: usize) -> Option<&[[u32; LANES]; V]> {
        self.rows.get(row)?.get(first..).and_then(<[_]>::first_chunk)
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
        let Self { tile, scratch, words, end, partial } = self;
        let g = tile.geometry();
        let groups = g.head_dim.div_ceil(g.group);
        for index in 0..groups {
            let part = Channels { index, end };
            part.load(tile, &mut scratch.params);
            part.ahead(simd, tile);
            let vectors = index * g.group..g.head_dim.min((index + 1) * g.group);
            let vectors = vectors.start / LANES..vectors.end.div_ceil(LANES);
            for first in (0..scratch.active.len()).step_by(2) {
                part.fold::<S, QUADS>(simd, scratch, first);
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

/// A group of tokens of packed values, as one kv head sees them.
#[derive(Clone, Copy)]
pub(super) struct ValueGroup<'a> {
    geometry: &'a Geometry,
    page: &'a Page,
    head: usize,
    /// Its first token, within the page.
    token: usize,
}

impl<'a> ValueGroup<'a> {
    pub(super) fn new(
        geometry: &'a Geometry,
        head: usize,
        (page, token): (&'a Page, usize),
    ) -> Self {
        Self { geometry, page, head, token }
    }

    /// The words of its codes.
    #[inline(always)]
    pub(super) fn words(&self, order: ValueOrder) -> Option<&'a [u32]> {
        let Tensor::Packed { codes, .. } = &self.page.values else { return None };
        let first = order.words(self.head * self.geometry.page_tokens + self.token);
        codes.get(first..first + order.words(self.geometry.group))
    }

    /// Scales and zeros of one group of channels.
    #[inline(always)]
    fn params(&self, index: usize) -> Option<[&'a [f16]; 2]> {
        let Geometry { head_dim, group, page_tokens, .. } = *self.geometry;
        let Tensor::Packed { scales, zeros, .. } = &self.page.values else { return None };
        let first = (self.head * head_dim.div_ceil(group) + index) * page_tokens + self.token;
        Some([scales.get(first..first + group)?, zeros.get(first..first + group)?])
    }

    /// Asks for the beginning of each part; the scales and zeros of the channels between the first
    /// and the last ones lie between theirs.
    #[inline(always)]
    pub(super) fn touch<S: Simd>(&self, simd: S, order: ValueOrder) {
        if let Some(words) = self.words(order) {
            simd.prefetch(words.as_ptr().cast());
        }
        let last = (self.geometry.head_dim - 1) / self.geometry.group;
        for params in [0, last].into_iter().filter_map(|index| self.params(index)).flatten() {
            simd.prefetch(params.as_ptr().cast());
        }
    }
}

/// One group of channels of values.
#[derive(Clone, Copy)]
struct Channels {
    index: usize,
    /// Tokens from here on do not count.
    end: usize,
}

impl Channels {
    /// Scales and zeros of a group of tokens.
    #[inline(always)]
    fn params<'a>(self, tile: &Tile<'a>, place: Place<'a>) -> Option<[&'a [f16]; 2]> {
        tile.value_group(place)?.params(self.index)
    }

    /// Gathers the scales and zeros of the tokens that count.
    #[inline(always)]
    fn load(self, tile: &Tile<'_>, params: &mut ParamBuffer) {
        let group = tile.geometry().group;
        for (index, &place) in tile.pages[..self.end.div_ceil(group)].iter().enumerate() {
            match self.params(tile, place) {
                Some([scales, zeros]) => params.set_groups(index * group, scales, zeros),
                None => params.clear(index * group..(index + 1) * group),
            }
        }
        if self.end < TILE {
            // The places of the others may hold anything.
            params.clear(self.end..TILE);
        }
    }

    /// Folds two active queries' weights, or the last one's.
    #[inline(always)]
    fn fold<S: Simd, const QUADS: usize>(self, simd: S, scratch: &mut Scratch, first: usize) {
        let Scratch { operands, active, weights, coded, params, views, .. } = scratch;
        let params = params.get(TILE);
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
    fn ahead<S: Simd>(self, simd: S, tile: &Tile<'_>) {
        for &place in &tile.next[..TILE / tile.geometry().group] {
            let Some(params) = self.params(tile, place) else { return };
            params.iter().for_each(|params| params_ahead(simd, params));
        }
    }
}
