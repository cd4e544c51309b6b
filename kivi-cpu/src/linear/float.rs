//! Float weights: f32 products, accumulated in f32.
//!
//! Each result has sixteen partial sums, column `i` in number `i mod 16`, added at the end in the order
//! of [`Simd::sum`]. Blocks of weight and activation rows share their loads; that changes which
//! results are computed together, never the order within one.

use super::rectangle::Rectangle;
use crate::isa::{Isa, Kernel, LANES, Simd};
use kivi_core::WeightData;
use std::array::from_fn;
use std::marker::PhantomData;

/// Activation rows from which 16-bit weights are converted once beforehand.
const CONVERT_ROWS: usize = 6;

/// How an element lies in memory.
pub(super) trait Element {
    /// Its bytes.
    type Raw: bytemuck::Pod;
    /// Converts a vector of them.
    fn load<S: Simd>(simd: S, x: &[Self::Raw; LANES]) -> S::F32;
}

/// f32, little-endian.
pub(super) struct F32;
/// f16, little-endian.
pub(super) struct F16;
/// bf16, little-endian.
pub(super) struct Bf16;
/// f32 in the machine's order: activations, and weights already converted.
struct Native;

impl Element for F32 {
    type Raw = [u8; 4];
    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self::Raw; LANES]) -> S::F32 {
        simd.load_le(x)
    }
}

impl Element for F16 {
    type Raw = [u8; 2];
    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self::Raw; LANES]) -> S::F32 {
        simd.load_f16_le(x)
    }
}

impl Element for Bf16 {
    type Raw = [u8; 2];
    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self::Raw; LANES]) -> S::F32 {
        simd.load_bf16_le(x)
    }
}

impl Element for Native {
    type Raw = f32;
    #[inline(always)]
    fn load<S: Simd>(simd: S, x: &[Self::Raw; LANES]) -> S::F32 {
        simd.load(x)
    }
}

/// Arguments of one multiplication, lengths checked.
pub(super) struct Input<'a> {
    pub(super) isa: Isa,
    pub(super) weight: &'a WeightData,
    /// The first output to be computed.
    pub(super) first: usize,
    /// `[rows, columns]`
    pub(super) x: &'a [f32],
    /// One for each output to be computed.
    pub(super) bias: Option<&'a [f32]>,
}

/// Multiplies weights of element type `E` into `out`, `[rows, outputs]`.
pub(super) fn multiply<E: Element>(input: Input<'_>, out: Rectangle<'_>) {
    input.isa.run(Multiply::<E> { input, out, element: PhantomData });
}

struct Multiply<'a, E> {
    input: Input<'a>,
    out: Rectangle<'a>,
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Multiply<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        // As many sums as leave registers for the loads.
        if S::REGISTERS >= 16 {
            self.blocks::<S, 4, 3>(simd);
        } else {
            self.blocks::<S, 2, 2>(simd);
        }
    }
}

