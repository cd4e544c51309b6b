//! Every instruction set against plain arithmetic, and against the portable one.

use super::*;
use proptest::prelude::*;

/// Runs a generic expression over [`Simd`] as a [`Kernel`].
macro_rules! run {
    ($isa:expr, |$simd:ident, $($name:ident: $type:ty),*| -> $output:ty $body:block) => {{
        struct K<'a> { $($name: $type,)* _lifetime: std::marker::PhantomData<&'a ()> }
        impl<'a> Kernel for K<'a> {
            type Output = $output;
            #[inline(always)]
            fn run<S: Simd>(self, $simd: S) -> $output {
                let Self { $($name,)* .. } = self;
                $body
            }
        }
        $isa.run(K { $($name,)* _lifetime: std::marker::PhantomData })
    }};
}

fn floats(length: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-10.0f32..10.0, length)
}

/// `e^x` of a slice, without a shift.
fn exp(isa: Isa, x: &[f32]) -> (Vec<f32>, f32) {
    let mut y = x.to_vec();
    let out = &mut y[..];
    let sum = run!(isa, |simd, out: &'a mut [f32]| -> f32 { slices::exp_in_place(simd, out, 0.0) });
    (y, sum)
}

#[test]
fn names_and_availability() {
    assert_eq!(Isa::named("portable").unwrap(), Isa::PORTABLE);
    for isa in Isa::available() {
        assert_eq!(Isa::named(isa.name()).unwrap(), isa);
    }
    if Isa::available().count() == 1 {
        assert!(matches!(Isa::named("avx2"), Err(Error::Unsupported { .. })));
    }
    for wrong in ["", "AVX2", "sse9"] {
        let error = Isa::named(wrong).unwrap_err();
        assert!(matches!(error, Error::InvalidConfig { .. }), "{error}");
    }
}

#[test]
fn exp_is_accurate_and_independent_of_the_position() {
    for isa in Isa::available() {
        let x: Vec<f32> = (-10_400..8_872).map(|i| i as f32 / 100.0 + 0.001).collect();
        let (y, _) = exp(isa, &x);
        for (i, (&x, &y)) in x.iter().zip(&y).enumerate() {
            let expected = f64::from(x).exp();
            // Below the smallest normal number the spacing is 2⁻¹⁴⁹.
            let allowed = 2e-7 * expected + if x < -87.0 { 2.0f64.powi(-149) } else { 0.0 };
            let error = (f64::from(y) - expected).abs();
            assert!(error <= allowed, "{isa}: exp({x}) = {y}, expected {expected:e}");
            if i % 97 == 0 {
                let alone = exp(isa, &[0.0, x]).0[1];
                assert_eq!(alone.to_bits(), y.to_bits(), "{isa}: exp({x})");
            }
        }
        let special = [f32::NEG_INFINITY, -1e30, -104.1, 0.0, 88.8, f32::INFINITY, f32::NAN];
        let (y, _) = exp(isa, &special);
        assert_eq!(y[..6], [0.0, 0.0, 0.0, 1.0, f32::INFINITY, f32::INFINITY], "{isa}");
        assert!(y[6].is_nan(), "{isa}");
    }
}

#[test]
fn every_half_converts_exactly() {
    let halves: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
    for isa in Isa::available() {
        // A length that leaves a tail.
        for halves in [&halves[..], &halves[..1003]] {
            let mut floats = vec![0.0; halves.len()];
            let out = &mut floats[..];
            run!(isa, |simd, halves: &'a [[u8; 2]], out: &'a mut [f32]| -> () {
                slices::f16_to_f32(simd, halves, out);
            });
            for (&half, float) in halves.iter().zip(floats) {
                let expected = half::f16::from_le_bytes(half).to_f32();
                let same =
                    expected.to_bits() == float.to_bits() || expected.is_nan() && float.is_nan();
                assert!(same, "{isa}: {half:?} became {float}");
            }
        }
    }
}

/// Lane sums of eight steps.
fn dot<const BITS: u32>(isa: Isa, w: &[Bytes32; 8], x: &[[i8; 4]; 8]) -> [f32; LANES] {
    struct Dot<'a, const BITS: u32>(&'a [Bytes32; 8], &'a [[i8; 4]; 8]);
    impl<const BITS: u32> Kernel for Dot<'_, BITS> {
        type Output = [f32; LANES];
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let mut sum = simd.dot_zero();
            for (step, (w, x)) in self.0.iter().zip(self.1).enumerate() {
                sum = simd.dot_step::<BITS>(sum, step, simd.load_bytes(w), *x);
            }
            let mut lanes = [0.0; LANES];
            simd.store(simd.i32_to_f32(simd.dot_sum(sum)), &mut lanes);
            lanes
        }
    }
    isa.run(Dot::<BITS>(w, x))
}

