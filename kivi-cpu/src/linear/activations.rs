//! Activations rounded to 8 bits, the other operand of quantized weights.

use crate::isa::{Isa, Kernel, Simd};
use bytemuck::{Pod, Zeroable};
use kivi_core::blocks::STRETCH;
use rayon::prelude::*;

/// Elements that share a scale.
pub(super) const BLOCK: usize = STRETCH;

/// Blocks quantized by one task.
const TASK_BLOCKS: usize = 1 << 10;

/// A block of activations, `x ≈ scale·code`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct ActivationBlock {
    /// −127 … 127, four columns at a time.
    pub(super) codes: [[i8; 4]; BLOCK / 4],
    pub(super) scale: f32,
    /// The scale times the sum of the codes.
    pub(super) sum: f32,
    /// The same for the first and the last 16 codes.
    pub(super) halves: [f32; 2],
}

impl ActivationBlock {
    /// f32 elements of a buffer that take the place of one block.
    pub(super) const FLOATS: usize = size_of::<Self>() / size_of::<f32>();
}

/// Quantizes `x`, whole blocks, into as many blocks; in parallel when there are many.
pub(super) fn quantize(isa: Isa, x: &[f32], out: &mut [ActivationBlock]) {
    let (x, _) = x.as_chunks::<BLOCK>();
    if x.len() <= TASK_BLOCKS {
        isa.run(Quantize { x, out });
    } else {
        let tasks = x.par_chunks(TASK_BLOCKS).zip(out.par_chunks_mut(TASK_BLOCKS));
        tasks.for_each(|(x, out)| isa.run(Quantize { x, out }));
    }
}

/// Only exact or correctly rounded operations, so that every instruction set gives the same bits.
struct Quantize<'a> {
    x: &'a [[f32; BLOCK]],
    out: &'a mut [ActivationBlock],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        for (x, out) in self.x.iter().zip(self.out) {
            let codes: &mut [i8; BLOCK] = bytemuck::cast_mut(&mut out.codes);
            let scale = quantize_block(x, codes);
            let mut sums = [0; 2];
            for (sum, codes) in sums.iter_mut().zip(codes.as_chunks::<{ BLOCK / 2 }>().0) {
                for &code in codes {
                    *sum += i32::from(code);
                }
            }
            out.scale = scale;
            out.sum = scale * (sums[0] + sums[1]) as f32;
            out.halves = [scale * sums[0] as f32, scale * sums[1] as f32];
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

    fn one_block(x: [f32; BLOCK]) -> ActivationBlock {
        let mut isas = Isa::available().map(|isa| {
            let mut out = [ActivationBlock::zeroed()];
            quantize(isa, &x, &mut out);
            out[0]
        });
        let first = isas.next().unwrap();
        for other in isas {
            assert_eq!(bytemuck::bytes_of(&first), bytemuck::bytes_of(&other));
        }
        first
    }

    #[test]
    fn rounds_to_nearest_even_and_sums_the_codes() {
        let mut x = [0.0; BLOCK];
        x[..8].copy_from_slice(&[127.0, -127.0, 0.5, 1.5, -2.5, 3.49, -0.51, 100.0]);
        x[16] = -7.0;
        let block = one_block(x);
        assert_eq!(block.codes[..2], [[127, -127, 0, 2], [-2, 3, -1, 100]]);
        assert_eq!((block.scale, block.sum, block.halves), (1.0, 95.0, [102.0, -7.0]));
    }

    #[test]
    fn extreme_blocks() {
        assert_eq!(one_block([0.0; BLOCK]), ActivationBlock::zeroed());
        assert_eq!(one_block([1e-38; BLOCK]), ActivationBlock::zeroed());
        let block = one_block([f32::MIN; BLOCK]);
        assert_eq!((block.codes, block.scale), ([[-127; 4]; 8], f32::MAX / 127.0));
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = [1.0; BLOCK];
            x[31] = bad;
            let block = one_block(x);
            let floats = [block.scale, block.sum, block.halves[0], block.halves[1]];
            assert!(floats.iter().all(|float| float.is_nan()));
        }
    }
}
