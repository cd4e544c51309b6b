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

fn depth<S: Simd>(_simd: S, bits: u32) -> usize {
    S::depth(bits)
}

proptest! {
    #[test]
    fn dot4_is_exact_up_to_its_depth(
        seed in prop::collection::vec((any::<[u8; 32]>(), any::<[u8; 4]>()), 1..=40),
        extreme in any::<bool>(),
    ) {
        for isa in Isa::available() {
            for bits in [2u32, 3, 4, 5, 6, 8] {
                let terms: Vec<([u32; LANES], u32)> = seed
                    .iter()
                    .map(|(codes, x)| {
                        let top = u8::MAX >> (8 - bits);
                        let most = if bits == 8 { 0x80 } else { top };
                        let codes = codes.map(|code| if extreme { most } else { code & top });
                        let codes = codes.as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes);
                        let codes: Vec<u32> = codes.collect();
                        let x = x.map(|x| if extreme { 127 } else { x });
                        let x = x.map(|x| if x == 128 { 127 } else { x });
                        (codes.try_into().unwrap(), u32::from_le_bytes(x))
                    })
                    .collect();
                let (out, terms) = (&mut [0; LANES], &terms[..]);
                let result = &mut *out;
                let used = run!(
                    isa,
                    |simd, bits: u32, terms: &'a [([u32; LANES], u32)], result: &'a mut [u32; LANES]|
                    -> usize {
                        let used = terms.len().min(depth(simd, bits));
                        let mut sum = simd.no_dots();
                        for (codes, x) in &terms[..used] {
                            sum = simd.dot4(bits, sum, simd.load_u32(codes), simd.splat_u32(*x));
                        }
                        simd.store_u32(simd.widen(sum), result);
                        used
                    }
                );
                for (lane, &found) in out.iter().enumerate() {
                    let mut expected = 0;
                    for (codes, x) in &terms[..used] {
                        let (codes, x) = (codes[lane].to_le_bytes(), x.to_le_bytes());
                        for (code, x) in codes.into_iter().zip(x) {
                            let code = match bits {
                                8 => i32::from(code.cast_signed()),
                                _ => i32::from(code),
                            };
                            expected += code * i32::from(x.cast_signed());
                        }
                    }
                    prop_assert_eq!(found.cast_signed(), expected, "{} {} bits", isa, bits);
                }
            }
        }
    }

    #[test]
    fn split_rounds_and_keeps_the_order(x in prop::collection::vec(-16256f32..16256.0, 32)) {
        for isa in Isa::available() {
            let (mut planes, mut sums) = ([[0; LANES]; 2], [0; LANES]);
            let (x_ref, planes_ref, sums_ref) = (&x[..], &mut planes, &mut sums);
            run!(
                isa,
                |simd, x_ref: &'a [f32], planes_ref: &'a mut [[u32; LANES]; 2],
                 sums_ref: &'a mut [u32; LANES]| -> () {
                    let mut vectors = [simd.splat(0.0); 4];
                    for (vector, x) in vectors.iter_mut().zip(x_ref.as_chunks::<LANES>().0) {
                        *vector = simd.load(x);
                    }
                    let ([high, low], sums) = simd.split(&vectors);
                    simd.store_u32(high, &mut planes_ref[0]);
                    simd.store_u32(low, &mut planes_ref[1]);
                    simd.store_u32(sums, sums_ref);
                }
            );
            let bytes = planes.map(|plane| -> Vec<i32> {
                plane.iter().flat_map(|x| x.to_le_bytes()).map(|x| x.cast_signed().into()).collect()
            });
            let mut total = 0;
            for (i, x) in x.iter().enumerate() {
                let rounded = x.round_ties_even() as i32;
                prop_assert_eq!(128 * bytes[0][i] + bytes[1][i], rounded, "{} {}", isa, i);
                prop_assert!((-127..=127).contains(&bytes[0][i]));
                prop_assert!((-64..=63).contains(&bytes[1][i]));
                total += rounded;
            }
            let sum: i32 = sums.iter().map(|x| x.cast_signed()).sum();
            prop_assert_eq!(sum, total);
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
