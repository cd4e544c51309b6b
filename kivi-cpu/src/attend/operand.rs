//! Operands of the integer products: a query times the scales of a group of keys, or the softmax
//! weights of a tile times the scales of its values.
//!
//! An operand `x` of up to some hundred numbers becomes integers `X = round(x / u)` with the unit
//! `u = max|x| / 16256`, each split into two bytes, `X = 128·high + low` with `high` in −127 … 127
//! and `low` in −64 … 63. Products with codes are then exact integers, `Σ x·c ≈ u·Σ X·c`.
//!
//! What rounding loses is `Σ (x − u·X)·c`, at most `u/2` per term. Most of it is put back: with the
//! codes written as their middle `m` plus a rest, `m·Σ (x − u·X)` is known and only the rest, which
//! has no preferred sign, stays. This matters where large terms cancel: under almost uniform
//! attention the output is small beside its terms, and equal weights err alike.

use super::dots::Stripe;
use crate::isa::{LANES, Simd};
use kivi_core::Bits;

/// `127·128`, the largest integer.
const TOP: f32 = 16256.0;

/// Below this the unit is not a normal number, and the operand counts as zero.
const TINY: f32 = 1e-30;

/// Elements that are split at once.
pub(super) const STRIPE: usize = 4 * LANES;

/// A folded operand: `Σ x·c + Σ …z = unit · Σ X·c + constant`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Operand {
    pub(super) unit: f32,
    pub(super) constant: f32,
}

/// Operands and the planes of each.
#[derive(Debug, Default)]
pub(super) struct Operands {
    /// The operand being folded, in floats.
    folded: Vec<[f32; LANES]>,
    list: Vec<Operand>,
    /// `[operands / 2, length / STRIPE]`: two operands side by side.
    planes: Vec<Stripe>,
    /// Stripes of one operand.
    stripes: usize,
}

impl Operands {
    /// Room for `count` operands of up to `length` elements.
    pub(super) fn resize(&mut self, count: usize, length: usize) {
        self.stripes = length.div_ceil(STRIPE);
        self.folded.resize(4 * self.stripes, [0.0; LANES]);
        self.list.resize(count.next_multiple_of(2), Operand::default());
        self.planes.resize(count.div_ceil(2) * self.stripes, Stripe::default());
    }

    /// Operands `2·pair` and `2·pair + 1`, and their planes.
    pub(super) fn pair(&self, pair: usize) -> ([Operand; 2], &[Stripe]) {
        let planes = &self.planes[pair * self.stripes..(pair + 1) * self.stripes];
        ([self.list[2 * pair], self.list[2 * pair + 1]], planes)
    }

    /// Folds `Σ_i a_i·(s_i·c_i + z_i)`: `a`, `scales` and `zeros` have the same length, a multiple
    /// of [`STRIPE`]. With `skip_zeros`, elements with `a_i = 0` do not count even if `z_i` is NaN.
    #[inline(always)]
    pub(super) fn fold<S: Simd>(
        &mut self,
        simd: S,
        index: usize,
        bits: Bits,
        [a, scales, zeros]: [&[[f32; LANES]]; 3],
        skip_zeros: bool,
    ) {
        let zero = simd.splat(0.0);
        let folded = &mut self.folded[..a.len()];
        let (mut largest, mut sum, mut constant) = (zero, zero, zero);
        for (((a, s), z), folded) in a.iter().zip(scales).zip(zeros).zip(&mut *folded) {
            let a = simd.load(a);
            let mut z = simd.load(z);
            if skip_zeros {
                let used = simd.less(zero, simd.abs(a));
                z = simd.bits_to_f32(simd.and(simd.f32_to_bits(z), used));
            }
            let x = simd.mul(a, simd.load(s));
            simd.store(x, folded);
            largest = simd.max(simd.abs(x), largest);
            sum = simd.add(sum, x);
            constant = simd.mul_add(a, z, constant);
        }
        let largest = simd.max_lane(largest);
        let unit = largest / TOP;
        let inverse = if largest < TINY { 0.0 } else { TOP / largest };
        let splat = simd.splat(inverse);
        let planes = &mut self.planes[index / 2 * self.stripes..];
        let mut rounded = simd.splat_u32(0);
        for (x, stripe) in folded.as_chunks::<4>().0.iter().zip(planes) {
            let mut scaled = [zero; 4];
            for i in 0..4 {
                scaled[i] = simd.mul(simd.load(&x[i]), splat);
            }
            let ([high, low], sums) = simd.split(&scaled);
            let [to_high, to_low] = &mut stripe[index % 2];
            simd.store_u32(high, to_high);
            simd.store_u32(low, to_low);
            rounded = simd.add_u32(rounded, sums);
        }
        // Stored codes are `c − offset`, and their middle is half a code below half their range.
        let offset = crate::cache::order::offset(bits) as f32;
        let middle = bits.levels() as f32 / 2.0 - offset;
        let lost = simd.sub(simd.mul(sum, splat), simd.i32_to_f32(rounded));
        constant = simd.mul_add(lost, simd.splat(middle * unit), constant);
        constant = simd.mul_add(sum, simd.splat(offset), constant);
        self.list[index] = Operand { unit, constant: simd.sum(constant) };
    }
}
