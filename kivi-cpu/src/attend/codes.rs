//! The loops over packed codes: one group of keys, and a tile of values.

use super::{
    TILE,
    dots::{Row, dots},
    operand::{Operand, Operands, Params, STRIPE},
    partial::Partial,
    scratch::{Rows, Scratch, params},
    walk::Tile,
};
use crate::{
    cache::{KeyOrder, Page, Tensor, ValueOrder},
    isa::{Kernel, LANES, Simd},
};
use half::f16;

/// Rows of keys that are multiplied at once: 512 channels of 2 bits, 128 of 8.
const MAX_ROWS: usize = 32;

/// One group of keys of one head.
#[derive(Clone, Copy)]
pub(super) struct KeyGroup<'a> {
    pub(super) order: KeyOrder,
    codes: &'a [u32],
    pub(super) scales: &'a [f16],
    zeros: &'a [f16],
    /// Of promoted channels.
    pub(super) second: Option<SecondPlane<'a>>,
}

/// The second plane of promoted channels of a group of keys.
#[derive(Clone, Copy)]
pub(super) struct SecondPlane<'a> {
    pub(super) order: KeyOrder,
    pub(super) mask: &'a [u32],
    pub(super) codes: &'a [u32],
}

impl<'a> KeyGroup<'a> {
    /// Group `row` of a page, counted through all heads.
    pub(super) fn new(page: &'a Page, order: KeyOrder, row: usize) -> Option<Self> {
        let Tensor::Packed { codes, scales, zeros } = &page.keys else { return None };
        let params = row * order.channels..(row + 1) * order.channels;
        let codes = codes.get(row * order.words()..(row + 1) * order.words())?;
        let (scales, zeros) = (scales.get(params.clone())?, zeros.get(params)?);
        let second = page.promoted.as_ref().and_then(|promoted| {
            let (mask, codes) = promoted.group(row)?;
            Some(SecondPlane { order: promoted.order, mask, codes })
        });
        Some(Self { order, codes, scales, zeros, second })
    }

    #[inline(always)]
    fn prefetch<S: Simd>(&self, simd: S) {
        prefetch(simd, self.codes);
        prefetch_params(simd, self.scales);
        prefetch_params(simd, self.zeros);
        if let Some(SecondPlane { mask, codes, .. }) = self.second {
            prefetch(simd, mask);
            prefetch(simd, codes);
        }
    }
}

/// Logits of one group of keys for the active queries, into their weights from vector `first` on; of
/// promoted channels with the upper half of their codes.
pub(super) struct KeyCodes<'a, const QUADS: usize> {
    pub(super) scratch: &'a mut Scratch,
    pub(super) group: KeyGroup<'a>,
    pub(super) first: usize,
    /// The group that will be read after a tile.
    pub(super) next: Option<KeyGroup<'a>>,
}

impl<const QUADS: usize> Kernel for KeyCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, group, first, next } = self;
        let KeyGroup { order, codes, scales, zeros, .. } = group;
        let Scratch { operands, active, weights, scaled, params: buffer, padded, .. } = scratch;
        let channels = order.channels.next_multiple_of(STRIPE);
        let params: Params<'_> = if channels == order.channels {
            params(scales, zeros)
        } else {
            buffer.set(0, scales, zeros);
            buffer.clear(order.channels..channels);
            buffer.get(channels)
        };
        for (pair, queries) in active.chunks(2).enumerate() {
            operands.fold_rows(simd, pair, order.bits, (scaled, queries), params);
        }
        if let Some(next) = next {
            next.prefetch(simd);
        }
        let codes = whole_rows(order, codes, padded);
        let logits = Logits { active, first, add: false };
        logits.of_codes::<S, QUADS>(simd, order, codes, operands, weights);
    }
}

/// The codes of a group in whole vectors, `[⌈D/P⌉, G]`: in `padded` if they are not.
#[inline(always)]
pub(super) fn whole_rows<'a>(
    order: KeyOrder,
    codes: &'a [u32],
    padded: &'a mut Vec<[u32; LANES]>,
) -> &'a [[u32; LANES]] {
    if order.rest() == 0 {
        return codes.as_chunks().0;
    }
    padded.clear();
    padded.resize((order.chunks() + 1) * (order.group / LANES), [0; LANES]);
    order.pad(codes, padded.as_flattened_mut());
    padded
}

