//! The two inner products, register-blocked. Each result is summed in the order of the inner index,
//! however many queries share the work.

use crate::isa::{LANES, Simd};
use std::ops::Range;

/// Vectors of tokens (keys) or channels (values) held in registers per query.
const BLOCK: usize = 4;

/// `out[t] = Σ_d query[d] · keys[d][t]` for `tokens` tokens; `keys` is `[head_dim, stride]`, and
/// `stride` and the length of `out` are multiples of the vector length.
#[inline(always)]
pub(super) fn query_keys<S: Simd>(
    simd: S,
    query: &[f32],
    keys: &[f32],
    stride: usize,
    out: &mut [f32],
) {
    let mut first = 0;
    while first < out.len() {
        let vectors = ((out.len() - first) / LANES).min(BLOCK);
        match vectors {
            4 => query_key_block::<S, 4>(simd, query, keys, stride, first, out),
            3 => query_key_block::<S, 3>(simd, query, keys, stride, first, out),
            2 => query_key_block::<S, 2>(simd, query, keys, stride, first, out),
            _ => query_key_block::<S, 1>(simd, query, keys, stride, first, out),
        }
        first += vectors.max(1) * LANES;
    }
}

#[inline(always)]
fn query_key_block<S: Simd, const N: usize>(
    simd: S,
    query: &[f32],
    keys: &[f32],
    stride: usize,
    first: usize,
    out: &mut [f32],
) {
    // Even and odd channels apart, so that the sums do not wait for each other.
    let mut sums = [[simd.splat(0.0); N]; 2];
    let mut rows = keys.chunks_exact(stride);
    let mut pairs = query.chunks_exact(2);
    for pair in &mut pairs {
        for (sums, &q) in sums.iter_mut().zip(pair) {
            let Some(row) = rows.next() else { return };
            let (row, _) = row[first..].as_chunks::<LANES>();
            let q = simd.splat(q);
            for (sum, row) in sums.iter_mut().zip(row) {
                *sum = simd.mul_add(q, simd.load(row), *sum);
            }
        }
    }
    if let (&[q], Some(row)) = (pairs.remainder(), rows.next()) {
        let (row, _) = row[first..].as_chunks::<LANES>();
        for (sum, row) in sums[0].iter_mut().zip(row) {
            *sum = simd.mul_add(simd.splat(q), simd.load(row), *sum);
        }
    }
    let (out, _) = out[first..].as_chunks_mut::<LANES>();
    for ((even, odd), out) in sums[0].iter().zip(&sums[1]).zip(out) {
        simd.store(simd.add(*even, *odd), out);
    }
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
        let vectors = ((channels.end - first) / LANES).min(BLOCK);
        let (block, _) = sums[first..].as_chunks_mut::<LANES>();
        match vectors {
            4 => weighted_block::<S, 4>(simd, weights, values, stride, first, block),
            3 => weighted_block::<S, 3>(simd, weights, values, stride, first, block),
            2 => weighted_block::<S, 2>(simd, weights, values, stride, first, block),
            _ => weighted_block::<S, 1>(simd, weights, values, stride, first, block),
        }
        first += vectors.max(1) * LANES;
    }
}

#[inline(always)]
fn weighted_block<S: Simd, const N: usize>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    stride: usize,
    first: usize,
    out: &mut [[f32; LANES]],
) {
    // Even and odd tokens apart.
    let mut sums = [[simd.splat(0.0); N]; 2];
    let rows = values.chunks_exact(stride);
    for (t, (row, &weight)) in rows.zip(weights).enumerate() {
        let (row, _) = row[first..].as_chunks::<LANES>();
        let weight = simd.splat(weight);
        for (sum, row) in sums[t % 2].iter_mut().zip(row) {
            *sum = simd.mul_add(weight, simd.load(row), *sum);
        }
    }
    for ((even, odd), out) in sums[0].iter().zip(&sums[1]).zip(out) {
        let sum = simd.add(*even, *odd);
        simd.store(simd.add(simd.load(out), sum), out);
    }
}
