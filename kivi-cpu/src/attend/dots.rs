//! The inner product of codes with folded operands, register-blocked.

use crate::isa::{LANES, Simd};

/// The two bytes of a folded operand, four elements to a word (see [`operand`](super::operand)).
#[derive(Clone, Copy)]
pub(super) struct Planes<'a> {
    pub(super) high: &'a [u32],
    pub(super) low: &'a [u32],
}

impl Planes<'_> {
    /// Without the first `words`.
    pub(super) fn from(self, words: usize) -> Self {
        Self { high: &self.high[words..], low: &self.low[words..] }
    }
}

/// A row of words in whole vectors.
pub(super) type Row<'a> = &'a [[u32; LANES]];

/// Inner products of `Q` operands with the codes of `V` vectors of words from vector `first` of each
/// row on: `[Q][V]` vectors of `Σ x·c`, the operands being integers.
///
/// A word has `QUADS` quadruples of codes of `8 / QUADS` bits; quadruple `j` of row `i` is
/// multiplied with word `QUADS·i + j` of a plane. A row that is too short ends the sum.
#[inline(always)]
pub(super) fn dots<'a, S: Simd, const QUADS: usize, const V: usize, const Q: usize>(
    simd: S,
    (rows, row): (usize, impl Fn(usize) -> Row<'a>),
    first: usize,
    planes: [Planes<'_>; Q],
) -> [[S::F32; V]; Q] {
    let bits = 8 / QUADS as u32;
    let mask = simd.splat_u32(u32::from_ne_bytes([u8::MAX >> (8 - bits); 4]));
    let span = (S::depth(bits) / QUADS).max(1);
    let zero = simd.splat_u32(0);
    let mut high = [&[][..]; Q];
    let mut low = [&[][..]; Q];
    for q in 0..Q {
        high[q] = &planes[q].high.as_chunks::<QUADS>().0[..rows];
        low[q] = &planes[q].low.as_chunks::<QUADS>().0[..rows];
    }
    let mut totals = [[[zero; V]; 2]; Q];
    for start in (0..rows).step_by(span) {
        let mut sums = [[[simd.no_dots(); V]; 2]; Q];
        for i in start..rows.min(start + span) {
            let Some(words) = row(i).get(first..).and_then(<[_]>::first_chunk::<V>) else { break };
            for j in 0..QUADS {
                let mut codes = [zero; V];
                for v in 0..V {
                    let words = simd.load_u32(&words[v]);
                    codes[v] = match QUADS {
                        1 => words,
                        _ => simd.and(simd.shr(words, bits * j as u32), mask),
                    };
                }
                for q in 0..Q {
                    let quads = [high[q][i][j], low[q][i][j]];
                    for plane in 0..2 {
                        let x = simd.splat_u32(quads[plane]);
                        for v in 0..V {
                            let sum = &mut sums[q][plane][v];
                            *sum = simd.dot4(bits, *sum, codes[v], x);
                        }
                    }
                }
            }
        }
        for q in 0..Q {
            for plane in 0..2 {
                for v in 0..V {
                    let total = &mut totals[q][plane][v];
                    *total = simd.add_u32(*total, simd.widen(sums[q][plane][v]));
                }
            }
        }
    }
    let mut out = [[simd.splat(0.0); V]; Q];
    for q in 0..Q {
        for v in 0..V {
            let [high, low] = [totals[q][0][v], totals[q][1][v]];
            out[q][v] = simd.i32_to_f32(simd.add_u32(simd.shl(high, 7), low));
        }
    }
    out
}
