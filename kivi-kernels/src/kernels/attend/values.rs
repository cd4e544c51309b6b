//! A row of words of values.

use super::{AttendConfig, BOUNDS, codes::folding};
use crate::kernels::number;
use cubecl::prelude::*;

/// `p·s` of a row of words of values for every query, token and group of channels, and `Σ p·z`.
#[cube]
pub(super) fn fold_values(
    arena: &Array<u32>,
    weights: &SharedMemory<f32>,
    bounds: &SharedMemory<u32>,
    folded: &mut SharedMemory<f32>,
    zeros: &mut SharedMemory<f32>,
    page: usize,
    place: usize,
    token: usize,
    start: usize,
    end: usize,
    #[comptime] config: AttendConfig,
) {
    let shape = comptime!(config.shape);
    let groups = comptime!(shape.channel_groups());
    let per_word = comptime!(shape.values_per_word());
    let params = page + comptime!(shape.value_params()) + place * groups;
    let mut index = UNIT_POS as usize;
    while index < comptime!(config.queries * shape.channel_groups()) {
        let query = index / groups;
        let group = index % groups;
        let first = bounds[query * BOUNDS] as usize;
        let sees = min(bounds[query * BOUNDS + 1], bounds[query * BOUNDS + 3]) as usize;
        let mut sum = 0.0f32;
        #[unroll(config.unroll)]
        for i in 0..per_word {
            let own = token + i;
            let mut weight = 0.0f32;
            if own >= first && own < min(sees, end) {
                let word = arena[params + i * groups + group];
                let p = weights[query * comptime!(config.split) + own - start];
                let bits = comptime!(shape.value_bits);
                let factor = folding(i, bits, comptime!(config.unpack));
                weight = p * number::scale_of(word) * factor;
                sum += p * number::zero_of(word);
            }
            folded[(query * per_word + i) * groups + group] = weight;
        }
        zeros[index] += sum;
        index += comptime!(config.units);
    }
}
