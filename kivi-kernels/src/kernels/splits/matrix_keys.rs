//! Logits from packed keys on matrix units.

use super::fragments::{codes, power_of_two};
use super::queries::load_pairs;
use super::{Pair, SplitConfig, Sums, Words};
use cubecl::prelude::*;
use half::f16;

/// The terms `q·z`, `[group][rows]`, in the unit of the sums of products.
///
/// Columns are eight groups, rows the query rows and, below them, their rests: both parts of the
/// query count, so the term is as exact as f32 sums are.
#[cube]
pub(super) fn bias(
    query: &SharedMemory<Words>,
    q: &Array<Pair>,
    zeros: &SharedMemory<Words>,
    bias: &mut SharedMemory<f32>,
    power: i32,
    #[comptime] config: SplitConfig,
) {
    let def = cmma::MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let gid = UNIT_POS_X as usize / 4;
    let tig = UNIT_POS_X as usize % 4;
    let groups = comptime!(config.split_groups());
    let warp = UNIT_POS_Y as usize;
    // Warps that have no eight groups of their own skip this: the branch is the whole warp's.
    #[unroll]
    for round in 0..comptime!(groups.div_ceil(8).div_ceil(config.warps())) {
        let octet = warp + comptime!(round * config.warps());
        if octet < comptime!(groups.div_ceil(8)) {
            let mut rest = Array::<Pair>::new(comptime!(config.key_pairs()));
            let stride = comptime!(config.channel_stride());
            load_pairs(query, (config.rows + gid) * stride, gid, &mut rest, true, config);
            let mut zero = Array::<Pair>::new(comptime!(config.key_pairs()));
            let group = min(octet * 8 + gid, comptime!(groups - 1));
            load_pairs(zeros, group * stride, group % 8, &mut zero, false, config);
            let mut sums = Array::<Sums>::new(2usize);
            sums[0] = Sums::new(0.0);
            sums[1] = Sums::new(0.0);
            #[unroll]
            for step in 0..comptime!(config.key_pairs() / 2) {
                let (first, second) = (comptime!(2 * step), comptime!(2 * step + 1));
                let mut a = Array::<Pair>::new(4usize);
                a[0] = q[first];
                a[1] = rest[first];
                a[2] = q[second];
                a[3] = rest[second];
                let mut b = Array::<Pair>::new(2usize);
                b[0] = zero[first];
                b[1] = zero[second];
                def.execute_inplace(&a, &b, &mut sums);
            }
            let total = (sums[0] + sums[1]) * Sums::new(power_of_two(-16 - power));
            #[unroll]
            for i in 0..2usize {
                let group = octet * 8 + tig * 2 + i;
                if group < groups {
                    bias[group * config.rows + gid] = total[i];
                }
            }
        }
    }
}

/// Logits of the split, `[rows][split_tokens]`, without their unit.
///
/// A warp takes whole groups of the first `groups`. Rows are tokens: words `4·gid …` of a chunk.
#[cube]
pub(super) fn logits(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    q: &Array<Pair>,
    scales: &SharedMemory<Words>,
    bias: &SharedMemory<f32>,
    logits: &mut SharedMemory<Words>,
    groups: usize,
    #[comptime] config: SplitConfig,
) {
    let def = cmma::MmaDefinition::<f16, f16, f32>::new(16usize, 8usize, 16usize);
    let gid = UNIT_POS_X as usize / 4;
    let tig = UNIT_POS_X as usize % 4;
    let loads = comptime!(config.lane_chunks());
    let pairs = comptime!(config.key_word() / 2);
    let stride = comptime!(config.logit_stride());

    let page_groups = comptime!(config.page_groups());
    let group_words = comptime!(config.key_group_words() / 4);
    let tokens = comptime!(config.group_size / 4);
    let lane_at = head * comptime!(page_groups * group_words) + tig * tokens + gid;

    let tiles = comptime!(config.group_size / 32);
    let at_once = comptime!(config.groups_at_once());

    let mut next = UNIT_POS_Y as usize;
    while next < groups {
        // All 128-bit loads first. A group behind the last has scales and zeros 0.
        let mut words = Array::<Words>::new(comptime!(at_once * loads * tiles));
        #[unroll]
        for u in 0..at_once {
            let group = next + comptime!(u * config.warps());
            let at =
                bases[group / page_groups] as usize + group % page_groups * group_words + lane_at;
            #[unroll]
            for s in 0..loads {
                let mut at = at + comptime!(4 * s * tokens);
                if comptime!(4 * s + 3 >= config.chunks()) {
                    // A chunk that does not exist is multiplied by zero: any words will do.
                    let missing =
                        max(tig + comptime!(4 * s + 1), config.chunks()) - config.chunks();
                    at -= missing * tokens;
                }
                #[unroll]
                for tile in 0..tiles {
                    words[comptime!((u * loads + s) * tiles + tile)] =
                        wide[at + comptime!(8 * tile)];
                }
            }
        }
        #[unroll]
        for u in 0..at_once {
            let group = next + comptime!(u * config.warps());
            let mut b = Array::<Pair>::new(comptime!(config.key_pairs()));
            let row = group * comptime!(config.channel_stride());
            load_pairs(scales, row, 0usize, &mut b, false, config);
            #[unroll]
            for i in 0..comptime!(config.key_pairs()) {
                b[i] = q[i] * b[i];
            }
            let mut start = Sums::empty();
            start[0] = bias[group * config.rows + tig * 2];
            start[1] = bias[group * config.rows + tig * 2 + 1];

            #[unroll]
            for tile in 0..tiles {
                let mut even = Array::<Sums>::new(2usize);
                let mut odd = Array::<Sums>::new(2usize);
                even[0] = start;
                even[1] = start;
                odd[0] = start;
                odd[1] = start;
                #[unroll]
                for s in 0..loads {
                    let word = words[comptime!((u * loads + s) * tiles + tile)];
                    #[unroll]
                    for step in 0..comptime!(pairs / 2) {
                        let mut columns = Array::<Pair>::new(2usize);
                        let mut first = Array::<Pair>::new(4usize);
                        let mut second = Array::<Pair>::new(4usize);
                        #[unroll]
                        for half in 0..2usize {
                            let j = comptime!(2 * step + half);
                            columns[half] = b[comptime!(s * pairs + j)];
                            first[comptime!(2 * half)] = codes(word[0], config.key_bits, j);
                            first[comptime!(2 * half + 1)] = codes(word[1], config.key_bits, j);
                            second[comptime!(2 * half)] = codes(word[2], config.key_bits, j);
                            second[comptime!(2 * half + 1)] = codes(word[3], config.key_bits, j);
                        }
                        def.execute_inplace(&first, &columns, &mut even);
                        def.execute_inplace(&second, &columns, &mut odd);
                    }
                }
                let at = group * comptime!(config.group_size / 4) + comptime!(8 * tile);
                #[unroll]
                for column in 0..2usize {
                    let mut four = Words::empty();
                    four[0] = u32::reinterpret(even[0][column]);
                    four[1] = u32::reinterpret(even[1][column]);
                    four[2] = u32::reinterpret(odd[0][column]);
                    four[3] = u32::reinterpret(odd[1][column]);
                    let row = tig * 2 + column;
                    logits[row * stride + (gid ^ row) + at] = four;
                }
            }
        }
        next += comptime!(at_once * config.warps());
    }
}
