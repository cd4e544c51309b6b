//! From logits to weights, in shared memory.

use super::plane::{warp_max, warp_sum};
use super::{Pair, SplitConfig, Words};
use cubecl::prelude::*;
use half::f16;

/// A logit that gets no weight.
const HIDDEN: f32 = -3.0e38;
/// No maximum is lower, so that a row that sees nothing has weights 0 and not NaN.
const LOWEST: f32 = -1.0e30;

/// Replaces each `x` by `exp(x − largest)`, with the device's fast instruction: an error of some
/// units in the last place of f32, far below the rounding of weights to f16.
#[cube(fast_math = FastMath::ReducedPrecision | FastMath::NotNaN | FastMath::NotInf)]
fn exponentials(values: &mut Array<f32>, largest: f32, #[comptime] count: usize) {
    #[unroll]
    for i in 0..count {
        values[i] = (values[i] - largest).exp();
    }
}

/// Replaces every row of logits by its weights `exp(l − max l)` as pairs of halves, `[rows]
/// [split_tokens / 2]` with the same stride, and writes the maxima and denominators.
///
/// A weight is rounded once, and the denominator adds up the rounded ones: what is lost is the
/// precision of a weight, never the weights' sum.
#[cube]
pub(super) fn weights(
    logits: &mut SharedMemory<Words>,
    units: &SharedMemory<f32>,
    unit: f32,
    cap: f32,
    visible: &Array<u32>,
    sequence: usize,
    first: usize,
    rows: usize,
    output: usize,
    extremes: &mut Array<f32>,
    #[comptime] config: SplitConfig,
) {
    let lane = UNIT_POS_X as usize;
    let stride = comptime!(config.logit_stride());
    let runs = comptime!(config.split_tokens / 256);
    #[unroll]
    for round in 0..comptime!(config.row_rounds()) {
        let row = round * comptime!(config.warps()) + UNIT_POS_Y as usize;
        if row < config.rows {
            let mut packed = Array::<Words>::new(runs);
            if row < rows {
                let at = (sequence * rows + row) * 2;
                // In tokens of the split; unsigned differences wrap where a bound lies outside.
                let from = max(visible[at], first as u32) - first as u32;
                let to = max(visible[at + 1], first as u32) - first as u32;
                let factor = unit * units[row];

                let mut values = Array::<f32>::new(comptime!(8 * runs));
                let mut largest = LOWEST.runtime();
                #[unroll]
                for run in 0..runs {
                    let eighth = lane + comptime!(32 * run);
                    #[unroll]
                    for k in 0..2usize {
                        let four = logits[row * stride + 2 * eighth + k];
                        #[unroll]
                        for i in 0..4usize {
                            let mut value = f32::reinterpret(four[i]) * factor;
                            if comptime!(config.soft_cap) {
                                value = cap * (value / cap).tanh();
                            }
                            let token = eighth as u32 * 8u32 + comptime!((4 * k + i) as u32);
                            let value = select(token >= from && token < to, value, HIDDEN);
                            values[comptime!(8 * run + 4 * k + i)] = value;
                            largest = max(largest, value);
                        }
                    }
                }
                let largest = warp_max::<f32>(largest);
                exponentials(&mut values, largest, comptime!(8 * runs));
                let mut total = 0.0f32;
                #[unroll]
                for run in 0..runs {
                    let mut four = Words::empty();
                    #[unroll]
                    for k in 0..4usize {
                        let mut pair = Pair::empty();
                        #[unroll]
                        for h in 0..2usize {
                            let weight = f16::cast_from(values[comptime!(8 * run + 2 * k + h)]);
                            total += f32::cast_from(weight);
                            pair[h] = weight;
                        }
                        four[k] = u32::reinterpret(pair);
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
                logits[row * stride + lane + comptime!(32 * run)] = packed[run];
            }
        }
    }
}
