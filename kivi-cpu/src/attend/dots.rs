//! The inner product of codes with folded operands, register-blocked.

use crate::isa::{LANES, Simd};

/// 32 elements of two operands: per operand the high and the low bytes, four elements to a word (see
/// [`operand`](super::operand)).
pub(super) type Stripe = [[[u32; LANES]; 2]; 2];

/// A row of words in whole vectors.
pub(super) type Row<'a> = &'a [[u32; LANES]];

/// Inner products of the first `Q` of two operands with the codes of `V` vectors of words from vector
/// `first` of each row on: `[Q][V]` vectors of `Σ x·c`, the operands being integers.
///
/// A word has `QUADS` quadruples of codes of `8 / QUADS` bits; quadruple `j` of row `i` is
/// multiplied with word `QUADS·i + j` of a plane. A row that is too short counts as zeros.
#[inline(always)]
pub(super) fn dots<S: Simd, const QUADS: usize, const V: usize, const Q: usize>(
    simd: S,
    rows: &[Row<'_>],
    first: usize,
    operands: &[Stripe],
) -> [[S::F32; V]; Q] {
    const { assert!(Q <= 2 && LANES.is_multiple_of(QUADS)) };
    let bits = 8 / QUADS as u32;
    let mask = simd.splat_u32(u32::from_ne_bytes([u8::MAX >> (8 - bits); 4]));
    let stripe_rows = LANES / QUADS;
    let depth = S::depth(bits);
    // Stripes between two widenings; where not even one fits, rows are widened below.
    let span = (depth / LANES).max(1);
    let zero = simd.splat_u32(0);
    let mut totals = [[[zero; V]; 2]; Q];
    for (rows, stripes) in rows.chunks(stripe_rows * span).zip(operands.chunks(span)) {
        let mut sums = [[[simd.no_dots(); V]; 2]; Q];
        for (rows, stripe) in rows.chunks(stripe_rows).zip(stripes) {
            for (i, row) in rows.iter().enumerate().take(stripe_rows) {
                let Some(words) = row.get(first..).and_then(<[_]>::first_chunk::<V>) else {
                    continue;
                };
                for j in 0..QUADS {
                    let mut x = [[zero; 2]; Q];
                    for q in 0..Q {
                        for plane in 0..2 {
                            x[q][plane] = simd.splat_u32(stripe[q][plane][QUADS * i + j]);
                        }
                    }
                    for v in 0..V {
                        let words = simd.load_u32(&words[v]);
                        let codes = match QUADS {
                            1 => words,
                            _ => simd.and(simd.shr(words, bits * j as u32), mask),
                        };
                        for q in 0..Q {
                            for plane in 0..2 {
                                let sum = &mut sums[q][plane][v];
                                *sum = simd.dot4(bits, *sum, codes, x[q][plane]);
                            }
                        }
                    }
                }
                if depth < LANES && (QUADS * (i + 1)).is_multiple_of(depth) {
                    widen(simd, &mut totals, &mut sums);
                }
            }
        }
        widen(simd, &mut totals, &mut sums);
    }
    let mut out = [[simd.splat(0.0); V]; Q];
    for q in 0..Q {
        for v in 0..V {
            let [high, low] = [totals[q][0][v], totals[q][1][v]];
            out[q][v] = simd.i32_to_f32(
                simd.add_u32(simd.shl(high, super::operand::shift(bits).cast_unsigned()), low),
            );
        }
    }
    out
}

#[inline(always)]
fn widen<S: Simd, const V: usize, const Q: usize>(
    simd: S,
    totals: &mut [[[S::I32; V]; 2]; Q],
    sums: &mut [[[S::Dots; V]; 2]; Q],
) {
    for q in 0..Q {
        for plane in 0..2 {
            for v in 0..V {
                let widened = simd.widen(sums[q][plane][v]);
                totals[q][plane][v] = simd.add_u32(totals[q][plane][v], widened);
                sums[q][plane][v] = simd.no_dots();
            }
        }
    }
}
