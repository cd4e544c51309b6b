//! Promoted key channels: which they are, and their 4-bit codes.

use super::{GroupParams, min_max};
use crate::{Bits, Promotion};
use half::f16;

/// `max − min` of a group in f32, by which channels are chosen for promotion. A group with a NaN or
/// an infinity has range 0: it reads as NaN at any width, so it takes no channel's place. A range
/// beyond f32 is infinite.
pub fn range(group: impl IntoIterator<Item = f32>) -> f32 {
    // Of nothing the difference is −∞. The sum turns a −0, the difference of two zeros of different
    // sign, into 0.
    min_max(group).map_or(0.0, |(min, max)| (max - min).max(0.0) + 0.0)
}

/// The mask of the `count` channels with the largest `ranges`, ties to the lower channel: channel `d`
/// is bit `d mod 32` of word `d/32`.
pub fn promote(ranges: &[f32], count: usize) -> Vec<u32> {
    let mut channels: Vec<usize> = (0..ranges.len()).collect();
    // A stable sort keeps the lower of two equal channels in front.
    channels.sort_by(|&a, &b| ranges[b].total_cmp(&ranges[a]));
    let mut mask = vec![0; Promotion::mask_words(ranges.len())];
    for channel in channels.into_iter().take(count) {
        mask[channel / 32] |= 1 << (channel % 32);
    }
    mask
}

impl GroupParams {
    /// Scale and zero of a promoted channel as they are stored: four times the scale of
    /// [`GroupParams::of`] at 4 bits, and the same zero.
    ///
    /// Four times an f16 is an f16, unless it overflows: like every scale it then becomes the
    /// largest finite one, so `s` saturates at 65504/4 = 16376 instead of 65504. A group of f16
    /// values, whose `s` is at most 2·65504/15, never comes near.
    pub fn of_promoted(group: impl IntoIterator<Item = f32>) -> Self {
        let fine = Self::of(Bits::Four, group);
        let scale = (fine.scale.to_f32() * 4.0).min(f16::MAX.to_f32());
        Self { scale: f16::from_f32(scale), ..fine }
    }

    /// The scale `s` and the zero of the 4-bit codes of a promoted channel, given the stored ones: a
    /// quarter of the scale, which is exact for all that [`GroupParams::of_promoted`] makes.
    pub fn fine(self) -> Self {
        Self { scale: f16::from_f32(self.scale.to_f32() * 0.25), ..self }
    }

    /// The code `4·hi + lo` of an element of a promoted channel whose stored parameters these are.
    pub fn promoted_code(self, x: f32) -> u32 {
        self.fine().code(Bits::Four, x)
    }

    /// `code · s + z` of a promoted channel whose stored parameters these are, `s` being a quarter
    /// of the stored scale. In f32 it is the same as `hi · 4s + lo · s + z`: products and their sum
    /// are exact.
    pub fn dequantize_promoted(self, code: u32) -> f32 {
        code as f32 * (self.scale.to_f32() * 0.25) + self.zero.to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_lower_channel() {
        assert_eq!(promote(&[1.0, 2.0, 2.0, 3.0, 2.0], 3), [0b01110]);
        assert_eq!(promote(&[0.0; 40], 33), [u32::MAX, 1]);
        assert_eq!(promote(&[0.0, f32::INFINITY, 1.0], 1), [0b010]);
        assert_eq!(promote(&[0.0; 3], 0), [0]);
        // Both differences of two zeros are the number 0.
        let zeros = [range([0.0, -0.0]), range([-0.0, 0.0]), range([-0.0; 2]), range([])];
        assert_eq!(zeros.map(f32::to_bits), [0; 4]);
    }

    #[test]
    fn a_damaged_group_takes_no_place() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(range([1.0, bad, -1.0]), 0.0);
            let p = GroupParams::of_promoted([1.0, bad]);
            assert_eq!((p.scale, p.zero.to_bits()), (f16::ZERO, 0x7E00));
            assert_eq!((p.promoted_code(1.0), p.promoted_code(bad)), (0, 0));
            assert!(p.dequantize_promoted(0).is_nan());
        }
        assert_eq!(range([-3e38, 3e38]), f32::INFINITY);
    }

    #[test]
    fn the_stored_scale_saturates_like_every_other() {
        // ±65504 in f16: s = round_f16(131008 / 15) = 8736 (steps of 8 there), stored as 34944.
        let p = GroupParams::of_promoted([-65504.0, 65504.0]);
        assert_eq!((p.scale.to_f32(), p.fine().scale.to_f32()), (34944.0, 8736.0));
        // A range of 15 · 20000 would take a stored scale of 80000.
        let p = GroupParams::of_promoted([0.0, 300_000.0]);
        assert_eq!((p.scale, p.fine().scale.to_f32()), (f16::MAX, 16376.0));
        assert_eq!(p.promoted_code(300_000.0), 15);
        assert_eq!(p.dequantize_promoted(15), 15.0 * 16376.0);
        // The smallest scale that is not stored as 0, and the one below.
        let p = GroupParams::of_promoted([0.0, 15.0 * 2f32.powi(-14)]);
        assert_eq!((p.scale.to_f32(), p.fine().scale), (2f32.powi(-12), f16::MIN_POSITIVE));
        assert_eq!(GroupParams::of_promoted([0.0, 15.0 * 2f32.powi(-15)]).scale, f16::ZERO);
    }

    proptest! {
        /// A promoted channel is the channel at 4 bits, to the last bit, and its upper plane alone is
        /// within three steps below.
        #[test]
        fn promoted_is_4_bits(
            group in prop::collection::vec(-300f32..300.0, 1..64),
            exponent in -20i32..8,
        ) {
            let group: Vec<f32> = group
                .iter()
                .map(|&x| f16::from_f32(x * 2f32.powi(exponent)).to_f32())
                .collect();
            let stored = GroupParams::of_promoted(group.iter().copied());
            let plain = GroupParams::of(Bits::Four, group.iter().copied());
            prop_assert_eq!(stored.fine(), plain);
            for &x in &group {
                let code = stored.promoted_code(x);
                prop_assert_eq!(code, plain.code(Bits::Four, x));
                let exact = plain.dequantize(code);
                prop_assert_eq!(stored.dequantize_promoted(code), exact);
                let (hi, lo) = (code / 4, code % 4);
                let s = plain.scale.to_f32();
                let two_planes = hi as f32 * stored.scale.to_f32() + lo as f32 * s;
                prop_assert_eq!(two_planes + stored.zero.to_f32(), exact);
                // Each sum rounds once.
                let below = exact - stored.dequantize(hi);
                let rounding = 2f32.powi(-22) * (exact.abs() + 4.0 * s);
                prop_assert!((below - lo as f32 * s).abs() <= rounding);
            }
        }
    }
}
