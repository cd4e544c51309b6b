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
    for known in ["portable", "avx2", "avx512", "neon"] {
        let available = Isa::available().any(|isa| isa.name() == known);
        match Isa::named(known) {
            Ok(isa) => assert!(available && isa.name() == known),
            Err(error) => assert!(!available && matches!(error, Error::Unsupported { .. })),
        }
    }
    for wrong in ["", "AVX2", "sse9", "avx512f"] {
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
fn signed_bytes_convert() {
    let bytes = [-128, -127, -1, 0, 1, 2, 126, 127, 5, -6, 77, -78, 100, -101, 31, -32];
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

/// Pairs of floats of every kind, in both orders.
fn special_pairs() -> Vec<[f32; 2]> {
    let special = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, -1e-42, 1.5, f32::MAX];
    special.iter().flat_map(|&a| special.iter().map(move |&b| [a, b])).collect()
}

#[test]
fn comparisons_follow_the_definition_for_every_kind_of_number() {
    for isa in Isa::available() {
        for pairs in special_pairs().as_chunks::<LANES>().0 {
            let found = run!(isa, |simd, pairs: &'a [[f32; 2]; LANES]| -> [[u32; LANES]; 5] {
                let a = simd.load(&pairs.map(|[a, _]| a));
                let b = simd.load(&pairs.map(|[_, b]| b));
                let results = [
                    simd.f32_to_bits(simd.max(a, b)),
                    simd.f32_to_bits(simd.min(a, b)),
                    simd.less(a, b),
                    simd.less_or_equal(a, b),
                    simd.f32_to_bits(simd.abs(a)),
                ];
                let mut out = [[0; LANES]; 5];
                for (result, out) in results.into_iter().zip(&mut out) {
                    simd.store_u32(result, out);
                }
                out
            });
            for (lane, [a, b]) in pairs.iter().enumerate() {
                let mask = |set| if set { u32::MAX } else { 0 };
                let expected = [
                    (if a > b { a } else { b }).to_bits(),
                    (if a < b { a } else { b }).to_bits(),
                    mask(a < b),
                    mask(a <= b),
                    a.to_bits() & (u32::MAX >> 1),
                ];
                assert_eq!(found.map(|lanes| lanes[lane]), expected, "{isa}: {a}, {b}");
            }
        }
    }
}

#[test]
fn the_largest_lane_is_found_beside_nan() {
    for isa in Isa::available() {
        for nan in 0..=LANES {
            let mut x = [-3.0; LANES];
            x[..8].copy_from_slice(&[-3.0, 2.0, f32::NEG_INFINITY, 7.5, -0.0, 7.25, 1.0, -9.0]);
            x.rotate_right(5 * nan % LANES);
            if let Some(x) = x.get_mut(nan) {
                *x = f32::NAN;
            }
            let lanes = &x;
            let found = run!(isa, |simd, lanes: &'a [f32; LANES]| -> f32 {
                simd.max_lane(simd.load(lanes))
            });
            let largest = x.into_iter().filter(|x| !x.is_nan()).reduce(f32::max).unwrap();
            let allowed = found == largest || nan < LANES && (found.is_nan() || x.contains(&found));
            assert!(allowed, "{isa}: {found} of {x:?}");
        }
    }
}

/// What cannot be represented may become anything, but always something.
#[test]
fn splitting_survives_every_number() {
    let half = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30, 3e9, -3e9, 40_000.0];
    let wild: [f32; LANES] = std::array::from_fn(|lane| half[lane % 8]);
    for isa in Isa::available() {
        let wild = &wild;
        run!(isa, |simd, wild: &'a [f32; LANES]| -> () {
            let (mut planes, mut out) = ([[0; 8]; 2], [0; LANES]);
            let sums = simd.split::<8>(&[simd.load(wild); 2], &mut planes);
            simd.store_u32(sums, &mut out);
        });
    }
}

