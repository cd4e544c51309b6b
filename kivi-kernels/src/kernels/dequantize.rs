//! Keys or values as f32, for whoever wants them outside attention.

use super::{
    number::{self, scale_of, zero_of},
    quantizer::shift,
};
use crate::Shape;
use cubecl::prelude::*;

/// `places` is `[tokens, 3]`: a page, the token in it and 1 for codes; the row's first word, 0 and 0 in
/// full precision. `out` is `[tokens, kv_heads · D]`; one unit for each element.
#[cube(launch_unchecked)]
pub(crate) fn dequantize(
    arena: &Array<u32>,
    places: &Array<u32>,
    out: &mut Array<f32>,
    elements: u32,
    #[comptime] shape: Shape,
    #[comptime] keys: bool,
) {
    let index = ABSOLUTE_POS;
    if index >= elements as usize {
        terminate!();
    }
    let dim = comptime!(shape.head_dim);
    let width = comptime!(shape.kv_heads * shape.head_dim);
    let item = index / width;
    let element = index % width;
    let place = places[3 * item] as usize;
    let token = places[3 * item + 1] as usize;
    let mut x = 0.0f32;
    if places[3 * item + 2] == 0u32 {
        let store = comptime!(if keys { shape.key_store } else { shape.value_store });
        x = number::element(arena, place, element, store);
    } else if comptime!(keys && shape.key_bits > 0) {
        x = key(arena, place, element / dim, token, element % dim, shape);
    } else if comptime!(!keys && shape.value_bits > 0) {
        x = value(arena, place, element / dim, token, element % dim, shape);
    }
    out[index] = x;
}

#[cube]
fn key(
    arena: &Array<u32>,
    page: usize,
    head: usize,
    token: usize,
    channel: usize,
    #[comptime] shape: Shape,
) -> f32 {
    let dim = comptime!(shape.head_dim);
    let bits = comptime!(shape.key_bits);
    let per_word = comptime!(shape.keys_per_word());
    let tokens = comptime!(shape.group);
    let group = head * comptime!(shape.groups()) + token / tokens;
    let own = token % tokens;
    let in_chunks = comptime!(shape.chunks() * shape.keys_per_word());
    let codes = page + group * comptime!(shape.key_group_words());
    let mut word = codes + channel / per_word * tokens + own;
    let mut bit = shift(channel % per_word, bits);
    if channel >= in_chunks {
        let rest = comptime!(shape.rest());
        word = codes + comptime!(shape.chunks() * shape.group) + own / per_word * rest + channel
            - in_chunks;
        bit = (own % per_word * bits) as u32;
    }
    let code = f32::cast_from((arena[word] >> bit) & comptime!((1u32 << bits) - 1));
    let params = arena[page + comptime!(shape.key_params()) + group * dim + channel];
    let mut x = code * scale_of(params) + zero_of(params);
    if comptime!(shape.promoted > 0) {
        let masks = page + comptime!(shape.key_masks()) + group * comptime!(shape.mask_words());
        let mask = arena[masks + channel / 32];
        let place = (channel % 32) as u32;
        if (mask >> place) & 1u32 == 1u32 {
            let mut rank = (mask & ((1u32 << place) - 1u32)).count_ones() as usize;
            for word in 0..channel / 32 {
                rank += arena[masks + word].count_ones() as usize;
            }
            let count = comptime!(shape.promoted);
            let lows =
                page + comptime!(shape.key_lows()) + group * comptime!(shape.low_group_words());
            let low = arena[lows + own / 16 * count + rank] >> (own % 16 * 2) as u32;
            x += f32::cast_from(low & 3u32) * (scale_of(params) * 0.25f32);
        }
    }
    x
}

#[cube]
fn value(
    arena: &Array<u32>,
    page: usize,
    head: usize,
    token: usize,
    channel: usize,
    #[comptime] shape: Shape,
) -> f32 {
    let bits = comptime!(shape.value_bits);
    let per_word = comptime!(shape.values_per_word());
    let rows = comptime!(shape.value_rows());
    let row = page
        + comptime!(shape.value_codes())
        + (head * rows + token / per_word) * comptime!(shape.value_row_words());
    let word = arena[row + channel] >> shift(token % per_word, bits);
    let groups = comptime!(shape.channel_groups());
    let params = arena[page
        + comptime!(shape.value_params())
        + (head * comptime!(shape.page_tokens) + token) * groups
        + channel / comptime!(shape.group)];
    f32::cast_from(word & comptime!((1u32 << bits) - 1)) * scale_of(params) + zero_of(params)
}
