//! The vector operations in AVX-512: a vector is a register, of which there are 32, and integer
//! products are added up in 32 bits at once.

use super::Kernel;
use super::simd::{Bytes64, LANES, Simd};
use std::arch::x86_64::*;

/// Proof that this processor has AVX-512 F, BW, DQ, VL and VNNI, and what came before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// `None` where the processor or the operating system lacks one of the extensions.
    pub(crate) fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        detected.then_some(Self(()))
    }
}

/// Evaluates intrinsics inside a method of [`Avx512`].
macro_rules! avx512 {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where the features were detected; loads and stores go through
        // references to arrays of exactly the size they touch and need no alignment.
        unsafe { $($body)* }
    };
}

impl Simd for Avx512 {
    const REGISTERS: usize = 32;

    type F32 = __m512;
    type I32 = __m512i;
    type Dots = __m512i;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        #[inline(never)]
        fn shell<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: an `Avx512` exists only where these features were detected.
        unsafe { shell(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        avx512! { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        avx512! { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        avx512! { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        avx512! { _mm512_loadu_ps(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        avx512! { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        avx512! {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx512! { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx512! { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx512! { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        avx512! { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx512! { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx512! { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        avx512! {
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        avx512! {
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        avx512! { _mm512_set1_epi32(x.cast_signed()) }
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        avx512! { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        avx512! { _mm512_srl_epi32(x, _mm_cvtsi32_si128((by & 31).cast_signed())) }
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        avx512! { _mm512_sll_epi32(x, _mm_cvtsi32_si128((by & 31).cast_signed())) }
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx512! { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx512! { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx512! { _mm512_sub_epi32(a, b) }
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        avx512! { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        avx512! { _mm512_castsi512_ps(x) }
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        avx512! { _mm512_castps_si512(x) }
    }

    /// `2¹⁴·4·128·127` is below 2³¹.
    #[inline(always)]
    fn depth(_bits: u32) -> usize {
        1 << 14
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        avx512! { _mm512_setzero_si512() }
    }

    /// `vpdpbusd` multiplies unsigned by signed bytes; signed codes move their sign to `x` first.
    #[inline(always)]
    fn dot4(self, bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        avx512! {
            if bits == 8 {
                let negative = _mm512_movepi8_mask(codes);
                let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
                _mm512_dpbusd_epi32(sum, _mm512_abs_epi8(codes), x)
            } else {
                _mm512_dpbusd_epi32(sum, codes, x)
            }
        }
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        sums
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 2], out: &mut [[u32; 8]; 2]) -> Self::I32 {
        avx512! {
            let [a, b] = [_mm512_cvtps_epi32(x[0]), _mm512_cvtps_epi32(x[1])];
            // Narrowing works on 128-bit quarters: four elements of each vector stay together.
            let words = _mm512_packs_epi32(a, b);
            let half = _mm512_set1_epi16(1 << (SHIFT - 1));
            let by = _mm_cvtsi32_si128(SHIFT);
            let high = _mm512_sra_epi16(_mm512_add_epi16(words, half), by);
            let low = _mm512_sub_epi16(words, _mm512_sll_epi16(high, by));
            let planes = _mm512_packs_epi16(high, low);
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let planes = _mm512_permutexvar_epi32(order, planes);
            _mm512_storeu_si512(out.as_mut_ptr().cast(), planes);
            _mm512_add_epi32(a, b)
        }
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        avx512! { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        avx512! { _mm512_abs_ps(x) }
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx512! { _mm512_movm_epi32(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b)) }
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx512! { _mm512_movm_epi32(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b)) }
    }

    /// Into the second-level cache, which is near enough and has more room on its way (*measured*: 3
    /// to 6 % of attention's time).
    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        avx512! { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }

    #[inline(always)]
    fn load_bytes(self, x: &Bytes64) -> Self::I32 {
        // Aligned, as the type is.
        avx512! { _mm512_load_si512(x.0.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        avx512! { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }
}
