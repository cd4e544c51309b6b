//! Weighted sums of packed values.

use super::fragments::{
    chunk_pairs, codes, high_halves, larger_halves, low_halves, power_of_two, undo, warp_max,
};
use super::keys::common_power;
use super::{Floats, MatrixConfig, Pair, ROWS, Sums, Words};
use cubecl::prelude::*;
use half::f16;

/// Reads this unit's share of the value parameters of a split, runs of 8 tokens of one group of
/// channels, and leaves the largest scale of the warp in `largest`. Tokens from `left` on read as
/// zero.
#[cube]
pub(super) fn read_parameters(
    narrow: &Array<u32>,
    bases: &SharedMemory<u32>,
    head: usize,
    left: usize,
    raw: &mut Array<u32>,
    largest: &mut SharedMemory<u32>,
    #[comptime] config: MatrixConfig,
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

/// Writes what [`read_parameters`] read as pairs of tokens `[group][split_tokens / 2]`: scales
/// times `2^(15−b−power)`, `b` the bit of the pair in its word, and zeros. Returns `power`.
#[cube]
pub(super) fn store_parameters(
    raw: &Array<u32>,
    largest: &SharedMemory<u32>,
    scales: &mut SharedMemory<Words>,
    zeros: &mut SharedMemory<Words>,
    #[comptime] config: MatrixConfig,
) -> u32 {
    let power = common_power(largest, config);
    let groups = comptime!(config.value_groups());
    let top = power_of_two(15 - i32::cast_from(power));
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
            let at = item % groups * comptime!(config.value_stride()) + run;
            scales[at] = scale;
            zeros[at] = zero;
        }
    }
    power
}

/// The terms `Σ p_t·z_t` of each group of channels, `[warps][ROWS][8]`: each warp adds up its share
/// of the tokens.
#[cube]
pub(super) fn zero_terms(
    weights: &SharedMemory<Words>,
    zeros: &SharedMemory<Words>,
    zero_sums: &mut SharedMemory<f32>,
    steps: usize,
    #[comptime] config: MatrixConfig,
) {
    let def = cmma::MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let gid = UNIT_POS_X as usize / 4;
    let tig = UNIT_POS_X as usize % 4;
    let warp = UNIT_POS_Y as usize;
    let pairs = comptime!(config.value_word() / 2);
    let group = min(gid, comptime!(config.value_groups() - 1));
    let mut sums = Array::<Sums>::new(2usize);
    sums[0] = Sums::new(0.0);
    sums[1] = Sums::new(0.0);
    let mut step = warp;
    while step < steps {
        let row = step * 4 + tig;
        let mut p = Array::<u32>::new(pairs);
        chunk_pairs(weights, gid * comptime!(config.logit_stride()), row, &mut p, pairs);
        let mut z = Array::<u32>::new(pairs);
        chunk_pairs(zeros, group * comptime!(config.value_stride()), row, &mut z, pairs);
        #[unroll]
        for half in 0..comptime!(pairs / 2) {
            let (first, second) = (comptime!(2 * half), comptime!(2 * half + 1));
            let mut a = Array::<Pair>::new(4usize);
            // Rows 8 to 15 are not used.
            a[0] = Pair::reinterpret(p[first]);
            a[1] = a[0];
            a[2] = Pair::reinterpret(p[second]);
            a[3] = a[2];
            let mut b = Array::<Pair>::new(2usize);
            b[0] = Pair::reinterpret(z[first]);
            b[1] = Pair::reinterpret(z[second]);
            def.execute_inplace(&a, &b, &mut sums);
        }
        step += comptime!(config.warps());
    }
    let at = (warp * ROWS + gid) * 8 + tig * 2;
    zero_sums[at] = sums[0][0];
    zero_sums[at + 1] = sums[0][1];
}

/// `Σ p_t·v_t` of the split, written to `sums[(output + row) * head_dim ..]`.
///
/// A warp takes 32 channels of all tokens, so nothing is left to add up between warps. Rows are
/// channels: words `4·gid …` of a row of words.
#[cube]
pub(super) fn weighted(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    weights: &SharedMemory<Words>,
    scales: &SharedMemory<Words>,
    zero_sums: &SharedMemory<f32>,
    power: u32,
    rows: usize,
    output: usize,
    sums: &mut Array<Floats>,
    steps: usize,
    #[comptime] config: MatrixConfig,
) {
    let def = cmma::MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let gid = UNIT_POS_X as usize / 4;
    let tig = UNIT_POS_X as usize % 4;
    let warp = UNIT_POS_Y as usize;
    let pairs = comptime!(config.value_word() / 2);
    let fourth = warp * 8 + gid;
    let quarter = min(fourth, comptime!(config.head_dim / 4 - 1));
    let group = warp * 32 / config.group_size;

    let mut even = Array::<Sums>::new(2usize);
    let mut odd = Array::<Sums>::new(2usize);
    #[unroll]
    for i in 0..2usize {
        even[i] = Sums::new(0.0);
        odd[i] = Sums::new(0.0);
    }
    let page_rows = comptime!(config.page_rows());
    let row_words = comptime!(config.head_dim / 4);
    let lane_at =
        comptime!(config.value_codes_at() / 4) + head * comptime!(page_rows * row_words) + quarter;
    for step in 0..steps {
        let row = step * 4 + tig;
        let at = bases[row / page_rows] as usize + row % page_rows * row_words + lane_at;
        let word = wide[at];
        let mut p = Array::<u32>::new(pairs);
        chunk_pairs(weights, gid * comptime!(config.logit_stride()), row, &mut p, pairs);
        let mut s = Array::<u32>::new(pairs);
        chunk_pairs(scales, group * comptime!(config.value_stride()), row, &mut s, pairs);
        #[unroll]
        for half in 0..comptime!(pairs / 2) {
            let mut columns = Array::<Pair>::new(2usize);
            let mut first = Array::<Pair>::new(4usize);
            let mut second = Array::<Pair>::new(4usize);
            #[unroll]
            for h in 0..2usize {
                let j = comptime!(2 * half + h);
                columns[h] = Pair::reinterpret(p[j]) * Pair::reinterpret(s[j]);
                first[comptime!(2 * h)] = codes(word[0], config.value_bits, j);
                first[comptime!(2 * h + 1)] = codes(word[1], config.value_bits, j);
                second[comptime!(2 * h)] = codes(word[2], config.value_bits, j);
                second[comptime!(2 * h + 1)] = codes(word[3], config.value_bits, j);
            }
            def.execute_inplace(&first, &columns, &mut even);
            def.execute_inplace(&second, &columns, &mut odd);
        }
    }

    // Scales carried `2^(15−b−power)`, codes `2^(b−24)`.
    let unit = power_of_two(i32::cast_from(power) + 9);
    #[unroll]
    for column in 0..2usize {
        let row = tig * 2 + column;
        if row < rows && fourth < comptime!(config.head_dim / 4) {
            let mut zero = 0.0f32;
            #[unroll]
            for other in 0..comptime!(config.warps()) {
                zero += zero_sums[(other * ROWS + row) * 8 + group];
            }
            let mut four = Floats::empty();
            four[0] = even[0][column] * unit + zero;
            four[1] = even[1][column] * unit + zero;
            four[2] = odd[0][column] * unit + zero;
            four[3] = odd[1][column] * unit + zero;
            sums[(output + row) * comptime!(config.head_dim / 4) + fourth] = four;
        }
    }
}
