//! The vector operations in AVX2, FMA and F16C: a vector is two registers.

use super::Kernel;
use super::simd::{Bytes64, LANES, Simd};
use std::arch::x86_64::*;

/// Proof that this processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// `None` where the processor or the operating system lacks one of the extensions.
    pub(crate) fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self(()))
    }
}

/// `a + b` in 16-bit lanes, as the compiler cannot see.
#[inline]
#[target_feature(enable = "avx2")]
fn add_opaque(mut a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: the instruction reads and writes the named registers only.
    unsafe {
        std::arch::asm!(
            "vpaddw {a}, {a}, {b}",
            a = inout(ymm_reg) a,
            b = in(ymm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    a
}

/// Evaluates intrinsics inside a method of [`Avx2`].
macro_rules! avx2 {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where avx2, fma and f16c were detected; loads and stores go
        // through references to arrays of exactly the size they touch and need no alignment.
        unsafe { $($body)* }
    };
}

/// Evaluates intrinsics for both registers of vectors: `[f(a[0], b[0]), f(a[1], b[1])]`.
macro_rules! both {
    ($f:ident($($x:expr),+)) => {
        avx2! { [$f($($x[0]),+), $f($($x[1]),+)] }
    };
}

impl Simd for Avx2 {
    const REGISTERS: usize = 8;

    type F32 = [__m256; 2];
    type I32 = [__m256i; 2];
    /// Sums in 16-bit lanes, two to a lane of 32 bits.
    type Dots = [__m256i; 2];

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn shell<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: an `Avx2` exists only where these features were detected.
        unsafe { shell(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        avx2! { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        avx2! { [_mm256_loadu_ps(x.as_ptr()), _mm256_loadu_ps(x.as_ptr().add(8))] }
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        avx2! {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out.as_mut_ptr().add(8), x[1]);
        }
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        let x: *const f32 = x.as_ptr().cast();
        avx2! { [_mm256_loadu_ps(x), _mm256_loadu_ps(x.add(8))] }
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        let x: *const __m128i = x.as_ptr().cast();
        avx2! { [_mm256_cvtph_ps(_mm_loadu_si128(x)), _mm256_cvtph_ps(_mm_loadu_si128(x.add(1)))] }
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        let x: *const __m128i = x.as_ptr().cast();
        avx2! {
            let wide = |x| _mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(x)));
            self.bits_to_f32([wide(x), wide(x.add(1))])
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        both!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        both!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        avx2! {
            let x = _mm256_max_ps(x[0], x[1]);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        avx2! {
            let x = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        avx2! { [_mm256_set1_epi32(x.cast_signed()); 2] }
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        let x: *const __m256i = x.as_ptr().cast();
        avx2! { [_mm256_loadu_si256(x), _mm256_loadu_si256(x.add(1))] }
    }

    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = avx2! { [_mm_cvtsi32_si128((by & 31).cast_signed()); 2] };
        both!(_mm256_srl_epi32(x, by))
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        let by = avx2! { [_mm_cvtsi32_si128((by & 31).cast_signed()); 2] };
        both!(_mm256_sll_epi32(x, by))
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(_mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        both!(_mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        both!(_mm256_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        both!(_mm256_castsi256_ps(x))
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        both!(_mm256_castps_si256(x))
    }

    /// In 16 bits: `32·2·3·128`, `8·2·15·128`, `4·2·31·128`, `2·2·63·128` and `1·2·128·127` are below
    /// 2¹⁵.
    #[inline(always)]
    fn depth(bits: u32) -> usize {
        match bits {
            0..=2 => 32,
            3..=4 => 8,
            5 => 4,
            6 => 2,
            _ => 1,
        }
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        avx2! { [_mm256_setzero_si256(); 2] }
    }

    /// `vpmaddubsw`; signed codes move their sign to `x` first.
    ///
    /// The addition is opaque to the compiler, which otherwise adds the products of several steps
    /// among each other first and runs out of registers (*measured*: half of the instructions were
    /// moves to and from the stack).
    #[inline(always)]
    fn dot4(self, bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        if bits == 8 {
            // One product is all that fits before widening, so there is no sum to add to.
            let (unsigned, signed) =
                (both!(_mm256_abs_epi8(codes)), both!(_mm256_sign_epi8(x, codes)));
            both!(_mm256_maddubs_epi16(unsigned, signed))
        } else {
            let products = both!(_mm256_maddubs_epi16(codes, x));
            both!(add_opaque(sum, products))
        }
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        let ones = avx2! { [_mm256_set1_epi16(1); 2] };
        both!(_mm256_madd_epi16(sums, ones))
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 2], out: &mut [[u32; 8]; 2]) -> Self::I32 {
        let (a, b) = (both!(_mm256_cvtps_epi32(x[0])), both!(_mm256_cvtps_epi32(x[1])));
        avx2! {
            // Narrowing works on 128-bit halves: four elements of each vector stay together.
            let [a, b] = [_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(b[0], b[1])];
            let ones = _mm256_set1_epi16(1);
            let sums = [_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)];
            let half = _mm256_set1_epi16(1 << (SHIFT - 1));
            let high = |x| _mm256_srai_epi16::<SHIFT>(_mm256_add_epi16(x, half));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let [a_high, b_high] = [high(a), high(b)];
            let low = if SHIFT == 8 {
                // The lower byte as it is.
                let low = |x| _mm256_and_si256(x, _mm256_set1_epi16(0xff));
                _mm256_packus_epi16(low(a), low(b))
            } else {
                let low = |x, high| _mm256_sub_epi16(x, _mm256_slli_epi16::<SHIFT>(high));
                _mm256_packs_epi16(low(a, a_high), low(b, b_high))
            };
            for (out, plane) in out.iter_mut().zip([_mm256_packs_epi16(a_high, b_high), low]) {
                let plane = _mm256_permutevar8x32_epi32(plane, order);
                _mm256_storeu_si256(out.as_mut_ptr().cast(), plane);
            }
            sums
        }
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        let out: *mut __m256i = out.as_mut_ptr().cast();
        avx2! {
            _mm256_storeu_si256(out, x[0]);
            _mm256_storeu_si256(out.add(1), x[1]);
        }
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        let sign = self.splat(-0.0);
        both!(_mm256_andnot_ps(sign, x))
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx2! {
            self.f32_to_bits([
                _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0]),
                _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1]),
            ])
        }
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx2! {
            self.f32_to_bits([
                _mm256_cmp_ps::<_CMP_LE_OQ>(a[0], b[0]),
                _mm256_cmp_ps::<_CMP_LE_OQ>(a[1], b[1]),
            ])
        }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        avx2! { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn load_bytes(self, x: &Bytes64) -> Self::I32 {
        // Aligned, as the type is.
        let x: *const __m256i = x.0.as_ptr().cast();
        avx2! { [_mm256_load_si256(x), _mm256_load_si256(x.add(1))] }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        avx2! {
            let x = _mm_loadu_si128(x.as_ptr().cast());
            let wide = [_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(x))];
            self.i32_to_f32(wide)
        }
    }
}
