//! The vector operations of AVX-512 on 256-bit vectors: those of AVX2 in encodings that reach 32
//! registers, and integer products that are added up in 32 bits at once.

use super::Kernel;
use super::avx2::{Products, X86};
use std::arch::x86_64::*;

/// AVX-512 F, BW, DQ, VL and VNNI on top of AVX2.
pub(crate) type Avx512 = X86<Vnni>;

/// Sums in eight 32-bit lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Vnni(());

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
        detected.then_some(Self::with(Vnni(())))
    }
}

// SAFETY: `Avx512::new` alone makes a value.
unsafe impl Products for Vnni {
    #[inline]
    fn run<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        #[inline(never)]
        fn shell<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: an `Avx512` exists only where these features were detected.
        unsafe { shell(simd, kernel) }
    }

    /// `2¹⁴·4·128·127` is below 2³¹.
    #[inline(always)]
    fn depth(_bits: u32) -> usize {
        1 << 14
    }

    /// `vpdpbusd` multiplies unsigned by signed bytes; signed codes move their sign to `x` first.
    #[inline(always)]
    fn dot4(self, bits: u32, sum: __m256i, codes: __m256i, x: __m256i) -> __m256i {
        // SAFETY: `self` exists only where the features were detected.
        unsafe {
            if bits == 8 {
                _mm256_dpbusd_epi32(sum, _mm256_abs_epi8(codes), _mm256_sign_epi8(x, codes))
            } else {
                _mm256_dpbusd_epi32(sum, codes, x)
            }
        }
    }

    #[inline(always)]
    fn widen(self, sums: __m256i) -> __m256i {
        sums
    }
}
