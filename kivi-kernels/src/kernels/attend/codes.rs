//! Codes as floats.

use super::{FOLDED_EXPONENT, UNFOLD, Unpack};
use cubecl::prelude::*;

/// Code `index` of a word in the order of pairs, as a float; as [`Unpack::Denormal`] in the units that
/// [`folding`] undoes.
#[cube]
pub(super) fn code_at(
    word: u32,
    index: usize,
    #[comptime] bits: usize,
    #[comptime] unpack: Unpack,
) -> f32 {
    let levels = comptime!((1u32 << bits) - 1);
    // The upper half is brought down once for all of its codes.
    let half = word >> (16u32 * (index as u32 % 2u32));
    let shift = index as u32 / 2u32 * comptime!(bits as u32);
    if comptime!(unpack == Unpack::Denormal) {
        f32::reinterpret(half & (levels << shift))
    } else {
        f32::cast_from((half >> shift) & levels)
    }
}

/// What an operand for code `index` of a word is multiplied with.
#[cube]
pub(super) fn folding(index: usize, #[comptime] bits: usize, #[comptime] unpack: Unpack) -> f32 {
    if comptime!(unpack == Unpack::Denormal) {
        let bit = index as u32 / 2u32 * comptime!(bits as u32);
        f32::reinterpret((comptime!(127 + FOLDED_EXPONENT) - bit) << 23u32)
    } else {
        (1.0f32).runtime()
    }
}

/// What a sum of products of codes is multiplied with.
#[cube]
pub(super) fn unfolded(sum: f32, #[comptime] unpack: Unpack) -> f32 {
    if comptime!(unpack == Unpack::Denormal) { sum * UNFOLD } else { sum }
}
