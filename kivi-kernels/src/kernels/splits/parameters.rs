//! Scales and zeros of a split: read once, divided by a power of two, paired up.

use super::fragments::{high_halves, larger_halves, low_halves, power_above, power_of_two, undo};
use super::plane::warp_max;
use super::{Pair, SplitConfig, Words};
use cubecl::prelude::*;
use half::f16;

/// Reads this unit's share of the key parameters of a split, runs of 8 channels, and leaves the
/// largest scale of the warp in `largest`. Groups from `left` on read as zero.
#[cube]
pub(super) fn read_keys(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    left: usize,
    raw: &mut Array<Words>,
    largest: &mut SharedMemory<u32>,
    #[comptime] config: SplitConfig,
) {
    let eighths = comptime!(config.head_dim / 8);
    let mut scale = 0u32;
    #[unroll]
    for i in 0..comptime!(config.key_items()) {
        let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
        let group = item / eighths;
        let mut low = Words::new(0);
        let mut high = Words::new(0);
        if group < left && group < config.split_groups() {
            let page_groups = comptime!(config.page_groups());
            let at = bases[group / page_groups] as usize
                + comptime!(config.key_parameters_at() / 4)
                + (head * page_groups + group % page_groups) * comptime!(config.head_dim / 4)
                + item % eighths * 2;
            low = wide[at];
            high = wide[at + 1];
        }
        raw[comptime!(2 * i)] = low;
        raw[comptime!(2 * i + 1)] = high;
        #[unroll]
        for k in 0..2usize {
            scale =
                larger_halves(scale, low_halves(low[comptime!(2 * k)], low[comptime!(2 * k + 1)]));
            scale = larger_halves(
                scale,
                low_halves(high[comptime!(2 * k)], high[comptime!(2 * k + 1)]),
            );
        }
    }
    let scale = max(scale & 0xffffu32, scale >> 16u32);
    let scale = warp_max::<u32>(scale);
    if UNIT_POS_X == 0 {
        largest[UNIT_POS_Y as usize] = scale;
    }
}

/// The power of two above all scales of the split.
#[cube]
pub(super) fn common_power(largest: &SharedMemory<u32>, #[comptime] config: SplitConfig) -> i32 {
    let mut scale = 0u32;
    #[unroll]
    for warp in 0..comptime!(config.warps()) {
        scale = max(scale, largest[warp]);
    }
    power_above(scale)
}

/// Writes what [`read_keys`] read as pairs of channels `[group][head_dim / 2]`: scales times
/// `2^(8−b−power)`, `b` the bit of the pair in its word, and zeros. Returns `power`.
#[cube]
pub(super) fn store_keys(
    raw: &Array<Words>,
    largest: &SharedMemory<u32>,
    scales: &mut SharedMemory<Words>,
    zeros: &mut SharedMemory<Words>,
    #[comptime] config: SplitConfig,
) -> i32 {
    let power = common_power(largest, config);
    let eighths = comptime!(config.head_dim / 8);
    let top = power_of_two(8 - power);
    #[unroll]
    for i in 0..comptime!(config.key_items()) {
        let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
        let group = item / eighths;
        let eighth = item % eighths;
        if group < config.split_groups() {
            let mut scale = Words::empty();
            let mut zero = Words::empty();
            #[unroll]
            for k in 0..4usize {
                let words = raw[comptime!(2 * i + k / 2)];
                let first = words[comptime!(2 * (k % 2))];
                let second = words[comptime!(2 * (k % 2) + 1)];
                let factor = Pair::new(f16::cast_from(top * undo(eighth, config.key_bits, k)));
                let folded = Pair::reinterpret(low_halves(first, second)) * factor;
                scale[k] = u32::reinterpret(folded);
                zero[k] = high_halves(first, second);
            }
            let at = group * comptime!(config.channel_stride());
            scales[at + eighth] = scale;
            zeros[at + (eighth ^ (group % 8))] = zero;
        }
    }
    power
}

/// Reads this unit's share of the value parameters of a split, runs of 8 tokens of one group of
/// channels, and leaves the largest scale of the warp in `largest`. Tokens from `left` on read as
/// zero.
#[cube]
pub(super) fn read_values(
    narrow: &Array<u32>,
    bases: &SharedMemory<u32>,
    head: usize,
    left: usize,
    raw: &mut Array<u32>,
    largest: &mut SharedMemory<u32>,
    #[comptime] config: SplitConfig,
) {
    let groups = comptime!(config.value_groups());
    let mut scale = 0u32;
    #[unroll]
    for i in 0..comptime!(config.value_items()) {
        let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
        let token = item / groups * 8;
        let inside = token < left && token < config.split_tokens;
        let mut at = 0usize;
        if inside {
            let page_tokens = comptime!(config.page_tokens);
            at = bases[token / page_tokens] as usize * 4
                + comptime!(config.value_parameters_at())
                + (head * page_tokens + token % page_tokens) * groups
                + item % groups;
        }
        #[unroll]
        for k in 0..8usize {
            let mut word = 0u32;
            if inside {
                word = narrow[at + comptime!(k * groups)];
            }
            raw[comptime!(8 * i + k)] = word;
        }
        #[unroll]
        for k in 0..4usize {
            let pair = low_halves(raw[comptime!(8 * i + 2 * k)], raw[comptime!(8 * i + 2 * k + 1)]);
            scale = larger_halves(scale, pair);
        }
    }
    let scale = max(scale & 0xffffu32, scale >> 16u32);
    let scale = warp_max::<u32>(scale);
    if UNIT_POS_X == 0 {
        largest[UNIT_POS_Y as usize] = scale;
    }
}

/// Writes what [`read_values`] read as pairs of tokens `[group][split_tokens / 2]`: scales
/// times `2^(15−b−power)`, `b` the bit of the pair in its word, and zeros. Returns `power`.
#[cube]
pub(super) fn store_values(
    raw: &Array<u32>,
    largest: &SharedMemory<u32>,
    scales: &mut SharedMemory<Words>,
    zeros: &mut SharedMemory<Words>,
    #[comptime] config: SplitConfig,
) -> i32 {
    // Not below 0: `2^15` is the largest power of two in f16.
    let power = max(common_power(largest, config), 0i32);
    let groups = comptime!(config.value_groups());
    let top = power_of_two(15 - power);
    #[unroll]
    for i in 0..comptime!(config.value_items()) {
        let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
        let run = item / groups;
        if run < comptime!(config.split_tokens / 8) {
            let mut scale = Words::empty();
            let mut zero = Words::empty();
            #[unroll]
            for k in 0..4usize {
                let first = raw[comptime!(8 * i + 2 * k)];
                let second = raw[comptime!(8 * i + 2 * k + 1)];
                let factor = Pair::new(f16::cast_from(top * undo(run, config.value_bits, k)));
                let folded = Pair::reinterpret(low_halves(first, second)) * factor;
                scale[k] = u32::reinterpret(folded);
                zero[k] = high_halves(first, second);
            }
            let group = item % groups;
            let at = group * comptime!(config.token_stride());
            scales[at + run] = scale;
            zeros[at + (run ^ group)] = zero;
        }
    }
    power
}
