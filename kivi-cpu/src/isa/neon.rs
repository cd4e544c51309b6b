//! The vector operations in NEON with the dot product extension: a vector is two registers.

use super::Kernel;
use super::simd::{Bytes32, LANES, Simd};
use std::arch::aarch64::*;
use std::arch::asm;

/// Proof that this processor has NEON and the dot product extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neon(());

impl Neon {
    /// `None` where the processor lacks one of them.
    pub(crate) fn new() -> Option<Self> {
        let detected = std::arch::is_aarch64_feature_detected!("neon")
            && std::arch::is_aarch64_feature_detected!("dotprod");
        detected.then_some(Self(()))
    }
}

/// Runs `kernel` in code compiled for the instruction set.
#[inline]
pub(super) fn run<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
    #[target_feature(enable = "neon,dotprod")]
    #[inline(never)]
    fn shell<K: Kernel>(simd: Neon, kernel: K) -> K::Output {
        kernel.run(simd)
    }
    // SAFETY: a `Neon` exists only where these features were detected.
    unsafe { shell(simd, kernel) }
}

/// `sum + Σ_j a[4·o + j]·b[4·o + j]`, signed: the intrinsic `vdotq_s32`, which is not stable yet.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: the instruction reads and writes the named registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Evaluates intrinsics inside a method of [`Neon`].
macro_rules! neon {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where neon and dotprod were detected; loads and stores go through
        // references to arrays of exactly the size they touch and need no alignment.
        unsafe { $($body)* }
    };
}

/// Evaluates intrinsics for both registers of vectors: `[f(a[0], b[0]), f(a[1], b[1])]`.
macro_rules! both {
    ($f:ident($($x:expr),+)) => {
        neon! { [$f($($x[0]),+), $f($($x[1]),+)] }
    };
}

impl Simd for Neon {
    type F32 = [float32x4_t; 2];
    type I32 = [uint32x4_t; 2];
    type Dots = [int32x4_t; 2];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        run(self, kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        neon! { [vdupq_n_f32(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        neon! { [vld1q_f32(x.as_ptr()), vld1q_f32(x.as_ptr().add(4))] }
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        neon! {
            vst1q_f32(out.as_mut_ptr(), x[0]);
            vst1q_f32(out.as_mut_ptr().add(4), x[1]);
        }
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        let x: *const u8 = x.as_ptr().cast();
        neon! { [vreinterpretq_f32_u8(vld1q_u8(x)), vreinterpretq_f32_u8(vld1q_u8(x.add(16)))] }
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        neon! {
            let x = vreinterpretq_f16_u8(vld1q_u8(x.as_ptr().cast()));
            [vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)]
        }
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        neon! {
            let x = vreinterpretq_u16_u8(vld1q_u8(x.as_ptr().cast()));
            let wide = [vmovl_u16(vget_low_u16(x)), vmovl_high_u16(x)];
            self.bits_to_f32([vshlq_n_u32::<16>(wide[0]), vshlq_n_u32::<16>(wide[1])])
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        both!(vfmaq_f32(c, a, b))
    }

    /// Not `fmax`, which gives NaN where one operand is NaN.
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        let larger = self.less(b, a);
        both!(vbslq_f32(larger, a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        let smaller = self.less(a, b);
        both!(vbslq_f32(smaller, a, b))
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        neon! { vmaxnmvq_f32(vmaxnmq_f32(x[0], x[1])) }
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        neon! {
            let x = vaddq_f32(x[0], x[1]);
            vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)))
        }
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        neon! { [vdupq_n_u32(x); 2] }
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        neon! { [vld1q_u32(x.as_ptr()), vld1q_u32(x.as_ptr().add(4))] }
    }

    /// A shift to the left by a negative number.
    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = neon! { [vdupq_n_s32(-(by & 31).cast_signed()); 2] };
        both!(vshlq_u32(x, by))
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = neon! { [vdupq_n_s32((by & 31).cast_signed()); 2] };
        both!(vshlq_u32(x, by))
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(vandq_u32(a, b))
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(vaddq_u32(a, b))
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(vsubq_u32(a, b))
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        let signed = both!(vreinterpretq_s32_u32(x));
        both!(vcvtq_f32_s32(signed))
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        both!(vreinterpretq_f32_u32(x))
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        both!(vreinterpretq_u32_f32(x))
    }

