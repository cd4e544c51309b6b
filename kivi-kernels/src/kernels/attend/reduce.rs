//! Maxima and sums over a cube.

use super::AttendConfig;
use cubecl::prelude::*;

/// A unit's part of a maximum or a sum.
#[cube]
pub(super) fn contribute(
    partial: &mut SharedMemory<f32>,
    value: f32,
    query: usize,
    #[comptime] maximum: bool,
    #[comptime] config: AttendConfig,
) {
    let reduced = comptime!(config.reduced());
    if comptime!(config.plane > 0) {
        let joined = if comptime!(maximum) { plane_max(value) } else { plane_sum(value) };
        if UNIT_POS_PLANE == 0 {
            partial[query * reduced + (UNIT_POS / comptime!(config.plane as u32)) as usize] =
                joined;
        }
    } else {
        partial[query * reduced + UNIT_POS as usize] = value;
    }
}

/// Joins the parts of every query into the first.
#[cube]
pub(super) fn join(
    partial: &mut SharedMemory<f32>,
    #[comptime] maximum: bool,
    #[comptime] config: AttendConfig,
) {
    let reduced = comptime!(config.reduced());
    let unit = UNIT_POS as usize;
    let mut stride = comptime!(config.reduced() / 2).runtime();
    while stride > 0 {
        if unit < stride {
            #[unroll(config.unroll)]
            for query in 0..comptime!(config.queries) {
                let one = partial[query * reduced + unit];
                let other = partial[query * reduced + unit + stride];
                let joined = if comptime!(maximum) { max(one, other) } else { one + other };
                partial[query * reduced + unit] = joined;
            }
        }
        sync_cube();
        stride /= 2;
    }
}
