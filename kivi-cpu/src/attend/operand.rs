//! Operands of the integer products: a query times the scales of a group of keys, or the softmax
//! weights of a tile times the scales of its values.
//!
//! An operand `x` of up to some hundred numbers becomes integers `X = round(x / u)` with the unit
//! `u = max|x| / 32512`, each split into two bytes, `X = 256·high + low` with `high` in −127 … 127
//! and `low` in −128 … 127; for signed codes, of 8 bits, `X = 128·high + low` up to 16256. Products with codes are then exact integers, `Σ x·c ≈ u·Σ X·c`.
//!
//! What rounding loses is `Σ (x − u·X)·c`, at most `u/2` per term. Most of it is put back: with the
//! codes written as their middle `m` plus a rest, `m·Σ (x − u·X)` is known and only the rest, which
//! has no preferred sign, stays. This matters where large terms cancel: under almost uniform
//! attention the output is small beside its terms, and equal weights err alike.

use super::{
    dots::{STRIPE_WORDS, Stripe},
    scratch::Rows,
};
use crate::{
    cache::order::offset,
    isa::{LANES, Simd},
};
use half::f16;
use kivi_core::Bits;

/// Bits of the low byte that count: with signed codes the sign moves to the operand in some
/// instruction sets, and −128 has no counterpart.
pub(super) const fn shift(bits: u32) -> i32 {
    if bits == 8 { 7 } else { 8 }
}

/// Width of codes of which a word has that many quadruples.
const fn width(quads: usize) -> Bits {
    match quads {
        4 => Bits::Two,
        2 => Bits::Four,
        _ => Bits::Eight,
    }
}

/// Below this the unit is not a normal number, and the operand counts as zero.
const TINY: f32 = 1e-30;

/// Elements that are split at once.
pub(super) const STRIPE: usize = 4 * STRIPE_WORDS;

/// Vectors of these.
const STRIPE_VECTORS: usize = STRIPE / LANES;

/// A folded operand: `Σ x·c + Σ …z = unit · Σ X·c + constant`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Operand {
    pub(super) unit: f32,
    pub(super) constant: f32,
}

/// Scales and zeros, little-endian f16, as many of each and in whole vectors.
#[derive(Clone, Copy, Default)]
pub(super) struct Params<'a> {
    scales: &'a [[[u8; 2]; LANES]],
    zeros: &'a [[[u8; 2]; LANES]],
}

impl<'a> Params<'a> {
    /// The whole vectors of both.
    #[inline(always)]
    pub(super) fn new(scales: &'a [f16], zeros: &'a [f16]) -> Self {
        let length = scales.len().min(zeros.len()) / LANES;
        let vectors =
            |x: &'a [f16]| &bytemuck::cast_slice::<f16, [u8; 2]>(x).as_chunks().0[..length];
        Self { scales: vectors(scales), zeros: vectors(zeros) }
    }

    /// Vectors of each.
    fn len(&self) -> usize {
        self.scales.len()
    }
}

/// Pairs of operands, and the planes of each.
#[derive(Debug, Default)]
pub(super) struct Operands {
    /// The pair being folded, in floats.
    folded: Vec<[[f32; LANES]; 2]>,
    list: Vec<[Operand; 2]>,
    /// `[pairs, length / STRIPE]`
    planes: Vec<Stripe>,
    /// Stripes of one operand.
    stripes: usize,
}

impl Operands {
    /// Room for `count` operands of up to `length` elements.
    pub(super) fn resize(&mut self, count: usize, length: usize) {
        let pairs = count.div_ceil(2);
        self.stripes = length.div_ceil(STRIPE);
        self.folded.resize(STRIPE_VECTORS * self.stripes, Default::default());
        self.list.resize(pairs, Default::default());
        self.planes.resize(pairs * self.stripes, Stripe::default());
    }

    /// A pair of operands and their planes.
    pub(super) fn pair(&self, pair: usize) -> ([Operand; 2], &[Stripe]) {
        let planes = &self.planes[pair * self.stripes..(pair + 1) * self.stripes];
        (self.list[pair], planes)
    }