/// Where the logits of a group go.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) active: &'a [usize],
    /// First vector of the group in the queries' weights.
    pub(super) first: usize,
    /// Whether to add to what is there.
    pub(super) add: bool,
}

impl Logits<'_> {
    /// Multiplies the folded queries with the codes of [`whole_rows`].
    #[inline(always)]
    pub(super) fn of_codes<S: Simd, const QUADS: usize>(
        self,
        simd: S,
        order: KeyOrder,
        codes: &[[u32; LANES]],
        operands: &Operands,
        weights: &mut Rows,
    ) {
        let Self { active, first, add } = self;
        let chunks = order.channels.div_ceil(order.bits.codes_per_word());
        let vectors = order.group / LANES;
        let mut rows: [Row<'_>; MAX_ROWS] = [&[]; MAX_ROWS];
        for start in (0..chunks).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(chunks - start);
            for (row, words) in rows.iter_mut().zip(codes.chunks_exact(vectors).skip(start)) {
                *row = words;
            }
            let (rows, stripe, add) = (&rows[..count], start * QUADS / LANES, add || start > 0);
            for (pair, queries) in active.chunks(2).enumerate() {
                let (mut folded, planes) = operands.pair(pair);
                let planes = &planes[stripe..];
                if start > 0 {
                    // The constants have been added with the first rows.
                    folded.iter_mut().for_each(|operand| operand.constant = 0.0);
                }
                if let &[a, b] = queries {
                    let [a, b] = weights.two_rows_mut(a, b);
                    for vector in (0..vectors).step_by(2) {
                        let [x, y] = dots::<S, QUADS, 2, 2>(simd, rows, vector, planes);
                        set_logits(simd, folded[0], x, &mut a[first + vector..], add);
                        set_logits(simd, folded[1], y, &mut b[first + vector..], add);
                    }
                } else if let &[a] = queries {
                    let a = &mut weights.row_mut(a)[first..];
                    for vector in (0..vectors).step_by(2) {
                        let [x] = dots::<S, QUADS, 2, 1>(simd, rows, vector, planes);
                        set_logits(simd, folded[0], x, &mut a[vector..], add);
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn set_logits<S: Simd, const V: usize>(
    simd: S,
    folded: Operand,
    found: [S::F32; V],
    logits: &mut [[f32; LANES]],
    add: bool,
) {
    let [unit, constant] = [simd.splat(folded.unit), simd.splat(folded.constant)];
    let Some(logits) = logits.first_chunk_mut::<V>() else { return };
    for v in 0..V {
        let before = if add { simd.add(simd.load(&logits[v]), constant) } else { constant };
        simd.store(simd.mul_add(found[v], unit, before), &mut logits[v]);
    }
}

/// Adds the weighted values of a tile to the active queries' sums.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) tile: &'a Tile<'a>,
    pub(super) scratch: &'a mut Scratch,
    pub(super) order: ValueOrder,
    /// All rows of the tile up to the last one that counts.
    pub(super) rows: &'a [Row<'a>],
    /// Tokens from here on do not count.
    pub(super) end: usize,
    pub(super) partial: &'a mut Partial,
}

impl<const QUADS: usize> Kernel for ValueCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { tile, scratch, order, rows, end, partial } = self;
        let g = tile.geometry();
        let groups = g.head_dim.div_ceil(g.group);
        for index in 0..groups {
            let part = Channels { index, groups, order };
            part.load(tile, scratch, end);
            part.prefetch(simd, tile);
            let vectors = index * g.group..g.head_dim.min((index + 1) * g.group);
            let vectors = vectors.start / LANES..vectors.end.div_ceil(LANES);
            for first in (0..scratch.active.len()).step_by(2) {
                part.fold(simd, scratch, first);
                let (folded, planes) = scratch.operands.pair(0);
                if let Some(&[a, b]) = scratch.active[first..].first_chunk() {
                    let mut vector = vectors.start;
                    while vector + 2 <= vectors.end {
                        let [x, y] = dots::<S, QUADS, 2, 2>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, partial.sums_mut(a), vector);
                        add_values(simd, folded[1], y, partial.sums_mut(b), vector);
                        vector += 2;
                    }
                    if vector < vectors.end {
                        let [x, y] = dots::<S, QUADS, 1, 2>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, partial.sums_mut(a), vector);
                        add_values(simd, folded[1], y, partial.sums_mut(b), vector);
                    }
                } else {
                    let sums = partial.sums_mut(scratch.active[first]);
                    let mut vector = vectors.start;
                    while vector + 2 <= vectors.end {
                        let [x] = dots::<S, QUADS, 2, 1>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, sums, vector);
                        vector += 2;
                    }
                    if vector < vectors.end {
                        let [x] = dots::<S, QUADS, 1, 1>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, sums, vector);
                    }
                }
            }
        }
    }
}

