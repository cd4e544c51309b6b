//! Logits from packed keys without matrix units: pairs of halves, a few query rows.

use super::fragments::{chunk_pairs, codes, high_halves, low_halves, power_of_two, undo};
use super::parameters::common_power;
use super::{Floats, Pair, SplitConfig, Words};
use cubecl::prelude::*;
use half::f16;

/// Folds the query into what [`read_keys`](super::parameters::read_keys) read, for each row: pairs
/// `q·s·2^(8−b−power)` as `folded[row][group][head_dim / 2]`, and the terms `q·z` in the unit of the
/// sums of products as `bias[group][rows]`. Returns `power`.
///
/// A unit has the same 8 channels in all its runs; the units of a group are neighbours.
#[cube]
pub(super) fn fold(
    raw: &Array<Words>,
    largest: &SharedMemory<u32>,
    query: &SharedMemory<Words>,
    folded: &mut SharedMemory<Words>,
    bias: &mut SharedMemory<f32>,
    #[comptime] config: SplitConfig,
) -> i32 {
    let power = common_power(largest, config);
    let eighths = comptime!(config.head_dim / 8);
    let eighth = UNIT_POS as usize % eighths;
    let top = power_of_two(8 - power);
    let unit = power_of_two(-16 - power);
    #[unroll]
    for row in 0..config.rows {
        let at = comptime!(row * config.channel_stride()) + (eighth ^ row);
        let main = query[at];
        let rest = query[at + comptime!(config.rows * config.channel_stride())];
        let mut pairs = Array::<Pair>::new(4usize);
        let mut exact = Array::<f32>::new(8usize);
        #[unroll]
        for k in 0..4usize {
            let (x, y) = (Pair::reinterpret(main[k]), Pair::reinterpret(rest[k]));
            pairs[k] = x;
            #[unroll]
            for h in 0..2usize {
                exact[comptime!(2 * k + h)] = (f32::cast_from(x[h]) + f32::cast_from(y[h])) * unit;
            }
        }
        #[unroll]
        for i in 0..comptime!(config.key_items()) {
            let item = UNIT_POS as usize + comptime!(i * 32 * config.warps());
            let group = item / eighths;
            let mut products = Words::empty();
            let mut term = 0.0f32;
            #[unroll]
            for k in 0..4usize {
                let words = raw[comptime!(2 * i + k / 2)];
                let first = words[comptime!(2 * (k % 2))];
                let second = words[comptime!(2 * (k % 2) + 1)];
                let factor = Pair::new(f16::cast_from(top * undo(eighth, config.key_bits, k)));
                let scale = Pair::reinterpret(low_halves(first, second)) * factor;
                products[k] = u32::reinterpret(pairs[k] * scale);
                let zero = Pair::reinterpret(high_halves(first, second));
                #[unroll]
                for h in 0..2usize {
                    term += exact[comptime!(2 * k + h)] * f32::cast_from(zero[h]);
                }
            }
            #[unroll]
            for step in 0..comptime!(eighths.trailing_zeros()) {
                term += plane_shuffle_xor(term, comptime!(1u32 << step));
            }
            if group < comptime!(config.split_groups()) {
                let groups = comptime!(config.split_groups());
                folded[(row * groups + group) * eighths + eighth] = products;
                if eighth == 0 {
                    bias[group * config.rows + row] = term;
                }
            }
        }
    }
    power
}

/// Logits of the first `groups` groups of the split, `[rows][split_tokens]`, without their unit.
///
/// A warp takes whole groups, 32 tokens at a time. Unit `8·part + i` has tokens `4·i …` and every
/// fourth chunk from `part` on, so that a folded pair serves four tokens; the four parts of a
/// token's sum are added up by shuffles.
#[cube]
pub(super) fn logits(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    folded: &SharedMemory<Words>,
    bias: &SharedMemory<f32>,
    logits: &mut SharedMemory<Words>,
    groups: usize,
    #[comptime] config: SplitConfig,
) {
    let part = UNIT_POS_X as usize / 8;
    let four = UNIT_POS_X as usize % 8;
    let loads = comptime!(config.lane_chunks());
    let eighths = comptime!(config.head_dim / 8);
    let page_groups = comptime!(config.page_groups());
    let group_words = comptime!(config.key_group_words() / 4);
    let tokens = comptime!(config.group_size / 4);
    let pairs = comptime!(config.key_word() / 2);
    let lane_at = head * comptime!(page_groups * group_words) + part * tokens + four;

    let tiles = comptime!(config.group_size / 32);
    let at_once = comptime!(config.groups_at_once());

    let mut next = UNIT_POS_Y as usize;
    while next < groups {
        // All 128-bit loads first. A group behind the last has scales and zeros 0.
        let mut words = Array::<Words>::new(comptime!(at_once * tiles * loads));
        #[unroll]
        for u in 0..at_once {
            let group = next + comptime!(u * config.warps());
            let at =
                bases[group / page_groups] as usize + group % page_groups * group_words + lane_at;
            #[unroll]
            for tile in 0..tiles {
                #[unroll]
                for s in 0..loads {
                    words[comptime!((u * tiles + tile) * loads + s)] =
                        wide[at + comptime!(4 * s * tokens + 8 * tile)];
                }
            }
        }
        #[unroll]
        for u in 0..at_once {
            let group = next + comptime!(u * config.warps());
            #[unroll]
            for tile in 0..tiles {
                #[unroll]
                for row in 0..config.rows {
                    let mut sums = Floats::new(0.0);
                    let row_at = (row * comptime!(config.split_groups()) + group) * eighths;
                    // Chains of 8 products in f16, then f32: at 4 bits two chunks, at 8 bits four.
                    let chunks = comptime!(8 / pairs);
                    #[unroll]
                    for run in 0..comptime!(loads.div_ceil(chunks)) {
                        let mut chains = Array::<Pair>::new(4usize);
                        #[unroll]
                        for s in comptime!(run * chunks)..comptime!(loads.min((run + 1) * chunks)) {
                            let mut q = Array::<u32>::new(pairs);
                            let offset = comptime!(4 * s);
                            chunk_pairs(folded, row_at, part, 0usize, &mut q, offset, pairs);
                            let word = words[comptime!((u * tiles + tile) * loads + s)];
                            #[unroll]
                            for token in 0..4usize {
                                #[unroll]
                                for j in 0..pairs {
                                    let product = Pair::reinterpret(q[j])
                                        * codes(word[token], config.key_bits, j);
                                    if comptime!(j == 0 && s == run * chunks) {
                                        chains[token] = product;
                                    } else {
                                        chains[token] = chains[token] + product;
                                    }
                                }
                            }
                        }
                        #[unroll]
                        for token in 0..4usize {
                            let chain = chains[token];
                            sums[token] = sums[token] + f32::cast_from(chain[0]);
                            sums[token] = sums[token] + f32::cast_from(chain[1]);
                        }
                    }
                    let start = bias[group * config.rows + row];
                    let mut out = Words::empty();
                    #[unroll]
                    for token in 0..4usize {
                        let mut sum = sums[token];
                        sum += plane_shuffle_xor(sum, 8u32);
                        sum += plane_shuffle_xor(sum, 16u32);
                        out[token] = u32::reinterpret(sum + start);
                    }
                    if part == 0 {
                        let token = group * tokens + comptime!(8 * tile) + four;
                        logits[comptime!(row * config.logit_stride()) + (token ^ row)] = out;
                    }
                }
            }
        }
        next += comptime!(at_once * config.warps());
    }
}