    /// [`fold`](Self::fold) of one or two rows of a matrix, which become the pair.
    #[inline(always)]
    pub(super) fn fold_rows<S: Simd, const QUADS: usize>(
        &mut self,
        simd: S,
        pair: usize,
        (matrix, rows): (&Rows, &[usize]),
        params: &[Params<'_>],
    ) {
        match *rows {
            [] => {}
            [a] => self.fold::<S, QUADS, 1>(simd, [pair, 0], [matrix.row(a)], params),
            // Three vectors of sums for each.
            [a, b, ..] if S::REGISTERS >= 16 => {
                let rows = [matrix.row(a), matrix.row(b)];
                self.fold::<S, QUADS, 2>(simd, [pair, 0], rows, params);
            }
            [a, b, ..] => {
                self.fold::<S, QUADS, 1>(simd, [pair, 0], [matrix.row(a)], params);
                self.fold::<S, QUADS, 1>(simd, [pair, 1], [matrix.row(b)], params);
            }
        }
    }

    /// Folds `Σ_i a_i·(s_i·c_i + z_i)` for `Q` operands of a pair, of which `first` is the first; the
    /// scales and zeros lie in several parts, and the vectors `a` are as long as all of them, a multiple of
    /// [`STRIPE`]. Elements with `a_i = 0` do not count even if `z_i` is NaN.
    ///
    /// The width of the codes is a constant, as in [`dots`](super::dots): one loop for two shifts
    /// would shift by a variable (*measured*: twice the instructions).
    #[inline(always)]
    fn fold<S: Simd, const QUADS: usize, const Q: usize>(
        &mut self,
        simd: S,
        [pair, first]: [usize; 2],
        a: [&[[f32; LANES]]; Q],
        params: &[Params<'_>],
    ) {
        let length = params.iter().map(Params::len).sum();
        let folded = &mut self.folded[..length];
        let mut vectors = a;
        for q in 0..Q {
            vectors[q] = &a[q][..length];
        }
        let zero = simd.splat(0.0);
        let (mut largest, mut sum, mut constant) = ([zero; Q], [zero; Q], [zero; Q]);
        let mut start = 0;
        for Params { scales, zeros } in params {
            let length = scales.len();
            let folded = &mut folded[start..start + length];
            let zeros = &zeros[..length];
            let mut a = vectors;
            for q in 0..Q {
                a[q] = &vectors[q][start..start + length];
            }
            for i in 0..length {
                let s = simd.load_f16_le(&scales[i]);
                let z = simd.load_f16_le(&zeros[i]);
                for q in 0..Q {
                    let a = simd.load(&a[q][i]);
                    let x = simd.mul(a, s);
                    simd.store(x, &mut folded[i][q]);
                    largest[q] = simd.max(simd.abs(x), largest[q]);
                    sum[q] = simd.add(sum[q], x);
                    constant[q] = simd.mul_add(a, z, constant[q]);
                }
            }
            start += length;
        }
        // The largest integer.
        let top = const { (127 << shift(8 / QUADS as u32)) as f32 };
        let (mut units, mut inverses) = ([0.0; Q], [zero; Q]);
        for q in 0..Q {
            let largest = simd.max_lane(largest[q]);
            units[q] = largest / top;
            inverses[q] = simd.splat(if largest < TINY { 0.0 } else { top / largest });
        }
        let planes = &mut self.planes[pair * self.stripes..(pair + 1) * self.stripes];
        let mut rounded = [simd.splat_u32(0); Q];
        for (x, stripe) in folded.as_chunks::<STRIPE_VECTORS>().0.iter().zip(planes) {
            for q in 0..Q {
                let mut scaled = [zero; STRIPE_VECTORS];
                for i in 0..STRIPE_VECTORS {
                    scaled[i] = simd.mul(simd.load(&x[i][q]), inverses[q]);
                }
                let sums = if QUADS == 1 {
                    simd.split::<{ shift(8) }>(&scaled, &mut stripe[first + q])
                } else {
                    simd.split::<{ shift(2) }>(&scaled, &mut stripe[first + q])
                };
                rounded[q] = simd.add_u32(rounded[q], sums);
            }
        }
        // Stored codes are `c − offset`, and their middle is half a code below half their range.
        let offset = const { offset(width(QUADS)) as f32 };
        let middle = const { width(QUADS).levels() as f32 / 2.0 } - offset;
        for q in 0..Q {
            let unit = units[q];
            let lost = simd.sub(simd.mul(sum[q], inverses[q]), simd.i32_to_f32(rounded[q]));
            let known = simd.mul(lost, simd.splat(middle * unit));
            let known = simd.mul_add(sum[q], simd.splat(offset), known);
            let mut total = simd.sum(simd.add(known, constant[q]));
            if total.is_nan() {
                let constant = skip_zeros(simd, vectors[q], params);
                total = simd.sum(simd.add(known, constant));
            }
            self.list[pair][first + q] = Operand { unit, constant: total };
        }
    }
}

/// Lane sums of `Σ a·z` over the elements with `a ≠ 0`.
#[inline(always)]
fn skip_zeros<S: Simd>(simd: S, a: &[[f32; LANES]], params: &[Params<'_>]) -> S::F32 {
    let mut constant = simd.splat(0.0);
    for (a, z) in a.iter().zip(params.iter().flat_map(|params| params.zeros)) {
        let (a, z) = (simd.load(a), simd.load_f16_le(z));
        let used = simd.less(simd.splat(0.0), simd.abs(a));
        let z = simd.bits_to_f32(simd.and(simd.f32_to_bits(z), used));
        constant = simd.mul_add(a, z, constant);
    }
    constant
}