    /// `2¹⁴·4·128·127` is below 2³¹.
    #[inline(always)]
    fn depth(_bits: u32) -> usize {
        1 << 14
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        neon! { [vdupq_n_s32(0); 2] }
    }

    /// Unsigned codes of up to 6 bits are signed bytes, too.
    #[inline(always)]
    fn dot4(self, _bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        let (codes, x) = (both!(vreinterpretq_s8_u32(codes)), both!(vreinterpretq_s8_u32(x)));
        both!(sdot(sum, codes, x))
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        both!(vreinterpretq_u32_s32(sums))
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 4]) -> ([Self::I32; 2], Self::I32) {
        let zero = neon! { vdupq_n_s32(0) };
        let (mut sums, mut planes) = ([zero; 2], [self.splat_u32(0); 2]);
        for half in 0..2 {
            let [a, b] =
                [both!(vcvtnq_s32_f32(x[2 * half])), both!(vcvtnq_s32_f32(x[2 * half + 1]))];
            sums = both!(vaddq_s32(sums, a));
            sums = both!(vaddq_s32(sums, b));
            neon! {
                let narrow = |x: [int32x4_t; 2]| vmovn_high_s32(vmovn_s32(x[0]), x[1]);
                let x = [narrow(a), narrow(b)];
                // A shift that rounds: (x + 2^SHIFT/2) >> SHIFT.
                let high = [vrshrq_n_s16::<SHIFT>(x[0]), vrshrq_n_s16::<SHIFT>(x[1])];
                let low = [
                    vsubq_s16(x[0], vshlq_n_s16::<SHIFT>(high[0])),
                    vsubq_s16(x[1], vshlq_n_s16::<SHIFT>(high[1])),
                ];
                let bytes = |x: [int16x8_t; 2]| vmovn_high_s16(vmovn_s16(x[0]), x[1]);
                planes[0][half] = vreinterpretq_u32_s8(bytes(high));
                planes[1][half] = vreinterpretq_u32_s8(bytes(low));
            }
        }
        (planes, both!(vreinterpretq_u32_s32(sums)))
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        neon! {
            vst1q_u32(out.as_mut_ptr(), x[0]);
            vst1q_u32(out.as_mut_ptr().add(4), x[1]);
        }
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        both!(vabsq_f32(x))
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        both!(vcltq_f32(a, b))
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        both!(vcleq_f32(a, b))
    }

    /// The intrinsic is not stable yet.
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        // SAFETY: a prefetch changes no register and does not fault, whatever the address.
        unsafe {
            asm!(
                "prfm pldl1keep, [{address}]",
                address = in(reg) address,
                options(readonly, nostack, preserves_flags),
            );
        }
    }

    #[inline(always)]
    fn load_bytes(self, x: &Bytes32) -> Self::I32 {
        let x = x.0.as_ptr();
        neon! { [vreinterpretq_u32_u8(vld1q_u8(x)), vreinterpretq_u32_u8(vld1q_u8(x.add(16)))] }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        neon! {
            let x = vmovl_s8(vld1_s8(x.as_ptr()));
            [vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))), vcvtq_f32_s32(vmovl_high_s16(x))]
        }
    }

    /// Four transpositions of 4×4 elements of 32 bits.
    #[inline(always)]
    fn interleave(self, rows: &[Bytes32; 8], out: &mut [Bytes32; 8]) {
        let rows = rows.each_ref().map(|row| self.load_bytes(row));
        for (half, out) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for (rows, at) in rows.as_chunks::<4>().0.iter().zip([0, 16]) {
                let [a, b, c, d] = [rows[0][half], rows[1][half], rows[2][half], rows[3][half]];
                neon! {
                    let [ac, bd] = [vzip1q_u32(a, c), vzip1q_u32(b, d)];
                    let [ac_high, bd_high] = [vzip2q_u32(a, c), vzip2q_u32(b, d)];
                    let steps = [
                        vzip1q_u32(ac, bd),
                        vzip2q_u32(ac, bd),
                        vzip1q_u32(ac_high, bd_high),
                        vzip2q_u32(ac_high, bd_high),
                    ];
                    for (out, step) in out.iter_mut().zip(steps) {
                        vst1q_u32(out.0.as_mut_ptr().add(at).cast(), step);
                    }
                }
            }
        }
    }
}
