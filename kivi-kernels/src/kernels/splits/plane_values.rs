//! Weighted sums of packed values without matrix units.

use super::fragments::{chunk_pairs, codes, high_halves, low_halves, power_of_two, undo};
use super::parameters::common_power;
use super::{Floats, Pair, SplitConfig, Words};
use cubecl::prelude::*;
use half::f16;

/// Folds the weights into what [`read_values`](super::parameters::read_values) read, for each row:
/// pairs `p·s·2^(15−b−power)` as `folded[row][group][split_tokens / 2]`, and the terms `Σ p·z` of
/// each warp's tokens as `zero_sums[warp][row][group]`. Returns `power`.
#[cube]
pub(super) fn fold(
    raw: &Array<u32>,
    largest: &SharedMemory<u32>,
    weights: &SharedMemory<Words>,
    folded: &mut SharedMemory<Words>,
    zero_sums: &mut SharedMemory<f32>,
    #[comptime] config: SplitConfig,
) -> i32 {
    let power = common_power(largest, config);
    let groups = comptime!(config.value_groups());
    let stride = comptime!(config.token_stride());
    let top = power_of_two(8 - power);
    let group = UNIT_POS as usize % groups;
    #[unroll]
    for row in 0..config.rows {
        let mut term = 0.0f32;
        #[unroll]
        for i in 0..comptime!(config.value_items()) {
            let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
            let run = item / groups;
            if run < comptime!(config.split_tokens / 8) {
                let p = weights[comptime!(row * config.logit_stride()) + (run ^ row)];
                let mut products = Words::empty();
                #[unroll]
                for k in 0..4usize {
                    let first = raw[comptime!(8 * i + 2 * k)];
                    let second = raw[comptime!(8 * i + 2 * k + 1)];
                    let pair = Pair::reinterpret(p[k]);
                    let factor = Pair::new(f16::cast_from(top * undo(run, config.value_bits, k)));
                    let scale = Pair::reinterpret(low_halves(first, second)) * factor;
                    // The other half of the exponent, which f16 has no power of two for.
                    let weight = pair * Pair::new(f16::new(128.0));
                    products[k] = u32::reinterpret(weight * scale);
                    let zero = Pair::reinterpret(high_halves(first, second));
                    #[unroll]
                    for h in 0..2usize {
                        term += f32::cast_from(pair[h]) * f32::cast_from(zero[h]);
                    }
                }
                folded[(row * groups + group) * stride + run] = products;
            }
        }
        // Units of the same group are `groups` apart.
        #[unroll]
        for step in comptime!(groups.trailing_zeros())..5u32 {
            term += plane_shuffle_xor(term, comptime!(1u32 << step));
        }
        if (UNIT_POS_X as usize) < groups {
            zero_sums[(UNIT_POS_Y as usize * config.rows + row) * groups + group] = term;
        }
    }
    power
}

/// `Σ p_t·v_t` of the split, written to `sums[(output + row) * head_dim ..]`; `steps` rows of words.
///
/// A quarter of the cube takes every fourth row of words, a unit 4 channels of it; the quarters'
/// sums are added up in shared memory.
#[cube]
pub(super) fn weighted(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    folded: &SharedMemory<Words>,
    zero_sums: &SharedMemory<f32>,
    power: i32,
    rows: usize,
    output: usize,
    sums: &mut Array<Floats>,
    steps: usize,
    #[comptime] config: SplitConfig,
) {
    let row_words = comptime!(config.head_dim / 4);
    let quarter = UNIT_POS as usize / row_words;
    let column = UNIT_POS as usize % row_words;
    let group = column * 4 / config.group_size;
    let groups = comptime!(config.value_groups());
    let pairs = comptime!(config.value_word() / 2);
    let stride = comptime!(config.token_stride());
    let page_rows = comptime!(config.page_rows());
    let lane_at =
        comptime!(config.value_codes_at() / 4) + head * comptime!(page_rows * row_words) + column;

    let mut totals = Array::<Floats>::new(config.rows);
    #[unroll]
    for row in 0..config.rows {
        totals[row] = Floats::new(0.0);
    }
    // Chains of 8 products in f16, then f32: at 4 bits two rows of words. Two chains of each channel
    // at once: more loads in flight. Rows behind the last token have weights 0.
    let run = comptime!(8 / pairs);
    for step in 0..steps.div_ceil(comptime!(8 * run)) {
        let line = step * comptime!(8 * run) + quarter;
        let mut words = Array::<Words>::new(comptime!(2 * run));
        #[unroll]
        for i in 0..comptime!(2 * run) {
            let line = line + comptime!(4 * i);
            words[i] =
                wide[bases[line / page_rows] as usize + line % page_rows * row_words + lane_at];
        }
        #[unroll]
        for row in 0..config.rows {
            let mut total = totals[row];
            #[unroll]
            for second in 0..2usize {
                let mut chains = Array::<Pair>::new(4usize);
                #[unroll]
                for i in 0..run {
                    let word = words[comptime!(second * run + i)];
                    let mut w = Array::<u32>::new(pairs);
                    let at = (row * groups + group) * stride;
                    let offset = comptime!(4 * (second * run + i));
                    chunk_pairs(folded, at, line, 0usize, &mut w, offset, pairs);
                    #[unroll]
                    for channel in 0..4usize {
                        #[unroll]
                        for j in 0..pairs {
                            let product = Pair::reinterpret(w[j])
                                * codes(word[channel], config.value_bits, j);
                            if comptime!(i == 0 && j == 0) {
                                chains[channel] = product;
                            } else {
                                chains[channel] = chains[channel] + product;
                            }
                        }
                    }
                }
                #[unroll]
                for channel in 0..4usize {
                    let chain = chains[channel];
                    total[channel] = total[channel] + f32::cast_from(chain[0]);
                    total[channel] = total[channel] + f32::cast_from(chain[1]);
                }
            }
            totals[row] = total;
        }
    }

    let mut parts = SharedMemory::<Floats>::new(comptime!(config.rows * config.head_dim));
    #[unroll]
    for row in 0..config.rows {
        parts[(row * 4 + quarter) * row_words + column] = totals[row];
    }
    sync_cube();
    // Scales carried `2^(15−b−power)`, codes `2^(b−24)`.
    let unit = power_of_two(power + 9);
    #[unroll]
    for round in 0..comptime!(config.rows.div_ceil(4)) {
        let row = quarter + comptime!(4 * round);
        if row < rows {
            let mut zero = 0.0f32;
            #[unroll]
            for warp in 0..comptime!(config.warps()) {
                zero += zero_sums[(warp * config.rows + row) * groups + group];
            }
            let mut total = Floats::new(0.0);
            #[unroll]
            for part in 0..4usize {
                total += parts[(row * 4 + part) * row_words + column];
            }
            sums[(output + row) * row_words + column] =
                total * Floats::new(unit) + Floats::new(zero);
        }
    }
}
