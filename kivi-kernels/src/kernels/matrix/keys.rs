//! Logits from packed keys.

use super::fragments::{
    codes, high_halves, larger_halves, low_halves, power_above, power_of_two, undo, warp_max,
};
use super::queries::load_pairs;
use super::{MatrixConfig, Pair, ROWS, Sums, Words};
use cubecl::prelude::*;
use half::f16;

/// What a sum of products is worth, beside the row's own unit: scales carry `2^(8−b−power)`, codes
/// `2^(b−24)`.
#[cube]
pub(super) fn unit(power: u32) -> f32 {
    power_of_two(i32::cast_from(power) + 16)
}

/// Reads this unit's share of the key parameters of a split, runs of 8 channels, and leaves the
/// largest scale of the warp in `largest`. Groups from `left` on read as zero.
#[cube]
pub(super) fn read_parameters(
    wide: &Array<Words>,
    bases: &SharedMemory<u32>,
    head: usize,
    left: usize,
    raw: &mut Array<Words>,
    largest: &mut SharedMemory<u32>,
    #[comptime] config: MatrixConfig,
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
pub(super) fn common_power(largest: &SharedMemory<u32>, #[comptime] config: MatrixConfig) -> u32 {
    let mut scale = 0u32;
    #[unroll]
    for warp in 0..comptime!(config.warps()) {
        scale = max(scale, largest[warp]);
    }
    power_above(scale)
}

/// Writes what [`read_parameters`] read as pairs of channels `[group][head_dim / 2]`: scales times
/// `2^(8−b−power)`, `b` the bit of the pair in its word, and zeros. Returns `power`.
#[cube]
pub(super) fn store_parameters(
    raw: &Array<Words>,
    largest: &SharedMemory<u32>,
    scales: &mut SharedMemory<Words>,
    zeros: &mut SharedMemory<Words>,
    #[comptime] config: MatrixConfig,
) -> u32 {
    let power = common_power(largest, config);
    let eighths = comptime!(config.head_dim / 8);
    let top = power_of_two(8 - i32::cast_from(power));
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
            scales[group * comptime!(config.scale_stride()) + eighth] = scale;
            zeros[group * comptime!(config.query_stride()) + eighth] = zero;
        }
    }
    power
}

/// The terms `q·z`, `[group][ROWS]`, in the unit of the sums of products.
///
/// Columns are eight groups, rows the query rows and, below them, their rests: both parts of the
/// query count, so the term is as exact as f32 sums are.
#[cube]
pub(super) fn bias(
    query: &SharedMemory<Words>,
    q: &Array<Pair>,
    zeros: &SharedMemory<Words>,
    bias: &mut SharedMemory<f32>,
    power: u32,
    #[comptime] config: MatrixConfig,
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
            let stride = comptime!(config.query_stride());
            load_pairs(query, (ROWS + gid) * stride, &mut rest, true, config);
            let mut zero = Array::<Pair>::new(comptime!(config.key_pairs()));
            let group = min(octet * 8 + gid, comptime!(groups - 1));
            load_pairs(zeros, group * stride, &mut zero, false, config);
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
            let total = (sums[0] + sums[1]) * Sums::new(power_of_two(-16 - i32::cast_from(power)));
            #[unroll]
            for i in 0..2usize {
                let group = octet * 8 + tig * 2 + i;
                if group < groups {
                    bias[group * ROWS + gid] = total[i];
                }
            }
        }
    }
}

/// Logits of the split, `[ROWS][split_tokens]`, without their unit.
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
    #[comptime] config: MatrixConfig,
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

    let mut group = UNIT_POS_Y as usize;
    while group < groups {
        let at = bases[group / page_groups] as usize + group % page_groups * group_words + lane_at;
        // All 128-bit loads of the group first.
        let mut words = Array::<Words>::new(comptime!(loads * config.group_size / 32));
        #[unroll]
        for s in 0..loads {
            let mut at = at + comptime!(4 * s * tokens);
            if comptime!(4 * s + 3 >= config.chunks()) {
                // A chunk that does not exist is multiplied by zero: any words will do.
                let missing = max(tig + comptime!(4 * s + 1), config.chunks()) - config.chunks();
                at -= missing * tokens;
            }
            #[unroll]
            for tile in 0..comptime!(config.group_size / 32) {
                words[comptime!(s * config.group_size / 32 + tile)] =
                    wide[at + comptime!(8 * tile)];
            }
        }
        let mut b = Array::<Pair>::new(comptime!(config.key_pairs()));
        load_pairs(scales, group * comptime!(config.scale_stride()), &mut b, false, config);
        #[unroll]
        for i in 0..comptime!(config.key_pairs()) {
            b[i] = q[i] * b[i];
        }
        let mut start = Sums::empty();
        start[0] = bias[group * ROWS + tig * 2];
        start[1] = bias[group * ROWS + tig * 2 + 1];

        #[unroll]
        for tile in 0..comptime!(config.group_size / 32) {
            let mut even = Array::<Sums>::new(2usize);
            let mut odd = Array::<Sums>::new(2usize);
            even[0] = start;
            even[1] = start;
            odd[0] = start;
            odd[1] = start;
            #[unroll]
            for s in 0..loads {
                let word = words[comptime!(s * config.group_size / 32 + tile)];
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
            let at = group * comptime!(config.group_size / 4) + comptime!(8 * tile) + gid;
            #[unroll]
            for column in 0..2usize {
                let mut four = Words::empty();
                four[0] = u32::reinterpret(even[0][column]);
                four[1] = u32::reinterpret(even[1][column]);
                four[2] = u32::reinterpret(odd[0][column]);
                four[3] = u32::reinterpret(odd[1][column]);
                logits[(tig * 2 + column) * stride + at] = four;
            }
        }
        group += comptime!(config.warps());
    }
}
