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
        let rows =
            (chunks, |i: usize| codes.get(i * vectors..(i + 1) * vectors).unwrap_or_default());
        let operands = &scratch.operands;
        for (pair, queries) in scratch.active.chunks(2).enumerate() {
            let operand = 2 * pair;
            if let &[a, b] = queries {
                let planes = [operands.planes(operand), operands.planes(operand + 1)];
                let folded = [operands.get(operand), operands.get(operand + 1)];
                let [a, b] = scratch.weights.two_rows_mut(a, b);
                for vector in (0..vectors).step_by(2) {
                    let [x, y] = dots::<S, QUADS, 2, 2>(simd, rows, vector, planes);
                    set_logits(simd, folded[0], x, &mut a[first + vector..]);
                    set_logits(simd, folded[1], y, &mut b[first + vector..]);
                }
            } else if let &[a] = queries {
                let (planes, folded) = ([operands.planes(operand)], operands.get(operand));
                let a = scratch.weights.row_mut(a);
                let mut vector = 0;
                while vector + 4 <= vectors {
                    let [x] = dots::<S, QUADS, 4, 1>(simd, rows, vector, planes);
                    set_logits(simd, folded, x, &mut a[first + vector..]);
                    vector += 4;
                }
                if vector < vectors {
                    let [x] = dots::<S, QUADS, 2, 1>(simd, rows, vector, planes);
                    set_logits(simd, folded, x, &mut a[first + vector..]);
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
) {
    let [unit, constant] = [simd.splat(folded.unit), simd.splat(folded.constant)];
    let Some(logits) = logits.first_chunk_mut::<V>() else { return };
    for v in 0..V {
        simd.store(simd.mul_add(found[v], unit, constant), &mut logits[v]);
    }
}

/// Adds some channels of the weighted values of a tile, of one group of channels, to the active
/// queries' sums. The weights have been folded; row 0 is multiplied with word `QUADS·first` of the
/// planes.
pub(super) struct ValueCodes<'a, const QUADS: usize> {
    pub(super) scratch: &'a Scratch,
    pub(super) rows: &'a [Row<'a>],
    pub(super) first: usize,
    pub(super) channels: Range<usize>,
    pub(super) partial: &'a mut Partial,
}

impl<const QUADS: usize> Kernel for ValueCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, rows, first, channels, partial } = self;
        let rows = (rows.len(), |i: usize| rows[i]);
        let vectors = channels.start / LANES..channels.end.div_ceil(LANES);
        let operands = &scratch.operands;
        let planes = |operand: usize| operands.planes(operand).from(QUADS * first);
        for (pair, queries) in scratch.active.chunks(2).enumerate() {
            let operand = 2 * pair;
            let mut vector = vectors.start;
            while vector < vectors.end {
                let left = vectors.end - vector;
                if let &[a, b] = queries {
                    let planes = [planes(operand), planes(operand + 1)];
                    let folded = [operands.get(operand), operands.get(operand + 1)];
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
                    let (planes, folded) = ([planes(operand)], operands.get(operand));
                    let sums = partial.sums_mut(a);
                    if left >= 4 {
                        let [x] = dots::<S, QUADS, 4, 1>(simd, rows, vector, planes);
                        add_values(simd, folded, x, sums, vector);
                        vector += 4;
                    } else {
                        let [x] = dots::<S, QUADS, 1, 1>(simd, rows, vector, planes);
                        add_values(simd, folded, x, sums, vector);
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