#[test]
fn floats_load_exactly() {
    // Every bf16, as the upper half of an f32; an f32 with bytes that differ.
    for isa in Isa::available() {
        for first in (0..=u16::MAX).step_by(LANES) {
            let upper: [u16; LANES] = std::array::from_fn(|i| first + i as u16);
            let (short, long) = (
                upper.map(u16::to_le_bytes),
                upper.map(|x| (u32::from(x) << 16 | 0x1234).to_le_bytes()),
            );
            let (short, long) = (&short, &long);
            let [short, long] = run!(isa, |simd,
                                           short: &'a [[u8; 2]; LANES],
                                           long: &'a [[u8; 4]; LANES]|
             -> [[u32; LANES]; 2] {
                let mut out = [[0; LANES]; 2];
                simd.store_u32(simd.f32_to_bits(simd.load_bf16_le(short)), &mut out[0]);
                simd.store_u32(simd.f32_to_bits(simd.load_le(long)), &mut out[1]);
                out
            });
            for (short, upper) in short.into_iter().zip(upper) {
                let (found, bits) = (f32::from_bits(short), u32::from(upper) << 16);
                let same = short == bits || found.is_nan() && f32::from_bits(bits).is_nan();
                assert!(same, "{isa}: {upper:#x} became {found}");
            }
            assert_eq!(long, upper.map(|x| u32::from(x) << 16 | 0x1234), "{isa}");
        }
    }
}

/// What `vpdpbusd`, `vpabsb` and a masked `vpsubb` do to one byte, from their documentation: the dot
/// product of the set `avx512` is exact for every pair of operands, also where no processor here can
/// run it.
#[test]
fn the_model_of_vpdpbusd_is_exact_for_every_pair() {
    // Unsigned times signed, which never leaves 16 bits; sums of four in 32 bits.
    let vpdpbusd = |a: u8, b: i8| i32::from(a) * i32::from(b);
    let vpabsb = |a: i8| a.unsigned_abs();
    let negated = |a: i8, code: i8| if code < 0 { 0i8.wrapping_sub(a) } else { a };
    for x in -127..=127i8 {
        for code in i8::MIN..=i8::MAX {
            let expected = i32::from(code) * i32::from(x);
            assert_eq!(vpdpbusd(vpabsb(code), negated(x, code)), expected, "{code}·{x}");
        }
        for code in 0..64u8 {
            assert_eq!(vpdpbusd(code, x), i32::from(code) * i32::from(x), "{code}·{x}");
        }
    }
    // The depth it has there.
    assert!(4 * 128 * 127 * (1i64 << 14) <= i32::MAX.into());
}

fn check_split<const SHIFT: i32>(isa: Isa, x: &[f32]) -> Result<(), TestCaseError> {
    struct Split<'a, const SHIFT: i32>(&'a [f32]);
    impl<const SHIFT: i32> Kernel for Split<'_, SHIFT> {
        type Output = ([[u32; 8]; 2], [u32; LANES]);
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let mut vectors = [simd.splat(0.0); 2];
            for (vector, x) in vectors.iter_mut().zip(self.0.as_chunks::<LANES>().0) {
                *vector = simd.load(x);
            }
            let (mut planes, mut sums) = ([[0; 8]; 2], [0; LANES]);
            simd.store_u32(simd.split::<SHIFT>(&vectors, &mut planes), &mut sums);
            (planes, sums)
        }
    }
    let x: Vec<f32> = x.iter().map(|x| x * (127 << SHIFT) as f32).collect();
    let ([high, low], sums) = isa.run(Split::<SHIFT>(&x));
    let bytes = |plane: [u32; 8]| -> Vec<i32> {
        plane.iter().flat_map(|x| x.to_le_bytes()).map(|x| x.cast_signed().into()).collect()
    };
    let (high, low, half) = (bytes(high), bytes(low), 1 << (SHIFT - 1));
    let mut total = 0;
    for (i, x) in x.iter().enumerate() {
        let rounded = x.round_ties_even() as i32;
        prop_assert_eq!((high[i] << SHIFT) + low[i], rounded, "{} {}", isa, i);
        prop_assert!((-127..=127).contains(&high[i]) && (-half..half).contains(&low[i]));
        total += rounded;
    }
    prop_assert_eq!(sums.iter().map(|x| x.cast_signed()).sum::<i32>(), total);
    Ok(())
}

