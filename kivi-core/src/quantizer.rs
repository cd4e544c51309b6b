//! The quantizer: the one definition every backend is held against.
//!
//! A group of values `x` and `b` bits, with `L = 2^b − 1`, become
//!
//! - the zero `z = round_f16(min x)`,
//! - the scale `s = round_f16((max x − min x) · f32(1/L))`, to nearest even; a scale below 2⁻¹⁴ is
//!   stored as 0 and one beyond the range of f16 as the largest finite value,
//! - per element the code of the nearest level, ties to the even one, so that `x ≈ code · s + z`.
//!
//! The code is found by exact thresholds instead of a division: it is the number of `k` in
//! `0 … L−1` with `(x − z) > (k + ½)·s`, or `≥` for odd `k`. `s` has 11 significant bits and
//! `k + ½` at most 9, so the products are exact in f32, and neither an inexact division nor a
//! contracted multiply-add can move a code. It equals the paper's "divide and round half to even"
//! (`quant/new_pack.py` of the authors' code) except where that division is itself inexact.
//!
//! A constant group, or one whose scale underflows, has `s = 0` and only codes 0, so it
//! reconstructs to `z`. A group that holds a NaN or an infinity has `s = 0`, `z = NaN` and codes 0:
//! the damage is visible, and stays in the group.
//!
//! With `store_dtype` f16 the zero is exactly the minimum; other types round it to f16 (saturating),
//! and the thresholds use the stored, rounded one.
//!
//! # Promoted channels
//!
//! With a [`Promotion`](crate::Promotion) of share `p`, the `⌈p·D⌉` of a kv head's `D` key channels
//! with the largest [`range`] in a group of tokens have 4 bits instead of 2. Their code is kept as
//! two 2-bit planes, `4·hi + lo`, and their scale as `4s`, so that the ordinary plane, scale and
//! zero are those of a 2-bit channel with codes `hi`, and the second plane adds `lo · s`
//! ([`GroupParams::of_promoted`]). Promoting channels group by group, and two planes of equal
//! width, are ideas of Kitty (arXiv 2511.18643).

mod promoted;

pub use promoted::{promote, range};

use crate::Bits;
use half::f16;

/// The NaN stored as the zero of a group with a non-finite element.
pub const NAN_ZERO: f16 = f16::from_bits(0x7E00);

/// Scales below 2⁻¹⁴, the smallest normal f16, are stored as 0.
const MIN_SCALE: f16 = f16::MIN_POSITIVE;

/// Scale and zero of one group; an element is `code · scale + zero` in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupParams {
    /// Step between two levels; 0 for a constant or a non-finite group.
    pub scale: f16,
    /// The value of code 0.
    pub zero: f16,
}

impl GroupParams {
    /// Scale and zero of a group. An empty group counts as constant 0.
    pub fn of(bits: Bits, group: impl IntoIterator<Item = f32>) -> Self {
        let Some((min, max)) = min_max(group) else {
            return Self { scale: f16::ZERO, zero: NAN_ZERO };
        };
        if min > max {
            return Self { scale: f16::ZERO, zero: f16::ZERO };
        }
        let scale = round_f16_saturating((max - min) * (1.0 / bits.levels() as f32));
        let scale = if scale < MIN_SCALE { f16::ZERO } else { scale };
        // A group with both zeros has +0 as its minimum, whichever comes first.
        Self { scale, zero: round_f16_saturating(min + 0.0) }
    }

    /// The code of one element of the group.
    pub fn code(self, bits: Bits, x: f32) -> u32 {
        if self.scale == f16::ZERO {
            return 0;
        }
        let scale = self.scale.to_f32();
        let distance = x - self.zero.to_f32();
        let above = |k: u32| {
            let threshold = (k as f32 + 0.5) * scale;
            distance > threshold || (k % 2 == 1 && distance == threshold)
        };
        match bits {
            Bits::Two | Bits::Four => (0..bits.levels()).filter(|&k| above(k)).count() as u32,
            Bits::Eight => {
                // The cast saturates: negative becomes 0.
                let mut code = ((distance / scale) as u32).min(bits.levels());
                while code < bits.levels() && above(code) {
                    code += 1;
                }
                while code > 0 && !above(code - 1) {
                    code -= 1;
                }
                code
            }
        }
    }

    /// `code · scale + zero`, in f32, the product rounded before the sum.
    pub fn dequantize(self, code: u32) -> f32 {
        code as f32 * self.scale.to_f32() + self.zero.to_f32()
    }
}

