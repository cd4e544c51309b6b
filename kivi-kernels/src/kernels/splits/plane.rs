//! Reductions over the 32 units of a warp.
//!
//! CubeCL's own sums over a plane become loops with a run-time bound; these unroll.

use cubecl::prelude::*;

/// The largest `value` of the warp.
#[cube]
pub(super) fn warp_max<N: Numeric + CubePrimitive>(value: N) -> N {
    let mut largest = value;
    #[unroll]
    for i in 0..5u32 {
        largest = max(largest, plane_shuffle_xor(largest, comptime!(1u32 << i)));
    }
    largest
}

/// The sum of the warp.
#[cube]
pub(super) fn warp_sum(value: f32) -> f32 {
    let mut sum = value;
    #[unroll]
    for i in 0..5u32 {
        sum += plane_shuffle_xor(sum, comptime!(1u32 << i));
    }
    sum
}
