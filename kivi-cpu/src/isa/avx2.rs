//! The vector operations in AVX2, FMA and F16C.

use super::Kernel;
use super::simd::{Bytes32, LANES, Simd};
use std::arch::x86_64::*;

/// Vectors of AVX2, FMA and F16C, with the integer products of `P`. A value is the proof that this
/// processor has all of them, see [`Products`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct X86<P>(P);

/// AVX2 alone.
pub(crate) type Avx2 = X86<Pairs>;

/// What newer extensions do better: integer inner products, as in [`Simd`], and a shell.
///
/// # Safety
/// A value of the type must exist only where AVX2, FMA, F16C and what the type stands for were
/// detected.
pub(super) unsafe trait Products: Copy + Send + Sync + 'static {
    /// Runs `kernel` in code compiled for the instruction set.
    fn run<K: Kernel>(simd: X86<Self>, kernel: K) -> K::Output;
    /// [`Simd::depth`]
    fn depth(bits: u32) -> usize;
    /// [`Simd::dot4`]
    fn dot4(self, bits: u32, sum: __m256i, codes: __m256i, x: __m256i) -> __m256i;
    /// [`Simd::widen`]
    fn widen(self, sums: __m256i) -> __m256i;
}

impl<P: Products> X86<P> {
    /// With proof.
    pub(super) fn with(products: P) -> Self {
        Self(products)
    }
}

/// Sums in sixteen 16-bit lanes, two to a lane of 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pairs(());

