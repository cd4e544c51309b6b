//! The loops over packed codes: one group of keys, and one group of channels of a tile of values.

use super::{
    dots::{Row, dots},
    operand::{Operand, STRIPE},
    partial::Partial,
    scratch::Scratch,
};
use crate::{
    cache::KeyOrder,
    isa::{Kernel, LANES, Simd},
};
use std::ops::Range;

/// Rows of keys that are multiplied at once: 512 channels of 2 bits, 128 of 8.
const MAX_ROWS: usize = 32;

/// Logits of one group of keys for the active queries, into their weights from vector `first` on.
/// The scales and zeros have been set.
pub(super) struct KeyCodes<'a, const QUADS: usize> {
    pub(super) scratch: &'a mut Scratch,
    pub(super) order: KeyOrder,
    pub(super) codes: &'a [u32],
    pub(super) first: usize,
}

impl<const QUADS: usize> Kernel for KeyCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, order, codes, first } = self;
        let stripes = order.channels.next_multiple_of(STRIPE) / LANES;
        let params = [&scratch.params.scales[..stripes], &scratch.params.zeros[..stripes]];
        for (operand, &query) in scratch.active.iter().enumerate() {
            let parts = [scratch.scaled.row(query), params[0], params[1]];
            scratch.operands.fold(simd, operand, order.bits, parts, false);
        }
        let chunks = order.channels.div_ceil(order.bits.codes_per_word());
        let vectors = order.group / LANES;
        let codes = if order.rest() == 0 {
            codes.as_chunks().0
        } else {
            scratch.padded.clear();
            scratch.padded.resize(chunks * vectors, [0; LANES]);
            order.pad(codes, scratch.padded.as_flattened_mut());
            &scratch.padded
        };
        let Scratch { operands, active, weights, .. } = scratch;
        let mut rows: [Row<'_>; MAX_ROWS] = [&[]; MAX_ROWS];
        for start in (0..chunks).step_by(MAX_ROWS) {
            let count = MAX_ROWS.min(chunks - start);
            for (row, words) in rows.iter_mut().zip(codes.chunks_exact(vectors).skip(start)) {
                *row = words;
            }
            let (rows, stripe, add) = (&rows[..count], start * QUADS / LANES, start > 0);
            for (pair, queries) in active.chunks(2).enumerate() {
                let (folded, planes) = operands.pair(pair);
                let planes = &planes[stripe..];
                if let &[a, b] = queries {
                    let [a, b] = weights.two_rows_mut(a, b);
                    for vector in (0..vectors).step_by(2) {
                        let [x, y] = dots::<S, QUADS, 2, 2>(simd, rows, vector, planes);
                        set_logits(simd, folded[0], x, &mut a[first + vector..], add);
                        set_logits(simd, folded[1], y, &mut b[first + vector..], add);
                    }
                } else if let &[a] = queries {
                    let a = &mut weights.row_mut(a)[first..];
                    if vectors >= 4 {
                        for vector in (0..vectors).step_by(4) {
                            let [x] = dots::<S, QUADS, 4, 1>(simd, rows, vector, planes);
                            set_logits(simd, folded[0], x, &mut a[vector..], add);
                        }
                    } else {
                        let [x] = dots::<S, QUADS, 2, 1>(simd, rows, 0, planes);
                        set_logits(simd, folded[0], x, a, add);
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
        let before = if add { simd.load(&logits[v]) } else { constant };
        simd.store(simd.mul_add(found[v], unit, before), &mut logits[v]);
    }
}

/// Adds some channels of the weighted values of a tile, of one group of channels, to the active
/// queries' sums. The weights have been folded.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) scratch: &'a Scratch,
    /// All rows of the tile up to the last one that counts.
    pub(super) rows: &'a [Row<'a>],
    pub(super) channels: Range<usize>,
    pub(super) partial: &'a mut Partial,
}

impl<const QUADS: usize> Kernel for ValueCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, rows, channels, partial } = self;
        let vectors = channels.start / LANES..channels.end.div_ceil(LANES);
        for (pair, queries) in scratch.active.chunks(2).enumerate() {
            let (folded, planes) = scratch.operands.pair(pair);
            let mut vector = vectors.start;
            while vector < vectors.end {
                let left = vectors.end - vector;
                if let &[a, b] = queries {
                    if left >= 2 {
                        let [x, y] = dots::<S, QUADS, 2, 2>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, partial.sums_mut(a), vector);
                        add_values(simd, folded[1], y, partial.sums_mut(b), vector);
                        vector += 2;
                    } else {
                        let [x, y] = dots::<S, QUADS, 1, 2>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, partial.sums_mut(a), vector);
                        add_values(simd, folded[1], y, partial.sums_mut(b), vector);
                        vector += 1;
                    }
                } else if let &[a] = queries {
                    let sums = partial.sums_mut(a);
                    if left >= 4 {
                        let [x] = dots::<S, QUADS, 4, 1>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, sums, vector);
                        vector += 4;
                    } else {
                        let [x] = dots::<S, QUADS, 1, 1>(simd, rows, vector, planes);
                        add_values(simd, folded[0], x, sums, vector);
                        vector += 1;
                    }
                }
            }
        }
    }
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
