//! The quantizer of `kivi_core::quantizer`, bit for bit: exact thresholds, integer rounding.

use super::number::{self, f16_to_f32, f32_to_f16};
use crate::Store;
use cubecl::prelude::*;

/// `1/L` rounded to f32.
pub(crate) fn reciprocal(bits: usize) -> f32 {
    1.0 / ((1u32 << bits) - 1) as f32
}

/// Minimum and maximum of a group.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Range {
    min: f32,
    max: f32,
    /// 1 if there is a NaN or an infinity: comparisons may drop NaN.
    damaged: u32,
}

/// The range of `count` elements, of which the first is element `channel` of the row at word `row`, and
/// the following ones are `rows` words and `channels` elements further each.
#[cube]
pub(crate) fn range(
    arena: &Array<u32>,
    row: usize,
    channel: usize,
    count: usize,
    #[comptime] rows: usize,
    #[comptime] channels: usize,
    #[comptime] store: Store,
) -> Range {
    let first = number::element(arena, row, channel, store);
    let mut min = first;
    let mut max = first;
    let mut damaged = 0u32;
    for i in 0..count {
        let x = number::element(arena, row + i * rows, channel + i * channels, store);
        let finite = (u32::reinterpret(x) & 0x7F80_0000u32) != 0x7F80_0000u32;
        min = select(x < min, x, min);
        max = select(x > max, x, max);
        damaged = select(finite, damaged, 1u32);
    }
    Range { min, max, damaged }
}

#[cube]
impl Range {
    /// `max − min` as an integer that orders like it; 0 for a damaged group.
    pub(crate) fn width(self) -> u32 {
        let width = u32::reinterpret(self.max - self.min) & 0x7FFF_FFFFu32;
        select(self.damaged == 1u32, 0u32, width)
    }

    /// The word of parameters of the group at `1 / reciprocal + 1` levels, the scale being stored
    /// `1 << stored_shift` fold.
    pub(crate) fn params(self, #[comptime] reciprocal: f32, #[comptime] stored: f32) -> u32 {
        let scale = f32_to_f16((self.max - self.min) * reciprocal);
        // Below the smallest normal f16 a scale is stored as 0; an infinite range saturates.
        let scale = select(scale < 0x0400u32, 0u32, min(scale, 0x7BFFu32));
        let scale =
            if comptime!(stored == 1.0) { scale } else { f32_to_f16(f16_to_f32(scale) * stored) };
        // The minimum of two zeros of different sign is +0.
        let min = u32::reinterpret(self.min);
        let zero = f32_to_f16(f32::reinterpret(select(min == 0x8000_0000u32, 0u32, min)));
        select(self.damaged == 1u32, 0x7E00_0000u32, scale | (zero << 16u32))
    }
}

/// First bit of code `index` of a word, as [`order::shift`](crate::order::shift).
#[cube]
pub(crate) fn shift(index: usize, #[comptime] bits: usize) -> u32 {
    16u32 * (index as u32 % 2u32) + index as u32 / 2u32 * comptime!(bits as u32)
}

/// Whether an element lies above the threshold between codes `k` and `k + 1`.
#[cube]
fn above(distance: f32, scale: f32, k: u32) -> bool {
    // Exact: 11 significant bits times at most 9.
    let threshold = (f32::cast_from(k) + 0.5f32) * scale;
    distance > threshold || ((k & 1u32) == 1u32 && distance == threshold)
}

/// The code of an element `distance` above its group's zero.
#[cube]
pub(crate) fn code(distance: f32, scale: f32, #[comptime] bits: usize) -> u32 {
    let levels = comptime!((1u32 << bits) - 1);
    let mut code = 0u32;
    if comptime!(bits == 2) {
        #[unroll]
        for k in 0..levels {
            code += select(above(distance, scale, k), 1u32, 0u32);
        }
    } else if scale > 0.0f32 {
        // A guess, wherever the division rounds to, then corrected with the same test.
        let largest = comptime!(levels as f32);
        let guess = max(distance / scale, 0.0f32);
        code = u32::cast_from(min(guess, largest));
        while code < levels && above(distance, scale, code) {
            code += 1u32;
        }
        while code > 0u32 && !above(distance, scale, code - 1u32) {
            code -= 1u32;
        }
    }
    select(scale > 0.0f32, code, 0u32)
}