/// Minimum and maximum, `∞` and `−∞` of nothing; `None` with a NaN or an infinity.
fn min_max(group: impl IntoIterator<Item = f32>) -> Option<(f32, f32)> {
    let (mut min, mut max) = (f32::INFINITY, f32::NEG_INFINITY);
    for x in group {
        // Comparisons drop NaN, so it is looked for explicitly.
        if !x.is_finite() {
            return None;
        }
        min = min.min(x);
        max = max.max(x);
    }
    Some((min, max))
}

/// Nearest f16, ties to even; what lies beyond the range becomes the largest finite value.
fn round_f16_saturating(x: f32) -> f16 {
    let rounded = f16::from_f32(x);
    if rounded.is_infinite() { f16::MAX.copysign(rounded) } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn params(bits: Bits, group: &[f32]) -> GroupParams {
        GroupParams::of(bits, group.iter().copied())
    }

    #[test]
    fn levels_of_a_2_bit_group_are_the_integers() {
        let p = params(Bits::Two, &[0.0, 3.0]);
        assert_eq!((p.scale.to_f32(), p.zero.to_f32()), (1.0, 0.0));
        // Ties go to the even code: 0.5 → 0, 1.5 → 2, 2.5 → 2.
        let codes: Vec<_> = [-1.0, 0.0, 0.5, 0.51, 1.49, 1.5, 2.5, 2.51, 3.0, 9.0]
            .map(|x| p.code(Bits::Two, x))
            .into();
        assert_eq!(codes, [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]);
    }

    #[test]
    fn degenerate_groups() {
        for bits in Bits::ALL {
            // Constant, and a range whose scale is below the smallest normal f16.
            for group in [[0.25, 0.25], [0.0, 2f32.powi(-15)]] {
                let p = params(bits, &group);
                assert_eq!(p.scale, f16::ZERO);
                assert_eq!(p.code(bits, group[1]), 0);
                assert_eq!(p.dequantize(0), group[0]);
            }
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let p = params(bits, &[1.0, bad, -1.0]);
                assert_eq!((p.scale, p.zero.to_bits()), (f16::ZERO, 0x7E00));
                assert_eq!(p.code(bits, 1.0), 0);
                assert_eq!(p.code(bits, bad), 0);
            }
            // ±65504 has a range of 131008, which fits after the division by L.
            let p = params(bits, &[-65504.0, 65504.0]);
            let scale = f16::from_f32(131008.0 / bits.levels() as f32);
            assert_eq!(p.scale, scale);
            assert_eq!(p.code(bits, -65504.0), 0);
            assert_eq!(p.code(bits, 65504.0), bits.levels());
            // A range beyond f16 saturates the scale.
            let p = params(bits, &[-1e38, 1e38]);
            assert_eq!(p.scale, f16::MAX);
            assert_eq!(p.zero, f16::MIN);
        }
    }

    proptest! {
        /// Against an f64 evaluation: the code is a nearest level, and the even one of two.
        #[test]
        fn code_is_the_nearest_level(
            group in prop::collection::vec(-100f32..100.0, 1..64),
            bits in prop::sample::select(&Bits::ALL),
        ) {
            let group: Vec<f32> = group.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            let p = params(bits, &group);
            prop_assume!(p.scale > f16::ZERO);
            let (s, z) = (p.scale.to_f64(), p.zero.to_f64());
            for &x in &group {
                // f16 values and an 11-bit scale: exact enough in f64 to decide every tie.
                let exact = ((f64::from(x) - z) / s).clamp(0.0, f64::from(bits.levels()));
                prop_assert_eq!(p.code(bits, x), exact.round_ties_even() as u32);
            }
        }

        /// Inside the group's range the error is at most half a step, plus what rounding the
        /// scale to f16 can leave uncovered at the top.
        #[test]
        fn reconstruction_error(
            group in prop::collection::vec(-8f32..8.0, 2..64),
            bits in prop::sample::select(&Bits::ALL),
        ) {
            let group: Vec<f32> = group.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
            let p = params(bits, &group);
            prop_assume!(p.scale > f16::ZERO);
            let s = p.scale.to_f32();
            let slack = bits.levels() as f32 * s * 2f32.powi(-11);
            for &x in &group {
                let error = (p.dequantize(p.code(bits, x)) - x).abs();
                prop_assert!(error <= s / 2.0 + slack + 1e-6, "error {error} of step {s}");
            }
        }
    }
}
