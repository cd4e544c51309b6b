//! From logits to weights, in shared memory.

use super::plane::{warp_max, warp_sum};
use super::{Pair, SplitConfig, Sums, Words};
use cubecl::prelude::*;

/// A logit that gets no weight, in any unit.
const HIDDEN: f32 = -3.0e38;
/// No maximum is lower, so that a row that sees nothing has weights 0 and not NaN.
const LOWEST: f32 = -1.0e30;

/// Replaces each `x` by `exp(x·factor + shift)`, with the device's fast instruction: an error of
/// some units in the last place of f32, far below the rounding of weights to f16.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn exponentials(values: &mut Array<f32>, factor: f32, shift: f32, #[comptime] count: usize) {
    #[unroll]
    for i in 0..count {
        values[i] = (values[i] * factor + shift).exp();
    }
}

/// Replaces every row of logits by its weights `exp(l − max l)` as pairs of halves, `[rows]
/// [split_tokens / 2]` with the same stride, and writes the maxima and denominators.
///
/// `unit` is what a logit in shared memory is worth beside the row's unit; positive. `tokens` is
/// the number of the split's tokens that have logits. A weight is rounded once, and the denominator
/// adds up the rounded ones: what is lost is the precision of a weight, never the weights' sum.
#[cube]
pub(super) fn weights(
    logits: &mut SharedMemory<Words>,
    units: &SharedMemory<f32>,
    unit: f32,
    cap: f32,
    visible: &Array<u32>,
    sequence: usize,
    first: usize,
    tokens: usize,
    rows: usize,
    output: usize,
    extremes: &mut Array<f32>,
    #[comptime] config: SplitConfig,
) {
    let lane = UNIT_POS_X as usize;
    let stride = comptime!(config.logit_stride());
    let runs = comptime!(config.split_tokens / 256);
    let count = comptime!(8 * runs);
    #[unroll]
    for round in 0..comptime!(config.row_rounds()) {
        let row = round * comptime!(config.warps()) + UNIT_POS_Y as usize;
        if row < config.rows {
            let mut packed = Array::<Words>::new(runs);
            if row < rows {
                let at = (sequence * rows + row) * 2;
                // In tokens of the split.
                let from = max(visible[at] as usize, first) - first;
                let to = min(max(visible[at + 1] as usize, first) - first, tokens);

                // Run `i` of a lane are tokens `8·(lane + 32·i) …`.
                let mut values = Array::<f32>::new(count);
                #[unroll]
                for i in 0..comptime!(count / 4) {
                    let word = 2 * (lane + comptime!(32 * (i / 2))) + comptime!(i % 2);
                    let four = logits[row * stride + (word ^ row)];
                    #[unroll]
                    for k in 0..4usize {
                        values[comptime!(4 * i + k)] = f32::reinterpret(four[k]);
                    }
                }
                let mut factor = unit * units[row];
                if comptime!(config.soft_cap) {
                    #[unroll]
                    for i in 0..count {
                        values[i] = cap * (values[i] * factor / cap).tanh();
                    }
                    factor = 1.0f32.runtime();
                }
                // Most splits are seen as a whole.
                if from > 0 || to < config.split_tokens {
                    let seen = max(to, from) - from;
                    #[unroll]
                    for i in 0..count {
                        let token = 8 * lane + comptime!(256 * (i / 8) + i % 8);
                        // One comparison: below `from` the difference wraps.
                        values[i] = select(token - from < seen, values[i], HIDDEN);
                    }
                }
                let mut largest = LOWEST.runtime();
                #[unroll]
                for i in 0..count {
                    largest = max(largest, values[i]);
                }
                let largest = warp_max::<f32>(largest) * factor;
                exponentials(&mut values, factor, -largest, count);
                let mut total = 0.0f32;
                #[unroll]
                for i in 0..comptime!(count / 2) {
                    let mut both = Sums::empty();
                    both[0] = values[comptime!(2 * i)];
                    both[1] = values[comptime!(2 * i + 1)];
                    let pair = Pair::cast_from(both);
                    let rounded = Sums::cast_from(pair);
                    total += rounded[0];
                    total += rounded[1];
                    values[i] = f32::reinterpret(u32::reinterpret(pair));
                }
                #[unroll]
                for run in 0..runs {
                    let mut four = Words::empty();
                    #[unroll]
                    for k in 0..4usize {
                        four[k] = u32::reinterpret(values[comptime!(4 * run + k)]);
                    }
                    packed[run] = four;
                }
                let total = warp_sum(total);
                if lane == 0 {
                    extremes[(output + row) * 2] = largest;
                    extremes[(output + row) * 2 + 1] = total;
                }
            } else {
                #[unroll]
                for run in 0..runs {
                    packed[run] = Words::new(0);
                }
            }
            // The weights lie where logits were that other lanes have read by now.
            sync_plane();
            #[unroll]
            for run in 0..runs {
                logits[row * stride + ((lane + comptime!(32 * run)) ^ row)] = packed[run];
            }
        }
    }
}
