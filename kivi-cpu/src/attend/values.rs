//! The loop over packed values: a tile times the softmax weights.

use super::{
    TILE,
    dots::{Product, Words},
    keys::params_ahead,
    partial::Partial,
    places::Place,
    scratch::{ParamBuffer, Scratch},
    walk::Tile,
};
use crate::{
    cache::{ValueGroup, ValueLayout},
    isa::{Kernel, LANES, Simd},
};
use half::f16;

/// A row of words in whole vectors.
pub(super) type Row<'a> = &'a [[u32; LANES]];

/// Adds the weighted values of a tile to the active queries' sums.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) tile: &'a Tile<'a>,
    pub(super) layout: ValueLayout,
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
        let Self { tile, layout, scratch, words, end, partial } = self;
        let g = tile.geometry();
        let groups = g.head_dim.div_ceil(g.group);
        for index in 0..groups {
            let part = Channels { layout, index, end };
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
    fn params<'a>(self, tile: &Tile<'a>, place: Place<'a>) -> Option<[&'a [f16]; 2]> {
        let group = tile.geometry().group;
        let ValueGroup { scales, zeros, .. } = tile.value_group(place, self.layout)?;
        let range = self.index * group..(self.index + 1) * group;
        Some([scales.get(range.clone())?, zeros.get(range)?])
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