fn depth<S: Simd>(_simd: S, bits: u32) -> usize {
    S::depth(bits)
}

proptest! {
    #[test]
    fn integers_agree_with_plain_arithmetic(
        a in any::<[u32; LANES]>(),
        b in any::<[u32; LANES]>(),
        by in 0..32u32,
    ) {
        for isa in Isa::available() {
            let (x, y) = (&a, &b);
            let found = run!(
                isa,
                |simd, x: &'a [u32; LANES], y: &'a [u32; LANES], by: u32| -> [[u32; LANES]; 7] {
                    let (a, b) = (simd.load_u32(x), simd.load_u32(y));
                    let mut bytes = Bytes64::ZERO;
                    bytes.0.copy_from_slice(bytemuck::bytes_of(x));
                    let results = [
                        simd.shr(a, by),
                        simd.shl(a, by),
                        simd.and(a, b),
                        simd.add_u32(a, b),
                        simd.sub_u32(a, b),
                        simd.f32_to_bits(simd.i32_to_f32(a)),
                        simd.load_bytes(&bytes),
                    ];
                    let mut out = [[0; LANES]; 7];
                    for (result, out) in results.into_iter().zip(&mut out) {
                        simd.store_u32(result, out);
                    }
                    out
                }
            );
            for (lane, (&a, &b)) in a.iter().zip(&b).enumerate() {
                let nearest = (a.cast_signed() as f32).to_bits();
                let (sum, difference) = (a.wrapping_add(b), a.wrapping_sub(b));
                let expected = [a >> by, a << by, a & b, sum, difference, nearest, a];
                prop_assert_eq!(found.map(|lanes| lanes[lane]), expected, "{}", isa);
            }
        }
    }

    #[test]
    fn lanes_are_added_in_the_documented_order(x in prop::array::uniform16(-1e6f32..1e6)) {
        let mut sums = x.to_vec();
        while sums.len() > 1 {
            let (lower, upper) = sums.split_at(sums.len() / 2);
            sums = lower.iter().zip(upper).map(|(a, b)| a + b).collect();
        }
        let expected = sums[0];
        for isa in Isa::available() {
            let lanes = &x;
            let found =
                run!(isa, |simd, lanes: &'a [f32; LANES]| -> f32 { simd.sum(simd.load(lanes)) });
            prop_assert_eq!(found.to_bits(), expected.to_bits(), "{}", isa);
        }
    }

    #[test]
    fn dot4_is_exact_up_to_its_depth(
        seed in prop::collection::vec((any::<[[u8; 32]; 2]>(), any::<[u8; 4]>()), 1..=40),
        extreme in any::<bool>(),
    ) {
        for isa in Isa::available() {
            for bits in [2u32, 3, 4, 5, 6, 8] {
                let terms: Vec<([u32; LANES], u32)> = seed
                    .iter()
                    .map(|(codes, x)| {
                        let top = u8::MAX >> (8 - bits);
                        let most = if bits == 8 { 0x80 } else { top };
                        let codes = codes.as_flattened().iter();
                        let codes: Vec<u8> = codes.map(|&code| if extreme { most } else { code & top }).collect();
                        let codes = codes.as_chunks::<4>().0.iter().copied().map(u32::from_le_bytes);
                        let codes: Vec<u32> = codes.collect();
                        let x = x.map(|x| if extreme { 128 } else { x });
                        // −128 only with unsigned codes.
                        let x = x.map(|x| if x == 128 && bits == 8 { 127 } else { x });
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
    fn split_rounds_and_keeps_the_order(x in prop::collection::vec(-1f32..=1.0, 32)) {
        for isa in Isa::available() {
            check_split::<7>(isa, &x)?;
            check_split::<8>(isa, &x)?;
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
