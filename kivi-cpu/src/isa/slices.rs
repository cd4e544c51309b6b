//! Operations on slices, for use inside kernels. All are `#[inline(always)]`; see `isa` on why.

use super::simd::{LANES, Simd};

/// Loads a slice shorter than a vector, the rest `fill`.
#[inline(always)]
fn load_tail<S: Simd>(simd: S, tail: &[f32], fill: f32) -> S::F32 {
    let mut lanes = [fill; LANES];
    lanes[..tail.len()].copy_from_slice(tail);
    simd.load(&lanes)
}

/// `Σ a·b` over the shorter length. Sixteen partial sums, element `i` in number `i mod 16`, then
/// added in a fixed order.
#[inline(always)]
pub(crate) fn dot<S: Simd>(simd: S, a: &[f32], b: &[f32]) -> f32 {
    let length = a.len().min(b.len());
    let (a, a_tail) = a[..length].as_chunks::<LANES>();
    let (b, b_tail) = b[..length].as_chunks::<LANES>();
    let mut sums = [simd.splat(0.0); 2];
    let mut pairs = a.chunks_exact(2).zip(b.chunks_exact(2));
    for (a, b) in &mut pairs {
        sums[0] = simd.mul_add(simd.load(&a[0]), simd.load(&b[0]), sums[0]);
        sums[1] = simd.mul_add(simd.load(&a[1]), simd.load(&b[1]), sums[1]);
    }
    if a.len() % 2 == 1 {
        let last = a.len() - 1;
        sums[0] = simd.mul_add(simd.load(&a[last]), simd.load(&b[last]), sums[0]);
    }
    if !a_tail.is_empty() {
        let (a, b) = (load_tail(simd, a_tail, 0.0), load_tail(simd, b_tail, 0.0));
        sums[1] = simd.mul_add(a, b, sums[1]);
    }
    simd.sum(simd.add(sums[0], sums[1]))
}

/// The largest element, −∞ for an empty slice. NaN elements are skipped.
#[inline(always)]
pub(crate) fn max<S: Simd>(simd: S, x: &[f32]) -> f32 {
    let (chunks, tail) = x.as_chunks::<LANES>();
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for chunk in chunks {
        largest = simd.max(simd.load(chunk), largest);
    }
    // No lane is NaN: the second operand stays where the first one is.
    if !tail.is_empty() {
        largest = simd.max(load_tail(simd, tail, f32::NEG_INFINITY), largest);
    }
    simd.max_lane(largest)
}

/// `x[i] = e^(x[i] − shift)`; returns the sum of the results, element `i` added to partial sum
/// `i mod 8` and those added in a fixed order. See [`Simd::exp`].
#[inline(always)]
pub(crate) fn exp_in_place<S: Simd>(simd: S, x: &mut [f32], shift: f32) -> f32 {
    let shift = simd.splat(shift);
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    let mut sum = simd.splat(0.0);
    for chunk in chunks {
        let y = simd.exp(simd.sub(simd.load(chunk), shift));
        simd.store(y, chunk);
        sum = simd.add(sum, y);
    }
    if !tail.is_empty() {
        let mut lanes = [0.0; LANES];
        simd.store(simd.exp(simd.sub(load_tail(simd, tail, 0.0), shift)), &mut lanes);
        lanes[tail.len()..].fill(0.0);
        tail.copy_from_slice(&lanes[..tail.len()]);
        sum = simd.add(sum, simd.load(&lanes));
    }
    simd.sum(sum)
}

/// `out[i]` = the value of the little-endian f16 `x[i]`, over the shorter length.
#[inline(always)]
pub(crate) fn f16_to_f32<S: Simd>(simd: S, x: &[[u8; 2]], out: &mut [f32]) {
    let length = x.len().min(out.len());
    let (x, x_tail) = x[..length].as_chunks::<LANES>();
    let (out, out_tail) = out[..length].as_chunks_mut::<LANES>();
    for (x, out) in x.iter().zip(out) {
        simd.store(simd.load_f16_le(x), out);
    }
    let mut halves = [[0; 2]; LANES];
    halves[..x_tail.len()].copy_from_slice(x_tail);
    let mut lanes = [0.0; LANES];
    simd.store(simd.load_f16_le(&halves), &mut lanes);
    out_tail.copy_from_slice(&lanes[..out_tail.len()]);
}
