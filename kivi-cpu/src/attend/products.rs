//! The two inner products, register-blocked. Each result is summed in the order of the inner index,
//! however many queries share the work: even and odd terms apart, so that one sum does not wait for
//! the other, then both added.

use crate::isa::{LANES, Simd};
use std::ops::Range;

/// `out[t] = Σ_d query[d] · keys[d][t]`; `keys` is `[head_dim, stride]`, and `stride` and the length
/// of `out` are multiples of the vector length.
#[inline(always)]
pub(super) fn query_keys<S: Simd>(
    simd: S,
    query: &[f32],
    keys: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    out.fill(0.0);
    weighted_sum(simd, query, keys, stride, 0..out.len(), out);
}

/// `sums[c] += Σ_t weights[t] · values[t][c]` for the given channels; `values` is
/// `[tokens, stride]`, and the number of channels is a multiple of the vector length.
#[inline(always)]
pub(super) fn weighted_sum<S: Simd>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    stride: usize,
    channels: Range<usize>,
    sums: &mut [f32],
) {
    let mut first = channels.start;
    while first < channels.end {
        let block = (values, stride, first);
        let sums = &mut sums[first..channels.end];
        // Twice as many sums, a row and a weight.
        let count = (sums.len() / LANES).min(if S::REGISTERS > 10 { 4 } else { 2 });
        match count {
            0 => return,
            1 => weighted_block::<S, 1>(simd, weights, block, sums),
            2 => weighted_block::<S, 2>(simd, weights, block, sums),
            3 => weighted_block::<S, 3>(simd, weights, block, sums),
            _ => weighted_block::<S, 4>(simd, weights, block, sums),
        }
        first += LANES * count;
    }
}

/// `N` vectors of channels from `first` on.
#[inline(always)]
fn weighted_block<S: Simd, const N: usize>(
    simd: S,
    weights: &[f32],
    (values, stride, first): (&[f32], usize, usize),
    out: &mut [f32],
) {
    let Some(out) = out.as_chunks_mut::<LANES>().0.first_chunk_mut::<N>() else { return };
    let mut even = [simd.splat(0.0); N];
    let mut odd = [simd.splat(0.0); N];
    let mut rows = values.chunks_exact(stride);
    let mut pairs = weights.chunks_exact(2);
    for pair in &mut pairs {
        let (Some(a), Some(b)) = (rows.next(), rows.next()) else { break };
        add_row(simd, pair[0], &a[first..], &mut even);
        add_row(simd, pair[1], &b[first..], &mut odd);
    }
    if let (&[weight], Some(row)) = (pairs.remainder(), rows.next()) {
        add_row(simd, weight, &row[first..], &mut even);
    }
    for i in 0..N {
        let sum = simd.add(even[i], odd[i]);
        simd.store(simd.add(simd.load(&out[i]), sum), &mut out[i]);
    }
}

#[inline(always)]
fn add_row<S: Simd, const N: usize>(simd: S, weight: f32, row: &[f32], sums: &mut [S::F32; N]) {
    // A fixed number of vectors, so that the sums stay in registers.
    let Some(row) = row.as_chunks::<LANES>().0.first_chunk::<N>() else { return };
    let weight = simd.splat(weight);
    for i in 0..N {
        sums[i] = simd.mul_add(weight, simd.load(&row[i]), sums[i]);
    }
}
