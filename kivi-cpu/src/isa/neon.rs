//! The vector operations in NEON with the dot product extension: a vector is four registers.

use super::Kernel;
use super::simd::{Bytes64, LANES, Simd};
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

/// Evaluates intrinsics for all registers of vectors: `[f(a[0], b[0]), f(a[1], b[1]), …]`.
macro_rules! all {
    ($f:ident($($x:expr),+)) => {
        neon! { [$f($($x[0]),+), $f($($x[1]),+), $f($($x[2]),+), $f($($x[3]),+)] }
    };
}

impl Simd for Neon {
    const REGISTERS: usize = 8;

    type F32 = [float32x4_t; 4];
    type I32 = [uint32x4_t; 4];
    type Dots = [int32x4_t; 4];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        run(self, kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        neon! { [vdupq_n_f32(x); 4] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        let at = |register: usize| neon! { vld1q_f32(x.as_ptr().add(4 * register)) };
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            neon! { vst1q_f32(out.as_mut_ptr(), x) }
        }
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        let x: *const u8 = x.as_ptr().cast();
        let at = |register: usize| neon! { vreinterpretq_f32_u8(vld1q_u8(x.add(16 * register))) };
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        neon! {
            let x: *const u8 = x.as_ptr().cast();
            let [a, b] =
                [vreinterpretq_f16_u8(vld1q_u8(x)), vreinterpretq_f16_u8(vld1q_u8(x.add(16)))];
            [
                vcvt_f32_f16(vget_low_f16(a)),
                vcvt_high_f32_f16(a),
                vcvt_f32_f16(vget_low_f16(b)),
                vcvt_high_f32_f16(b),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        neon! {
            let x: *const u8 = x.as_ptr().cast();
            let [a, b] =
                [vreinterpretq_u16_u8(vld1q_u8(x)), vreinterpretq_u16_u8(vld1q_u8(x.add(16)))];
            self.bits_to_f32([
                vshll_n_u16::<16>(vget_low_u16(a)),
                vshll_high_n_u16::<16>(a),
                vshll_n_u16::<16>(vget_low_u16(b)),
                vshll_high_n_u16::<16>(b),
            ])
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        all!(vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        all!(vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        all!(vmulq_f32(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        all!(vfmaq_f32(c, a, b))
    }

    /// Not `fmax`, which gives NaN where one operand is NaN.
    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        let larger = self.less(b, a);
        all!(vbslq_f32(larger, a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        let smaller = self.less(a, b);
        all!(vbslq_f32(smaller, a, b))
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        neon! { vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x[0], x[2]), vmaxnmq_f32(x[1], x[3]))) }
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        neon! {
            let x = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            vpadds_f32(vadd_f32(vget_low_f32(x), vget_high_f32(x)))
        }
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        neon! { [vdupq_n_u32(x); 4] }
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        let at = |register: usize| neon! { vld1q_u32(x.as_ptr().add(4 * register)) };
        [at(0), at(1), at(2), at(3)]
    }

    /// A shift to the left by a negative number.
    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = neon! { [vdupq_n_s32(-(by & 31).cast_signed()); 4] };
        all!(vshlq_u32(x, by))
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = neon! { [vdupq_n_s32((by & 31).cast_signed()); 4] };
        all!(vshlq_u32(x, by))
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        all!(vandq_u32(a, b))
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        all!(vaddq_u32(a, b))
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        all!(vsubq_u32(a, b))
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        let signed = all!(vreinterpretq_s32_u32(x));
        all!(vcvtq_f32_s32(signed))
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        all!(vreinterpretq_f32_u32(x))
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        all!(vreinterpretq_u32_f32(x))
    }

    /// `2¹⁴·4·128·127` is below 2³¹.
    #[inline(always)]
    fn depth(_bits: u32) -> usize {
        1 << 14
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        neon! { [vdupq_n_s32(0); 4] }
    }

    /// Unsigned codes of up to 6 bits are signed bytes, too.
    #[inline(always)]
    fn dot4(self, _bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        let (codes, x) = (all!(vreinterpretq_s8_u32(codes)), all!(vreinterpretq_s8_u32(x)));
        all!(sdot(sum, codes, x))
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        all!(vreinterpretq_u32_s32(sums))
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 2], out: &mut [[u32; 8]; 2]) -> Self::I32 {
        let mut sums = self.no_dots();
        for (half, x) in x.iter().enumerate() {
            let x = all!(vcvtnq_s32_f32(x));
            sums = all!(vaddq_s32(sums, x));
            neon! {
                let narrow = |a, b| vmovn_high_s32(vmovn_s32(a), b);
                let x = [narrow(x[0], x[1]), narrow(x[2], x[3])];
                // A shift that rounds: (x + 2^SHIFT/2) >> SHIFT.
                let high = [vrshrq_n_s16::<SHIFT>(x[0]), vrshrq_n_s16::<SHIFT>(x[1])];
                let low = [
                    vsubq_s16(x[0], vshlq_n_s16::<SHIFT>(high[0])),
                    vsubq_s16(x[1], vshlq_n_s16::<SHIFT>(high[1])),
                ];
                let bytes = |x: [int16x8_t; 2]| vmovn_high_s16(vmovn_s16(x[0]), x[1]);
                for (out, plane) in out.iter_mut().zip([bytes(high), bytes(low)]) {
                    vst1q_u32(out.as_mut_ptr().add(4 * half), vreinterpretq_u32_s8(plane));
                }
            }
        }
        all!(vreinterpretq_u32_s32(sums))
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            neon! { vst1q_u32(out.as_mut_ptr(), x) }
        }
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        all!(vabsq_f32(x))
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        all!(vcltq_f32(a, b))
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        all!(vcleq_f32(a, b))
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
    fn load_bytes(self, x: &Bytes64) -> Self::I32 {
        let at = |register: usize| {
            neon! { vreinterpretq_u32_u8(vld1q_u8(x.0.as_ptr().add(16 * register))) }
        };
        [at(0), at(1), at(2), at(3)]
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        neon! {
            let x = vld1q_s8(x.as_ptr());
            let [a, b] = [vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x)];
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(a))),
                vcvtq_f32_s32(vmovl_high_s16(a)),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(b))),
                vcvtq_f32_s32(vmovl_high_s16(b)),
            ]
        }
    }
}
