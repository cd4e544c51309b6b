//! Weighted sums of packed values on matrix units.

use super::fragments::{chunk_pairs, codes, power_of_two};
use super::{Floats, Pair, SplitConfig, Sums, Words};
use cubecl::prelude::*;
use half::f16;

/// The terms `Σ p_t·z_t` of each group of channels, `[warps][rows][8]`: each warp adds up its share
/// of the tokens.
#[cube]
pub(super) fn zero_terms(
    weights: &SharedMemory<Words>,
    zeros: &SharedMemory<Words>,
    zero_sums: &mut SharedMemory<f32>,
    steps: usize,
    #[comptime] config: SplitConfig,
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
        let at = gid * comptime!(config.logit_stride());
        let mut p = Array::<u32>::new(pairs);
        chunk_pairs(weights, at, row, gid, &mut p, 0usize, pairs);
        let mut z = Array::<u32>::new(pairs);
        let at = group * comptime!(config.token_stride());
        chunk_pairs(zeros, at, row, group, &mut z, 0usize, pairs);
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
    let at = (warp * config.rows + gid) * 8 + tig * 2;
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
    power: i32,
    rows: usize,
    output: usize,
    sums: &mut Array<Floats>,
    steps: usize,
    #[comptime] config: SplitConfig,
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
    // Two steps at once: twice the loads in flight. The second may lie behind the last token.
    for pair in 0..steps.div_ceil(2) {
        let mut words = Array::<Words>::new(2usize);
        #[unroll]
        for i in 0..2usize {
            let row = (pair * 2 + i) * 4 + tig;
            words[i] =
                wide[bases[row / page_rows] as usize + row % page_rows * row_words + lane_at];
        }
        #[unroll]
        for i in 0..2usize {
            let word = words[i];
            let row = pair * 8 + tig;
            let offset = comptime!(4 * i);
            let mut p = Array::<u32>::new(pairs);
            let at = gid * comptime!(config.logit_stride());
            chunk_pairs(weights, at, row, gid, &mut p, offset, pairs);
            let mut s = Array::<u32>::new(pairs);
            let at = group * comptime!(config.token_stride());
            chunk_pairs(scales, at, row, 0usize, &mut s, offset, pairs);
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
    }

    // Scales carried `2^(15−b−power)`, codes `2^(b−24)`.
    let unit = power_of_two(power + 9);
    #[unroll]
    for column in 0..2usize {
        let row = tig * 2 + column;
        if row < rows && fourth < comptime!(config.head_dim / 4) {
            let mut zero = 0.0f32;
            #[unroll]
            for other in 0..comptime!(config.warps()) {
                zero += zero_sums[(other * config.rows + row) * 8 + group];
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
