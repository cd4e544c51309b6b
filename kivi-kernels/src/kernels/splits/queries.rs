//! Query rows as operands: f16 with a power of two taken out, and what f16 leaves over.

use super::fragments::{chunk_pairs, power_of_two};
use super::plane::warp_max;
use super::{Floats, Pair, SplitConfig, Sums, Words};
use cubecl::prelude::*;

/// Writes the rows at `queries[at * head_dim ..]` to shared memory as pairs of halves: first
/// `[rows][head_dim / 2]` of `q·2^−k`, at most `2^7`, then likewise the rest that rounding left;
/// `units[row]` is `2^k`. Rows from `rows` on are zero.
#[cube]
pub(super) fn fold(
    queries: &Array<Floats>,
    at: usize,
    rows: usize,
    query: &mut SharedMemory<Words>,
    units: &mut SharedMemory<f32>,
    #[comptime] config: SplitConfig,
) {
    let lane = UNIT_POS_X as usize;
    let eighths = comptime!(config.head_dim / 8);
    #[unroll]
    for round in 0..comptime!(config.row_rounds()) {
        let row = round * comptime!(config.warps()) + UNIT_POS_Y as usize;
        let mut low = Floats::new(0.0);
        let mut high = Floats::new(0.0);
        if row < rows && lane < eighths {
            let index = (at + row) * comptime!(config.head_dim / 4) + lane * 2;
            low = queries[index];
            high = queries[index + 1];
        }
        let mut largest = 0.0f32;
        #[unroll]
        for i in 0..4usize {
            largest = max(largest, max(low[i].abs(), high[i].abs()));
        }
        let largest = warp_max::<f32>(largest);
        // The biased exponent; the bounds keep both powers of two finite.
        let exponent = min(max(u32::reinterpret(largest) >> 23u32, 10u32), 250u32);
        let exponent = i32::cast_from(exponent) - 127 - 6;
        let unit = power_of_two(exponent);
        let inverse = power_of_two(-exponent);
        let mut main = Words::empty();
        let mut rest = Words::empty();
        #[unroll]
        for i in 0..4usize {
            let half = if comptime!(i < 2) { low } else { high };
            let mut both = Sums::empty();
            both[0] = half[comptime!(2 * (i % 2))] * inverse;
            both[1] = half[comptime!(2 * (i % 2) + 1)] * inverse;
            let rounded = Pair::cast_from(both);
            main[i] = u32::reinterpret(rounded);
            rest[i] = u32::reinterpret(Pair::cast_from(both - Sums::cast_from(rounded)));
        }
        if row < config.rows && lane < eighths {
            let stride = comptime!(config.channel_stride());
            let at = row * stride + (lane ^ row);
            query[at] = main;
            query[at + comptime!(config.rows * stride)] = rest;
            if lane == 0 {
                units[row] = unit;
            }
        }
    }
}

/// The pairs of channels of a lane, of the row `gid`, in the order of its chunks.
#[cube]
pub(super) fn load(
    query: &SharedMemory<Words>,
    pairs: &mut Array<Pair>,
    #[comptime] config: SplitConfig,
) {
    let row = UNIT_POS_X as usize / 4;
    load_pairs(query, row * comptime!(config.channel_stride()), row, pairs, true, config);
}

/// The pairs of a lane's chunks `tig + 4·s` from a row of pairs that begins at `at`.
///
/// Chunks that do not exist are zero if `clear`, else those of the last chunk.
#[cube]
pub(super) fn load_pairs(
    rows: &SharedMemory<Words>,
    at: usize,
    swizzle: usize,
    pairs: &mut Array<Pair>,
    #[comptime] clear: bool,
    #[comptime] config: SplitConfig,
) {
    let tig = UNIT_POS_X as usize % 4;
    let chunks = comptime!(config.chunks());
    let count = comptime!(config.key_word() / 2);
    #[unroll]
    for s in 0..comptime!(config.lane_chunks()) {
        let wanted = tig + comptime!(4 * s);
        let ragged = comptime!(4 * s + 3 >= chunks);
        let mut words = Array::<u32>::new(count);
        if comptime!(ragged) {
            let chunk = min(wanted, comptime!(chunks - 1));
            chunk_pairs(rows, at, chunk, swizzle, &mut words, 0usize, count);
        } else {
            chunk_pairs(rows, at, tig, swizzle, &mut words, comptime!(4 * s), count);
        }
        #[unroll]
        for j in 0..count {
            let mut word = words[j];
            if comptime!(ragged && clear) {
                word = select(wanted < chunks, word, 0u32);
            }
            pairs[comptime!(s * count + j)] = Pair::reinterpret(word);
        }
    }
}
