//! The vector operations in plain Rust: for processors without a port, and the oracle of the others.

use super::Kernel;
use super::simd::{Bytes64, LANES, Simd};
use half::{bf16, f16};

/// Token of the instruction set every processor has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Portable;

/// A vector from a function of the lane; a loop, because `array::from_fn` is not always inlined.
#[inline(always)]
fn lanes<T: Copy + Default>(f: impl Fn(usize) -> T) -> [T; LANES] {
    let mut out = [T::default(); LANES];
    for (lane, out) in out.iter_mut().enumerate() {
        *out = f(lane);
    }
    out
}

impl Simd for Portable {
    /// With four lanes to a register, as every x86-64 has them.
    const REGISTERS: usize = 4;

    type F32 = [f32; LANES];
    type I32 = [u32; LANES];
    /// Sums of two products, a form that compilers know an instruction for.
    type Dots = [i32; 2 * LANES];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[inline(never)]
        fn part<K: Kernel>(simd: Portable, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        part(self, kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        [x; LANES]
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        *x
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        *out = x;
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        lanes(|i| f32::from_le_bytes(x[i]))
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        lanes(|i| f16::from_le_bytes(x[i]).to_f32_const())
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        lanes(|i| bf16::from_le_bytes(x[i]).to_f32_const())
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        lanes(|i| a[i] + b[i])
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        lanes(|i| a[i] - b[i])
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        lanes(|i| a[i] * b[i])
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        lanes(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        lanes(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        let mut largest = x[0];
        for x in x {
            largest = if x > largest { x } else { largest };
        }
        largest
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        let mut x = x;
        let mut half = LANES / 2;
        while half > 0 {
            for i in 0..half {
                x[i] += x[i + half];
            }
            half /= 2;
        }
        x[0]
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        [x; LANES]
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        *x
    }

    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        lanes(|i| x[i] >> (by & 31))
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        lanes(|i| x[i] << (by & 31))
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        lanes(|i| a[i] & b[i])
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        lanes(|i| a[i].wrapping_add(b[i]))
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        lanes(|i| a[i].wrapping_sub(b[i]))
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        lanes(|i| x[i].cast_signed() as f32)
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        lanes(|i| f32::from_bits(x[i]))
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        lanes(|i| x[i].to_bits())
    }

    #[inline(always)]
    fn load_bytes(self, x: &Bytes64) -> Self::I32 {
        let x = x.0.as_chunks().0;
        lanes(|i| u32::from_ne_bytes(x[i]))
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        lanes(|i| x[i].into())
    }

    #[inline(always)]
    fn depth(_bits: u32) -> usize {
        1 << 14
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        [0; 2 * LANES]
    }

    #[inline(always)]
    fn dot4(self, bits: u32, mut sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        let (codes, x): (&[u8], &[i8]) = (bytemuck::bytes_of(&codes), bytemuck::cast_slice(&x));
        let product = |i: usize| {
            let code = if bits == 8 { codes[i].cast_signed().into() } else { i16::from(codes[i]) };
            i32::from(code) * i32::from(x[i])
        };
        for (i, pair) in sum.iter_mut().enumerate() {
            *pair += product(2 * i) + product(2 * i + 1);
        }
        sum
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        lanes(|i| (sums[2 * i] + sums[2 * i + 1]).cast_unsigned())
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 2], out: &mut [[u32; 8]; 2]) -> Self::I32 {
        // Adding 1.5·2²³ rounds to an integer, half to even, and leaves it in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let mut planes = [[[0u8; 4]; 8]; 2];
        let mut sums = [0i32; LANES];
        for (i, x) in x.as_flattened().iter().enumerate() {
            let bits = |x: f32| x.to_bits().cast_signed();
            let x = bits(x + MAGIC).wrapping_sub(bits(MAGIC));
            let high = x.wrapping_add(1 << (SHIFT - 1)) >> SHIFT;
            planes[0][i / 4][i % 4] = high as u8;
            planes[1][i / 4][i % 4] = x.wrapping_sub(high << SHIFT) as u8;
            sums[i % LANES] = sums[i % LANES].wrapping_add(x);
        }
        for (out, plane) in out.iter_mut().zip(planes) {
            for (out, bytes) in out.iter_mut().zip(plane) {
                *out = u32::from_le_bytes(bytes);
            }
        }
        lanes(|i| sums[i].cast_unsigned())
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        *out = x;
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        lanes(|i| x[i].abs())
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        lanes(|i| if a[i] < b[i] { u32::MAX } else { 0 })
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        lanes(|i| if a[i] <= b[i] { u32::MAX } else { 0 })
    }

    /// Nothing: plain Rust has no such instruction.
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}
}