/// One group of channels of values.
#[derive(Clone, Copy)]
struct Channels {
    index: usize,
    groups: usize,
    order: ValueOrder,
}

impl Channels {
    /// Gathers the scales and zeros of the tile's tokens up to `end`.
    fn load(self, tile: &Tile<'_>, scratch: &mut Scratch, end: usize) {
        let g = tile.geometry();
        let mut first = 0;
        for place in tile.pages.iter().take(end.div_ceil(g.group)) {
            if let &Some((page, token)) = place
                && let Tensor::Packed { scales, zeros, .. } = &page.values
            {
                let row = (tile.kv_head * self.groups + self.index) * g.page_tokens + token;
                scratch.params.set(first, &scales[row..row + g.group], &zeros[row..row + g.group]);
            } else {
                scratch.params.clear(first..first + g.group);
            }
            first += g.group;
        }
        scratch.params.clear(end..TILE);
    }

    /// Folds two active queries' weights, or the last one's.
    #[inline(always)]
    fn fold<S: Simd>(self, simd: S, scratch: &mut Scratch, first: usize) {
        let Scratch { operands, active, weights, coded, params, views, .. } = scratch;
        let bits = self.order.bits;
        let params = params.get(TILE);
        let active = &active[first..active.len().min(first + 2)];
        if active.iter().any(|&query| views[query].coded.values < TILE) {
            for (i, &query) in active.iter().enumerate() {
                let length = views[query].coded.values;
                let to = coded.row_mut(i).as_flattened_mut();
                to[..length].copy_from_slice(&weights.row(query).as_flattened()[..length]);
                to[length..].fill(0.0);
            }
            operands.fold_rows(simd, 0, bits, (coded, &[0, 1][..active.len()]), params);
        } else {
            operands.fold_rows(simd, 0, bits, (weights, active), params);
        }
    }

    /// Asks for this part of the values of the next tile.
    #[inline(always)]
    fn prefetch<S: Simd>(self, simd: S, tile: &Tile<'_>) {
        let g = tile.geometry();
        // Each group of channels asks for its share of the groups of tokens, whole.
        for place in tile.next.iter().skip(self.index).step_by(self.groups) {
            let &Some((page, token)) = place else { return };
            let Tensor::Packed { codes, scales, zeros } = &page.values else { return };
            let first = self.order.words(tile.kv_head * g.page_tokens + token);
            prefetch(simd, &codes[first..first + self.order.words(g.group)]);
            for group in 0..self.groups {
                let row = (tile.kv_head * self.groups + group) * g.page_tokens + token;
                prefetch_params(simd, &scales[row..row + g.group]);
                prefetch_params(simd, &zeros[row..row + g.group]);
            }
        }
    }
}

/// Asks for the cache lines of words: this tile's work hides the next one's way from memory, which the
/// hardware cannot foresee, for pages lie anywhere.
#[inline(always)]
fn prefetch<S: Simd>(simd: S, words: &[u32]) {
    for line in words.as_chunks::<16>().0 {
        simd.prefetch(line.as_ptr().cast());
    }
}

/// Asks for the cache lines of scales or zeros.
#[inline(always)]
fn prefetch_params<S: Simd>(simd: S, params: &[f16]) {
    let (lines, rest) = params.as_chunks::<32>();
    for line in lines {
        simd.prefetch(line.as_ptr().cast());
    }
    simd.prefetch(rest.as_ptr().cast());
}

/// Adds to the sums of channels from vector `first` on; a vector may reach beyond them.
#[inline(always)]
fn add_values<S: Simd, const V: usize>(
    simd: S,
    folded: Operand,
    found: [S::F32; V],
    sums: &mut [f32],
    first: usize,
) {
    let [unit, constant] = [simd.splat(folded.unit), simd.splat(folded.constant)];
    let sums = sums.as_chunks_mut::<LANES>().0.get_mut(first..).unwrap_or_default();
    let Some(sums) = sums.first_chunk_mut::<V>() else { return };
    for v in 0..V {
        let value = simd.mul_add(found[v], unit, constant);
        simd.store(simd.add(simd.load(&sums[v]), value), &mut sums[v]);
    }
}
