//! Activations rounded to 8 bits, the other operand of quantized weights.

use crate::isa::{Isa, Kernel, Simd};
use rayon::prelude::*;

/// Elements that share a scale.
pub(super) const BLOCK: usize = 32;

/// Elements quantized by one task.
const TASK_ELEMENTS: usize = 1 << 15;

/// Rows of activations, `x ≈ scale·code`.
pub(super) struct Activations {
    columns: usize,
    sub_block: usize,
    /// `[rows, columns]`, −127 … 127.
    codes: Vec<i8>,
    /// `[rows, columns / sub_block]`: the scale, and the scale times the sum of the codes.
    scales: Vec<[f32; 2]>,
}

/// One row of [`Activations`].
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    /// `[columns]`
    pub(super) codes: &'a [i8],
    /// `[columns / sub_block]`
    pub(super) scales: &'a [[f32; 2]],
}

impl Activations {
    /// Quantizes `x`, `[rows, columns]`, for weights whose sub-blocks have `sub_block` (16 or 32)
    /// elements; `columns` is a multiple of [`BLOCK`] and not 0.
    pub(super) fn quantize(isa: Isa, x: &[f32], columns: usize, sub_block: usize) -> Self {
        let mut codes = vec![0; x.len()];
        let mut scales = vec![[0.0; 2]; x.len() / sub_block];
        if x.len() <= TASK_ELEMENTS {
            let (codes, scales) = (&mut codes[..], &mut scales[..]);
            isa.run(Quantize { x, codes, scales, sub_block });
        } else {
            x.par_chunks(TASK_ELEMENTS)
                .zip(codes.par_chunks_mut(TASK_ELEMENTS))
                .zip(scales.par_chunks_mut(TASK_ELEMENTS / sub_block))
                .for_each(|((x, codes), scales)| isa.run(Quantize { x, codes, scales, sub_block }));
        }
        Self { columns, sub_block, codes, scales }
    }

    /// Row `row`.
    pub(super) fn row(&self, row: usize) -> Row<'_> {
        let subs = self.columns / self.sub_block;
        Row {
            codes: &self.codes[row * self.columns..][..self.columns],
            scales: &self.scales[row * subs..][..subs],
        }
    }
}

/// Quantizes a whole number of blocks. Only exact or correctly rounded operations, so that every
/// instruction set gives the same bits.
struct Quantize<'a> {
    x: &'a [f32],
    codes: &'a mut [i8],
    scales: &'a mut [[f32; 2]],
    sub_block: usize,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let subs = BLOCK / self.sub_block;
        let (x, _) = self.x.as_chunks::<BLOCK>();
        let (codes, _) = self.codes.as_chunks_mut::<BLOCK>();
        for ((x, codes), scales) in x.iter().zip(codes).zip(self.scales.chunks_exact_mut(subs)) {
            let scale = quantize_block(x, codes);
            for (codes, out) in codes.chunks_exact(self.sub_block).zip(scales) {
                let sum: i32 = codes.iter().map(|&code| i32::from(code)).sum();
                *out = [scale, scale * sum as f32];
            }
        }
    }
}

/// Rounds one block to the nearest codes, ties to the even one, and returns the scale
/// `max |x| / 127`.
///
/// A block with a NaN or an infinity has the scale NaN, which every product with it inherits. A
/// block below 127/`f32::MAX` (4·10⁻³⁷) becomes 0.
#[inline(always)]
fn quantize_block(x: &[f32; BLOCK], codes: &mut [i8; BLOCK]) -> f32 {
    // The order of the magnitudes is that of their bits; NaN and infinity are at the top.
    let mut largest = 0;
    for x in x {
        largest = largest.max(x.to_bits() & 0x7fff_ffff);
    }
    let largest = f32::from_bits(largest);
    let inverse = 127.0 / largest;
    if !largest.is_finite() || !inverse.is_finite() {
        codes.fill(0);
        return if largest.is_finite() { 0.0 } else { f32::NAN };
    }
    // Adding 1.5·2²³ rounds to an integer, which is then in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let mut rounded = [0; BLOCK];
    for (x, rounded) in x.iter().zip(&mut rounded) {
        *rounded = (x * inverse + MAGIC).to_bits();
    }
    for (rounded, code) in rounded.into_iter().zip(codes) {
        *code = rounded as i8;
    }
    largest / 127.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_block(x: [f32; BLOCK], sub_block: usize) -> (Vec<i8>, Vec<[f32; 2]>) {
        let mut isas = Isa::available().map(|isa| {
            let quantized = Activations::quantize(isa, &x, BLOCK, sub_block);
            (quantized.codes, quantized.scales)
        });
        let first = isas.next().unwrap();
        for other in isas {
            assert_eq!(format!("{first:?}"), format!("{other:?}"));
        }
        first
    }

    #[test]
    fn rounds_to_nearest_even_and_sums_the_codes() {
        let mut x = [0.0; BLOCK];
        x[..8].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, -2.5, 3.49, -0.51, 100.0]);
        x[16] = -7.0;
        let (codes, scales) = one_block(x, 16);
        assert_eq!(codes[..8], [127, -127, 0, 2, -2, 3, -1, 100]);
        assert_eq!(scales, [[1.0, 102.0], [1.0, -7.0]]);
        assert_eq!(one_block(x, 32).1, [[1.0, 95.0]]);
    }

    #[test]
    fn extreme_blocks() {
        assert_eq!(one_block([0.0; BLOCK], 32), (vec![0; BLOCK], vec![[0.0; 2]]));
        assert_eq!(one_block([1e-38; BLOCK], 32), (vec![0; BLOCK], vec![[0.0; 2]]));
        let (codes, scales) = one_block([f32::MIN; BLOCK], 32);
        assert_eq!((codes, scales[0][0]), (vec![-127; BLOCK], f32::MAX / 127.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; BLOCK];
            x[31] = bad;
            assert!(one_block(x, 16).1.iter().flatten().all(|scale| scale.is_nan()));
        }
    }
}