impl<E: Element> Multiply<'_, E> {
    /// All outputs, `O` weight rows and `R` activation rows at a time.
    #[inline(always)]
    fn blocks<S: Simd, const O: usize, const R: usize>(mut self, simd: S) {
        let Input { weight, first, x, bias, .. } = self.input;
        let [_, columns] = weight.shape();
        let (rows, outputs) = (self.out.rows(), self.out.width());
        let convert = size_of::<E::Raw>() < 4 && rows >= CONVERT_ROWS;
        let mut converted = vec![0.0; if convert { O * columns } else { 0 }];
        for start in (0..outputs).step_by(O) {
            // The last group repeats the last row; its surplus results are dropped.
            let weights: [&[E::Raw]; O] =
                from_fn(|i| bytemuck::cast_slice(weight.row(first + (start + i).min(outputs - 1))));
            if convert && columns > 0 {
                for (weights, out) in weights.iter().zip(converted.chunks_exact_mut(columns)) {
                    convert_row::<S, E>(simd, weights, out);
                }
            }
            let native: [&[f32]; O] =
                from_fn(|i| if convert { &converted[i * columns..][..columns] } else { &[] });
            for row in (0..rows).step_by(R) {
                let count = R.min(rows - row);
                // Likewise for a short group of activation rows, unless it is a single one.
                let x = |i: usize| &x[(row + i.min(count - 1)) * columns..][..columns];
                let mut results = [[0.0; R]; O];
                if count == 1 {
                    let single = if convert {
                        dots::<S, Native, O, 1>(simd, native, [x(0)])
                    } else {
                        dots::<S, E, O, 1>(simd, weights, [x(0)])
                    };
                    for (results, [single]) in results.iter_mut().zip(single) {
                        results[0] = single;
                    }
                } else if convert {
                    results = dots::<S, Native, O, R>(simd, native, from_fn(x));
                } else {
                    results = dots::<S, E, O, R>(simd, weights, from_fn(x));
                }
                for r in 0..count {
                    let out = &mut self.out.row(row + r)[start..];
                    for (i, (out, results)) in out.iter_mut().zip(&results).enumerate() {
                        *out = bias.map_or(results[r], |bias| results[r] + bias[start + i]);
                    }
                }
            }
        }
    }
}

/// A vector of elements that may run past the end of a row, where zeros stand.
#[inline(always)]
fn load_tail<S: Simd, E: Element>(simd: S, tail: &[E::Raw]) -> S::F32 {
    let mut lanes: [E::Raw; LANES] = bytemuck::Zeroable::zeroed();
    lanes[..tail.len()].copy_from_slice(tail);
    E::load(simd, &lanes)
}

/// Converts a row to f32.
#[inline(always)]
fn convert_row<S: Simd, E: Element>(simd: S, row: &[E::Raw], out: &mut [f32]) {
    let (chunks, tail) = row.as_chunks::<LANES>();
    let (out, out_tail) = out.as_chunks_mut::<LANES>();
    for (chunk, out) in chunks.iter().zip(out) {
        simd.store(E::load(simd, chunk), out);
    }
    let mut lanes = [0.0; LANES];
    simd.store(load_tail::<S, E>(simd, tail), &mut lanes);
    out_tail.copy_from_slice(&lanes[..out_tail.len()]);
}

/// Inner products of each weight row with each activation row, all of the same length.
#[inline(always)]
fn dots<S: Simd, E: Element, const O: usize, const R: usize>(
    simd: S,
    weights: [&[E::Raw]; O],
    x: [&[f32]; R],
) -> [[f32; R]; O] {
    let columns = weights[0].len();
    let chunks = columns / LANES;
    let weight_chunks = weights.map(|row| &row.as_chunks::<LANES>().0[..chunks]);
    let x_chunks = x.map(|row| &row.as_chunks::<LANES>().0[..chunks]);
    let mut sums = [[simd.splat(0.0); R]; O];
    for chunk in 0..chunks {
        let mut x = [simd.splat(0.0); R];
        for r in 0..R {
            x[r] = simd.load(&x_chunks[r][chunk]);
        }
        for o in 0..O {
            let weights = E::load(simd, &weight_chunks[o][chunk]);
            for r in 0..R {
                sums[o][r] = simd.mul_add(weights, x[r], sums[o][r]);
            }
        }
    }
    if chunks * LANES < columns {
        for (sums, weights) in sums.iter_mut().zip(weights) {
            let weights = load_tail::<S, E>(simd, &weights[chunks * LANES..]);
            for (sum, x) in sums.iter_mut().zip(x) {
                let x = load_tail::<S, Native>(simd, &x[chunks * LANES..]);
                *sum = simd.mul_add(weights, x, *sum);
            }
        }
    }
    let mut results = [[0.0; R]; O];
    for o in 0..O {
        for r in 0..R {
            results[o][r] = simd.sum(sums[o][r]);
        }
    }
    results
}
