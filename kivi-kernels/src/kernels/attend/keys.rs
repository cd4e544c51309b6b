//! A group of keys.

use super::{
    AttendConfig,
    codes::{code_at, folding, unfolded},
};
use crate::kernels::number;
use cubecl::prelude::*;

/// `q∘s` of a group of keys for every query, and that of its promoted channels.
#[cube]
pub(super) fn fold_keys(
    arena: &Array<u32>,
    scaled: &SharedMemory<f32>,
    folded: &mut SharedMemory<f32>,
    lows: &mut SharedMemory<f32>,
    page: usize,
    group: usize,
    #[comptime] config: AttendConfig,
) {
    let shape = comptime!(config.shape);
    let dim = comptime!(shape.head_dim);
    let params = page + comptime!(shape.key_params()) + group * dim;
    let mut channel = UNIT_POS as usize;
    while channel < dim {
        let scale = number::scale_of(arena[params + channel]);
        let mut factor = scale;
        if channel < comptime!(shape.chunks() * shape.keys_per_word()) {
            let index = channel % comptime!(shape.keys_per_word());
            factor = scale * folding(index, comptime!(shape.key_bits), comptime!(config.unpack));
        }
        #[unroll(config.unroll)]
        for query in 0..comptime!(config.queries) {
            folded[query * dim + channel] = scaled[query * dim + channel] * factor;
        }
        if comptime!(shape.promoted > 0) {
            let masks = page + comptime!(shape.key_masks()) + group * comptime!(shape.mask_words());
            let own = arena[masks + channel / 32];
            let bit = (channel % 32) as u32;
            if (own >> bit) & 1u32 == 1u32 {
                let mut rank = (own & ((1u32 << bit) - 1u32)).count_ones();
                for word in 0..channel / 32 {
                    rank += arena[masks + word].count_ones();
                }
                let fine = scale * 0.25f32;
                #[unroll(config.unroll)]
                for query in 0..comptime!(config.queries) {
                    lows[query * comptime!(shape.promoted) + rank as usize] =
                        scaled[query * dim + channel] * fine;
                }
            }
        }
        channel += comptime!(config.units);
    }
}

/// Partial logits of a group: unit `part · G + t` adds up a part of the channels of token `t`.
#[cube]
pub(super) fn multiply_keys(
    arena: &Array<u32>,
    scaled: &SharedMemory<f32>,
    folded: &SharedMemory<f32>,
    lows: &SharedMemory<f32>,
    partial: &mut SharedMemory<f32>,
    page: usize,
    group: usize,
    #[comptime] config: AttendConfig,
) {
    let shape = comptime!(config.shape);
    let dim = comptime!(shape.head_dim);
    let bits = comptime!(shape.key_bits);
    let room = comptime!(config.queries);
    let units = comptime!(config.units);
    let per_word = comptime!(shape.keys_per_word());
    let tokens = comptime!(shape.group);
    let parts = comptime!(config.units / shape.group);
    let unit = UNIT_POS as usize;
    let token = unit % tokens;
    let part = unit / tokens;
    let mut logits = Array::<f32>::new(room);
    #[unroll(config.unroll)]
    for query in 0..room {
        logits[query] = 0.0f32;
    }

    let codes = page + group * comptime!(shape.key_group_words());
    let mut chunk = part;
    while chunk < comptime!(shape.chunks()) {
        let word = arena[codes + chunk * tokens + token];
        #[unroll(config.unroll)]
        for i in 0..per_word {
            let code = code_at(word, i, bits, comptime!(config.unpack));
            #[unroll(config.unroll)]
            for query in 0..room {
                logits[query] += code * folded[query * dim + chunk * per_word + i];
            }
        }
        chunk += parts;
    }
    #[unroll(config.unroll)]
    for query in 0..room {
        logits[query] = unfolded(logits[query], comptime!(config.unpack));
    }
    if comptime!(shape.rest() > 0) {
        let rest = comptime!(shape.rest());
        let row = codes + comptime!(shape.chunks() * shape.group) + token / per_word * rest;
        let shift = (token % per_word * bits) as u32;
        let mut channel = part;
        while channel < rest {
            let word = arena[row + channel];
            let code = f32::cast_from((word >> shift) & comptime!((1u32 << bits) - 1));
            let at = comptime!(shape.chunks() * shape.keys_per_word()) + channel;
            #[unroll(config.unroll)]
            for query in 0..room {
                logits[query] += code * folded[query * dim + at];
            }
            channel += parts;
        }
    }
    if comptime!(shape.promoted > 0) {
        let promoted = comptime!(shape.promoted);
        let row = page
            + comptime!(shape.key_lows())
            + group * comptime!(shape.low_group_words())
            + token / 16 * promoted;
        let shift = (token % 16 * 2) as u32;
        let mut channel = part;
        while channel < promoted {
            let code = f32::cast_from((arena[row + channel] >> shift) & 3u32);
            #[unroll(config.unroll)]
            for query in 0..room {
                logits[query] += code * lows[query * promoted + channel];
            }
            channel += parts;
        }
    }
    // The zeros: every part of a token takes its share of the channels.
    let params = page + comptime!(shape.key_params()) + group * dim;
    let mut channel = part;
    while channel < dim {
        let zero = number::zero_of(arena[params + channel]);
        #[unroll(config.unroll)]
        for query in 0..room {
            logits[query] += scaled[query * dim + channel] * zero;
        }
        channel += parts;
    }
    #[unroll(config.unroll)]
    for query in 0..room {
        partial[query * units + unit] = logits[query];
    }
}
