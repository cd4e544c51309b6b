//! 16-bit floats in words, converted with integer operations: the rounding of a conversion is not
//! defined everywhere, and WGSL cannot reinterpret a word as two halves.

use crate::Store;
use cubecl::prelude::*;

/// The f32 of the lower 16 bits.
#[cube]
pub(crate) fn f16_to_f32(half: u32) -> f32 {
    let sign = (half & 0x8000u32) << 16u32;
    let magnitude = half & 0x7FFFu32;
    let exponent = magnitude >> 10u32;
    // Below 2⁻¹⁴ a magnitude counts units of 2⁻²⁴.
    let small = u32::reinterpret(f32::cast_from(magnitude) * 5.960_464_5e-8f32);
    let normal = (magnitude << 13u32) + 0x3800_0000u32;
    let special = normal + 0x3800_0000u32;
    let finite = select(exponent == 0u32, small, normal);
    f32::reinterpret(select(exponent == 31u32, special, finite) | sign)
}

/// The f16 nearest to a finite f32, ties to even, saturating; NaN and infinities stay what they are.
#[cube]
pub(crate) fn f32_to_f16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16u32) & 0x8000u32;
    let magnitude = bits & 0x7FFF_FFFFu32;
    // From 2⁻¹⁴ on: rebias the exponent and round away 13 bits.
    let rounded = magnitude + 0xFFFu32 + ((magnitude >> 13u32) & 1u32);
    let normal = (rounded - 0x3800_0000u32) >> 13u32;
    // Below: count units of 2⁻²⁴.
    let exponent = magnitude >> 23u32;
    let mantissa = (magnitude & 0x7F_FFFFu32) | 0x80_0000u32;
    // From 25 on everything rounds to 0; so it does at 25.
    let by = 126u32 - min(exponent, 112u32);
    let by = min(by, 25u32);
    let kept = mantissa >> by;
    let lost = mantissa & ((1u32 << by) - 1u32);
    let half = 1u32 << (by - 1u32);
    let up = lost > half || (lost == half && (kept & 1u32) == 1u32);
    let small = kept + select(up, 1u32, 0u32);
    let finite = min(select(magnitude >= 0x3880_0000u32, normal, small), 0x7BFFu32);
    let nan = 0x7E00u32 | ((magnitude >> 13u32) & 0x3FFu32);
    let special = select(magnitude > 0x7F80_0000u32, nan, 0x7C00u32);
    sign | select(magnitude >= 0x7F80_0000u32, special, finite)
}

/// The bf16 nearest to a finite f32, ties to even, saturating.
#[cube]
pub(crate) fn f32_to_bf16(x: f32) -> u32 {
    let bits = u32::reinterpret(x);
    let sign = (bits >> 16u32) & 0x8000u32;
    let magnitude = bits & 0x7FFF_FFFFu32;
    let rounded = (magnitude + 0x7FFFu32 + ((magnitude >> 16u32) & 1u32)) >> 16u32;
    let finite = min(rounded, 0x7F7Fu32);
    let nan = (magnitude >> 16u32) | 0x40u32;
    let special = select(magnitude > 0x7F80_0000u32, nan, 0x7F80u32);
    sign | select(magnitude >= 0x7F80_0000u32, special, finite)
}

/// Whether rounding a finite number to 16 bits has to saturate it.
#[cube]
pub(crate) fn saturates(x: f32, #[comptime] store: Store) -> bool {
    let magnitude = u32::reinterpret(x) & 0x7FFF_FFFFu32;
    let finite = magnitude < 0x7F80_0000u32;
    // The halfway point above the largest finite number rounds to an infinity.
    if comptime!(matches!(store, Store::F16)) {
        finite && magnitude >= 0x477F_F000u32
    } else if comptime!(matches!(store, Store::Bf16)) {
        finite && magnitude >= 0x7F7F_8000u32
    } else {
        false.runtime()
    }
}

/// One element, rounded, in the lowest bits of a word.
#[cube]
pub(crate) fn encode(x: f32, #[comptime] store: Store) -> u32 {
    if comptime!(matches!(store, Store::F16)) {
        f32_to_f16(x)
    } else if comptime!(matches!(store, Store::Bf16)) {
        f32_to_bf16(x)
    } else {
        u32::reinterpret(x)
    }
}

/// Element `index` of an array of elements of a store type that starts at word `start`.
#[cube]
pub(crate) fn element(
    words: &Array<u32>,
    start: usize,
    index: usize,
    #[comptime] store: Store,
) -> f32 {
    if comptime!(matches!(store, Store::F32)) {
        f32::reinterpret(words[start + index])
    } else {
        let half = words[start + index / 2] >> (16u32 * (index as u32 & 1u32));
        if comptime!(matches!(store, Store::F16)) {
            f16_to_f32(half & 0xFFFFu32)
        } else {
            f32::reinterpret(half << 16u32)
        }
    }
}

/// The scale of a word of parameters.
#[cube]
pub(crate) fn scale_of(params: u32) -> f32 {
    f16_to_f32(params & 0xFFFFu32)
}

/// The zero of a word of parameters.
#[cube]
pub(crate) fn zero_of(params: u32) -> f32 {
    f16_to_f32(params >> 16u32)
}