impl Avx2 {
    /// `None` where the processor or the operating system lacks one of the extensions.
    pub(crate) fn new() -> Option<Self> {
        let detected = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        detected.then_some(Self::with(Pairs(())))
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

/// Evaluates intrinsics inside a method of [`X86`] or [`Products`].
macro_rules! avx2 {
    ($($body:tt)*) => {
        // SAFETY: `self` exists only where avx2, fma and f16c were detected; loads and stores go
        // through references to arrays of exactly the size they touch and need no alignment.
        unsafe { $($body)* }
    };
}

// SAFETY: `Avx2::new` alone makes a value.
unsafe impl Products for Pairs {
    #[inline]
    fn run<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        #[inline(never)]
        fn shell<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: an `Avx2` exists only where these features were detected.
        unsafe { shell(simd, kernel) }
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

    /// `vpmaddubsw`; signed codes move their sign to `x` first.
    ///
    /// The addition is opaque to the compiler, which otherwise adds the products of several steps
    /// among each other first and runs out of registers (*measured*: half of the instructions were
    /// moves to and from the stack).
    #[inline(always)]
    fn dot4(self, bits: u32, sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        avx2! {
            if bits == 8 {
                // One product is all that fits before widening, so there is no sum to add to.
                _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
            } else {
                add_opaque(sum, _mm256_maddubs_epi16(codes, x))
            }
        }
    }

    #[inline(always)]
    fn widen(self, sums: __m256i) -> __m256i {
        avx2! { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
    }
}

impl<P: Products> Simd for X86<P> {
    type F32 = __m256;
    type I32 = __m256i;
    type Dots = __m256i;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Output {
        P::run(self, kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F32 {
        avx2! { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32; LANES]) -> Self::F32 {
        avx2! { _mm256_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: Self::F32, out: &mut [f32; LANES]) {
        avx2! { _mm256_storeu_ps(out.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_le(self, x: &[[u8; 4]; LANES]) -> Self::F32 {
        avx2! { _mm256_loadu_ps(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_f16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        avx2! { _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16_le(self, x: &[[u8; 2]; LANES]) -> Self::F32 {
        avx2! {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx2! { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx2! { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx2! { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32 {
        avx2! { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx2! { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: Self::F32, b: Self::F32) -> Self::F32 {
        avx2! { _mm256_min_ps(a, b) }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F32) -> f32 {
        avx2! {
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn sum(self, x: Self::F32) -> f32 {
        avx2! {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps::<1>(x, x)))
        }
    }

    #[inline(always)]
    fn splat_u32(self, x: u32) -> Self::I32 {
        avx2! { _mm256_set1_epi32(x.cast_signed()) }
    }

    #[inline(always)]
    fn load_u32(self, x: &[u32; LANES]) -> Self::I32 {
        avx2! { _mm256_loadu_si256(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn shr(self, x: Self::I32, by: u32) -> Self::I32 {
        avx2! { _mm256_srl_epi32(x, _mm_cvtsi32_si128((by & 31).cast_signed())) }
    }

    #[inline(always)]
    fn shl(self, x: Self::I32, by: u32) -> Self::I32 {
        avx2! { _mm256_sll_epi32(x, _mm_cvtsi32_si128((by & 31).cast_signed())) }
    }

    #[inline(always)]
    fn and(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx2! { _mm256_and_si256(a, b) }
    }

    #[inline(always)]
    fn add_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx2! { _mm256_add_epi32(a, b) }
    }

    #[inline(always)]
    fn sub_u32(self, a: Self::I32, b: Self::I32) -> Self::I32 {
        avx2! { _mm256_sub_epi32(a, b) }
    }

    #[inline(always)]
    fn i32_to_f32(self, x: Self::I32) -> Self::F32 {
        avx2! { _mm256_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::I32) -> Self::F32 {
        avx2! { _mm256_castsi256_ps(x) }
    }

    #[inline(always)]
    fn f32_to_bits(self, x: Self::F32) -> Self::I32 {
        avx2! { _mm256_castps_si256(x) }
    }

    #[inline(always)]
    fn depth(bits: u32) -> usize {
        P::depth(bits)
    }

    #[inline(always)]
    fn no_dots(self) -> Self::Dots {
        avx2! { _mm256_setzero_si256() }
    }

    #[inline(always)]
    fn dot4(self, bits: u32, sum: Self::Dots, codes: Self::I32, x: Self::I32) -> Self::Dots {
        self.0.dot4(bits, sum, codes, x)
    }

    #[inline(always)]
    fn widen(self, sums: Self::Dots) -> Self::I32 {
        self.0.widen(sums)
    }

    #[inline(always)]
    fn split<const SHIFT: i32>(self, x: &[Self::F32; 4]) -> ([Self::I32; 2], Self::I32) {
        avx2! {
            let [a, b, c, d] = [
                _mm256_cvtps_epi32(x[0]),
                _mm256_cvtps_epi32(x[1]),
                _mm256_cvtps_epi32(x[2]),
                _mm256_cvtps_epi32(x[3]),
            ];
            // Narrowing works on 128-bit halves: four elements of each vector stay together.
            let [ab, cd] = [_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d)];
            let ones = _mm256_set1_epi16(1);
            let sums = _mm256_add_epi32(_mm256_madd_epi16(ab, ones), _mm256_madd_epi16(cd, ones));
            let half = _mm256_set1_epi16(1 << (SHIFT - 1));
            let high = |x| _mm256_srai_epi16::<SHIFT>(_mm256_add_epi16(x, half));
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let ordered = |x| _mm256_permutevar8x32_epi32(x, order);
            let [ab_high, cd_high] = [high(ab), high(cd)];
            let low = if SHIFT == 8 {
                // The lower byte as it is.
                let low = |x| _mm256_and_si256(x, _mm256_set1_epi16(0xff));
                _mm256_packus_epi16(low(ab), low(cd))
            } else {
                let low = |x, high| _mm256_sub_epi16(x, _mm256_slli_epi16::<SHIFT>(high));
                _mm256_packs_epi16(low(ab, ab_high), low(cd, cd_high))
            };
            ([ordered(_mm256_packs_epi16(ab_high, cd_high)), ordered(low)], sums)
        }
    }

    #[inline(always)]
    fn store_u32(self, x: Self::I32, out: &mut [u32; LANES]) {
        avx2! { _mm256_storeu_si256(out.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn abs(self, x: Self::F32) -> Self::F32 {
        avx2! { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
    }

    #[inline(always)]
    fn less(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx2! { _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }

    #[inline(always)]
    fn less_or_equal(self, a: Self::F32, b: Self::F32) -> Self::I32 {
        avx2! { _mm256_castps_si256(_mm256_cmp_ps::<_CMP_LE_OQ>(a, b)) }
    }

    #[inline(always)]
    fn prefetch(self, address: *const u8) {
        avx2! { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn load_bytes(self, x: &Bytes32) -> Self::I32 {
        avx2! { _mm256_load_si256(x.0.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_i8(self, x: &[i8; LANES]) -> Self::F32 {
        avx2! { _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast()))) }
    }

    /// An 8×8 transposition of 32-bit elements: rows `o` and `o + 4` share a register from the load
    /// on, so that no shuffle crosses the 128-bit halves.
    #[inline(always)]
    fn interleave(self, rows: &[Bytes32; 8], out: &mut [Bytes32; 8]) {
        for half in 0..2 {
            avx2! {
                let load = |row: usize| _mm_load_si128(rows[row].0.as_ptr().cast::<__m128i>().add(half));
                let pair = |row| _mm256_set_m128i(load(row + 4), load(row));
                let [a, b, c, d] = [pair(0), pair(1), pair(2), pair(3)];
                let [ab, cd] = [_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d)];
                let [ab_high, cd_high] = [_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d)];
                let steps = [
                    _mm256_unpacklo_epi64(ab, cd),
                    _mm256_unpackhi_epi64(ab, cd),
                    _mm256_unpacklo_epi64(ab_high, cd_high),
                    _mm256_unpackhi_epi64(ab_high, cd_high),
                ];
                for (out, step) in out[4 * half..].iter_mut().zip(steps) {
                    _mm256_store_si256(out.0.as_mut_ptr().cast(), step);
                }
            }
        }
    }
}
