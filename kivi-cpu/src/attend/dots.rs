//! The inner product of codes with folded operands, register-blocked.

use super::operand::{Operand, shift};
use crate::isa::{LANES, Simd};
use std::ops::Range;

/// Words of 32 elements.
pub(super) const STRIPE_WORDS: usize = 8;

/// 32 elements of two operands: per operand the high and the low bytes, four elements to a word (see
/// [`operand`](super::operand)).
pub(super) type Stripe = [[[u32; STRIPE_WORDS]; 2]; 2];

/// Words of codes, in rows of whole vectors. A row that is not there, or too short, counts as zeros.
pub(super) trait Words: Copy {
    /// `V` vectors of a row.
    ///
    /// Zeros instead of a row to leave out: if there are two ways through the inner loop, the
    /// compiler keeps the sums in memory (*measured*: a sixth of the loop's instructions).
    fn get<const V: usize>(&self, row: usize, first: usize) -> &[[u32; LANES]; V];

    /// Where the same vectors of what is multiplied next lie: they are asked for line by line, while
    /// these are computed with, for pages lie anywhere and the hardware cannot foresee them. Any
    /// address if there is nothing.
    fn next(&self, row: usize, first: usize) -> *const [u32; LANES];
}

/// A product of rows of codes with a pair of operands.
pub(super) struct Product<'a, W> {
    pub(super) words: W,
    pub(super) rows: usize,
    pub(super) vectors: Range<usize>,
    pub(super) operands: [Operand; 2],
    /// As many stripes as there are rows of words for.
    pub(super) planes: &'a [Stripe],
    /// Whether to add to what is there.
    pub(super) add: bool,
}

impl<W: Words> Product<'_, W> {
    /// `out[q][v] = Σ x·c` (or `+=`) for the first `Q` operands and all vectors.
    #[inline(always)]
    pub(super) fn run<S: Simd, const QUADS: usize, const Q: usize>(
        self,
        simd: S,
        mut out: [&mut [[f32; LANES]]; Q],
    ) {
        let Range { start: mut first, end } = self.vectors;
        // Two planes of sums for each operand and vector, and as many registers for the rest.
        if S::REGISTERS >= 8 * Q {
            while first + 2 <= end {
                self.vectors::<S, QUADS, 2, Q>(simd, first, &mut out);
                first += 2;
            }
        }
        while first < end {
            self.vectors::<S, QUADS, 1, Q>(simd, first, &mut out);
            first += 1;
        }
    }

    #[inline(always)]
    fn vectors<S: Simd, const QUADS: usize, const V: usize, const Q: usize>(
        &self,
        simd: S,
        first: usize,
        out: &mut [&mut [[f32; LANES]]; Q],
    ) {
        let found = self.dots::<S, QUADS, V, Q>(simd, first);
        for q in 0..Q {
            let Operand { unit, constant } = self.operands[q];
            let [unit, constant] = [simd.splat(unit), simd.splat(constant)];
            let out = out[q].get_mut(first..).unwrap_or_default();
            let Some(out) = out.first_chunk_mut::<V>() else { return };
            for v in 0..V {
                let mut value = simd.mul_add(found[q][v], unit, constant);
                if self.add {
                    value = simd.add(simd.load(&out[v]), value);
                }
                simd.store(value, &mut out[v]);
            }
        }
    }

    /// `[Q][V]` vectors of `Σ X·c`, the operands being integers.
    ///
    /// A word has `QUADS` quadruples of codes of `8 / QUADS` bits; quadruple `j` of row `i` is
    /// multiplied with word `QUADS·i + j` of a plane.
    #[inline(always)]
    fn dots<S: Simd, const QUADS: usize, const V: usize, const Q: usize>(
        &self,
        simd: S,
        first: usize,
    ) -> [[S::F32; V]; Q] {
        const { assert!(Q <= 2 && STRIPE_WORDS.is_multiple_of(QUADS)) };
        let bits = 8 / QUADS as u32;
        let mask = simd.splat_u32(u32::from_ne_bytes([u8::MAX >> (8 - bits); 4]));
        let stripe_rows = STRIPE_WORDS / QUADS;
        let depth = S::depth(bits);
        // Stripes between two widenings; where not even one fits, rows are widened below.
        let span = (depth / STRIPE_WORDS).max(1);
        // With registers to spare, sums take turns, so that one product need not wait for the last.
        let turns = if S::REGISTERS >= 16 * Q { 2 } else { 1 };
        let zero = simd.splat_u32(0);
        let mut totals = [[[zero; V]; 2]; Q];
        let mut row = 0;
        for stripes in self.planes[..self.rows.div_ceil(stripe_rows)].chunks(span) {
            let mut sums = [[[[simd.no_dots(); V]; 2]; Q]; 2];
            for stripe in stripes {
                for i in 0..stripe_rows {
                    let words = self.words.get::<V>(row + i, first);
                    let next = self.words.next(row + i, first);
                    for line in 0..V {
                        simd.prefetch(next.wrapping_add(line).cast());
                    }
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
                                    let turn = (QUADS * i + j) % turns;
                                    let sum = &mut sums[turn][q][plane][v];
                                    *sum = simd.dot4(bits, *sum, codes, x[q][plane]);
                                }
                            }
                        }
                    }
                    if depth < STRIPE_WORDS && (QUADS * (i + 1)).is_multiple_of(depth) {
                        widen(simd, &mut totals, &mut sums[0]);
                    }
                }
                row += stripe_rows;
            }
            for sums in &mut sums[..turns] {
                widen(simd, &mut totals, sums);
            }
        }
        let mut out = [[simd.splat(0.0); V]; Q];
        for q in 0..Q {
            for v in 0..V {
                let [high, low] = [totals[q][0][v], totals[q][1][v]];
                let high = simd.shl(high, shift(bits).cast_unsigned());
                out[q][v] = simd.i32_to_f32(simd.add_u32(high, low));
            }
        }
        out
    }
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