#[test]
fn inner_products_are_exact_at_the_extremes() {
    fn check<const BITS: u32>(isa: Isa) {
        let extremes: [i32; 2] = if BITS == 8 { [-128, 127] } else { [0, (1 << BITS) - 1] };
        for code in extremes {
            for x in [-127i8, 127] {
                let lanes = dot::<BITS>(isa, &[Bytes32([code as u8; 32]); 8], &[[x; 4]; 8]);
                let expected = (32 * code * i32::from(x)) as f32;
                assert_eq!(lanes, [expected; LANES], "{isa}, {BITS} bits, {code}");
            }
        }
    }
    for isa in Isa::available() {
        check::<2>(isa);
        check::<3>(isa);
        check::<4>(isa);
        check::<5>(isa);
        check::<6>(isa);
        check::<8>(isa);
    }
}

#[test]
fn inner_products_keep_lanes_and_columns_apart() {
    for isa in Isa::available() {
        for step in 0..8 {
            for i in 0..32 {
                let mut w = [Bytes32::default(); 8];
                w[step].0[i] = 7;
                let x = std::array::from_fn(|s| std::array::from_fn(|j| (1 + 4 * s + j) as i8));
                let mut expected = [0.0; LANES];
                expected[i / 4] = (7 * (1 + 4 * step + i % 4)) as f32;
                assert_eq!(dot::<4>(isa, &w, &x), expected, "{isa}");
                assert_eq!(dot::<8>(isa, &w, &x), expected, "{isa}");
            }
        }
    }
}

#[test]
fn interleaving_moves_groups_of_four() {
    let rows: [Bytes32; 8] =
        std::array::from_fn(|o| Bytes32(std::array::from_fn(|i| (32 * o + i) as u8)));
    for isa in Isa::available() {
        let (rows, mut out) = (&rows, [Bytes32::default(); 8]);
        let result = &mut out;
        run!(isa, |simd, rows: &'a [Bytes32; 8], result: &'a mut [Bytes32; 8]| -> () {
            simd.interleave(rows, result);
        });
        for (o, row) in rows.iter().enumerate() {
            for (i, &code) in row.0.iter().enumerate() {
                assert_eq!(out[i / 4].0[4 * o + i % 4], code, "{isa}");
            }
        }
    }
}

#[test]
fn signed_bytes_convert() {
    let bytes = [-128, -127, -1, 0, 1, 2, 126, 127];
    for isa in Isa::available() {
        let bytes = &bytes;
        let lanes = run!(isa, |simd, bytes: &'a [i8; LANES]| -> [f32; LANES] {
            let mut lanes = [0.0; LANES];
            simd.store(simd.load_i8(bytes), &mut lanes);
            lanes
        });
        assert_eq!(lanes, bytes.map(f32::from), "{isa}");
    }
}

fn unpacked<const BITS: u32>(isa: Isa, words: &[u32], length: usize) -> Vec<f32> {
    let mut out = vec![-1.0; length];
    let result = &mut out[..];
    match BITS {
        2 => run!(isa, |simd, words: &'a [u32], result: &'a mut [f32]| -> () {
            slices::unpack_codes::<_, 2>(simd, words, result);
        }),
        4 => run!(isa, |simd, words: &'a [u32], result: &'a mut [f32]| -> () {
            slices::unpack_codes::<_, 4>(simd, words, result);
        }),
        _ => run!(isa, |simd, words: &'a [u32], result: &'a mut [f32]| -> () {
            slices::unpack_codes::<_, 8>(simd, words, result);
        }),
    }
    out
}

proptest! {
    #[test]
    fn codes_unpack_lowest_bits_first(
        words in prop::collection::vec(any::<u32>(), 0..9),
        length in 0usize..80,
    ) {
        let expected = |bits: u32| -> Vec<f32> {
            let per_word = 32 / bits as usize;
            let code = |i: usize| match words.get(i / per_word) {
                Some(word) => (word >> (bits * (i % per_word) as u32) & ((1 << bits) - 1)) as f32,
                None => -1.0,
            };
            (0..length).map(code).collect()
        };
        for isa in Isa::available() {
            prop_assert_eq!(unpacked::<2>(isa, &words, length), expected(2));
            prop_assert_eq!(unpacked::<4>(isa, &words, length), expected(4));
            prop_assert_eq!(unpacked::<8>(isa, &words, length), expected(8));
        }
    }

    #[test]
    fn slices_agree_with_f64(a in floats(0..70), b in floats(0..70)) {
        let products = a.iter().zip(&b).map(|(&a, &b)| f64::from(a) * f64::from(b));
        let magnitude: f64 = products.clone().map(f64::abs).sum();
        for isa in Isa::available() {
            let (x, y) = (&a[..], &b[..]);
            let dot = run!(isa, |simd, x: &'a [f32], y: &'a [f32]| -> f32 {
                slices::dot(simd, x, y)
            });
            // A partial sum takes at most 5 products; 4 more additions combine them.
            let error = (f64::from(dot) - products.clone().sum::<f64>()).abs();
            prop_assert!(error <= 10.0 * f64::from(f32::EPSILON) * magnitude);

            let largest = run!(isa, |simd, x: &'a [f32]| -> f32 { slices::max(simd, x) });
            prop_assert_eq!(largest, a.iter().copied().fold(f32::NEG_INFINITY, f32::max));

            let (y, sum) = exp(isa, &a);
            let expected: f64 = y.iter().map(|&y| f64::from(y)).sum();
            prop_assert!((f64::from(sum) - expected).abs() <= 2e-6 * expected);
        }
    }
}
