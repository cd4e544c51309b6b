//! Words to operands of the matrix unit.

use super::{Pair, Words};
use cubecl::prelude::*;

/// The place of pair `j` of a word: how far to shift the word right, and the bit of the pair then.
///
/// A half read as a denormal is linear in its low 10 bits.
pub(super) const fn place(bits: usize, j: usize) -> (u32, u32) {
    let bit = bits * j;
    let shift = if bits == 2 { 10 } else { 8 };
    if bit + bits <= 10 { (0, bit as u32) } else { (shift, (bit - shift as usize) as u32) }
}

/// Pair `j` of a word of codes: `c·2^(b−24)`, exactly.
#[cube]
pub(super) fn codes(word: u32, #[comptime] bits: usize, #[comptime] j: usize) -> Pair {
    let (shift, bit) = comptime!(place(bits, j));
    let mask = comptime!((((1u32 << bits) - 1) * 0x0001_0001) << bit);
    // A shift by 0 would be emitted, too.
    if comptime!(shift == 0) {
        Pair::reinterpret(word & mask)
    } else {
        Pair::reinterpret((word >> shift) & mask)
    }
}

/// The low halves of two words.
#[cube]
pub(super) fn low_halves(first: u32, second: u32) -> u32 {
    (first & 0xffffu32) | (second << 16u32)
}

/// The high halves of two words.
#[cube]
pub(super) fn high_halves(first: u32, second: u32) -> u32 {
    (first >> 16u32) | (second & 0xffff_0000u32)
}

/// The larger of two pairs of halves that are not negative, half by half.
#[cube]
pub(super) fn larger_halves(a: u32, b: u32) -> u32 {
    u32::reinterpret(max(Pair::reinterpret(a), Pair::reinterpret(b)))
}

/// The power `e ≥ −7` such that scales up to the larger half of `pair` are below `2^e`.
#[cube]
pub(super) fn power_above(pair: u32) -> i32 {
    let largest = max(pair & 0xffffu32, pair >> 16u32);
    let exponent = largest >> 10u32;
    i32::cast_from(max(exponent, 7u32)) - 14
}

/// `2^exponent` as f32, for −126 ≤ exponent ≤ 127.
#[cube]
pub(super) fn power_of_two(exponent: i32) -> f32 {
    f32::reinterpret(u32::cast_from(exponent + 127) << 23u32)
}

/// The pairs of chunk `chunk + offset` of a row of pairs that begins at the 128-bit word `at`.
///
/// `at` is a multiple of the row's stride, and `chunk` has no bit of `offset`, so that offsets can
/// be added without carry; `swizzle` is the row modulo 8 where rows are swizzled, else 0.
#[cube]
pub(super) fn chunk_pairs(
    rows: &SharedMemory<Words>,
    at: usize,
    chunk: usize,
    swizzle: usize,
    words: &mut Array<u32>,
    #[comptime] offset: usize,
    #[comptime] pairs: usize,
) {
    if comptime!(pairs == 2) {
        // 8 bits: two chunks share 128 bits.
        let both = rows[(at + chunk / 2) ^ swizzle ^ comptime!(offset / 2)];
        let odd = chunk % 2 == 1;
        words[0] = select(odd, both[2], both[0]);
        words[1] = select(odd, both[3], both[1]);
    } else {
        let first = (at + chunk * comptime!(pairs / 4)) ^ swizzle;
        #[unroll]
        for i in 0..comptime!(pairs / 4) {
            let four = rows[first ^ comptime!(offset * pairs / 4 + i)];
            #[unroll]
            for k in 0..4usize {
                words[comptime!(4 * i + k)] = four[k];
            }
        }
    }
}

/// `2^−b` for the bit `b` of pair `4 · run + k` of a row of words, within its word.
#[cube]
pub(super) fn undo(run: usize, #[comptime] bits: usize, #[comptime] k: usize) -> f32 {
    let pairs = comptime!(16 / bits);
    let even = comptime!(reciprocal(bits, k % pairs));
    if comptime!(pairs == 8) {
        select(run % 2 == 1, comptime!(reciprocal(bits, k + 4)), even)
    } else {
        even.runtime()
    }
}

/// `2^−b` for the bit of pair `j`.
fn reciprocal(bits: usize, j: usize) -> f32 {
    1.0 / (1_u32 << place(bits, j).1) as f32
}

/// What a sum of products with keys is worth, beside the row's own unit: scales carry `2^(8−b−power)`, codes
/// `2^(b−24)`.
#[cube]
pub(super) fn key_unit(power: i32) -> f32 {
    power_of_two(power + 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    /// Every code at every place of a word: masked, it is the half that the kernels take it for.
    #[test]
    fn masked_codes_are_denormals() {
        for bits in [2, 4, 8] {
            for j in 0..16 / bits {
                let (shift, bit) = place(bits, j);
                let mask = ((1_u32 << bits) - 1) << bit;
                for code in 0..1_u32 << bits {
                    for high in [0, 16] {
                        let word = code << (high + bits * j) | !(mask << shift << high);
                        let half = (word >> high >> shift) as u16 & mask as u16;
                        let expected = f64::from(code) * f64::from(bit as i32 - 24).exp2();
                        assert_eq!(f16::from_bits(half).to_f64(), expected, "{bits} bits, {j}");
                    }
                }
                assert_eq!(reciprocal(bits, j), (-(bit as f32)).exp2());
            }
        }
    }
}
