//! Quantizes groups of keys: per channel, `G` consecutive tokens.

use super::{number, quantizer};
use crate::Shape;
use cubecl::prelude::*;

/// `items` is `[n, 3]`: the word of the group's first full-precision token, its page, and the number of
/// the group within it. One cube for each item and kv head.
#[cube(launch_unchecked)]
pub(crate) fn quantize_keys(
    arena: &mut Array<u32>,
    items: &Array<u32>,
    count: u32,
    #[comptime] shape: Shape,
    #[comptime] units: usize,
) {
    let item = CUBE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    if item >= count as usize {
        terminate!();
    }
    let first = items[3 * item] as usize;
    let page = items[3 * item + 1] as usize;
    let group = head * comptime!(shape.groups()) + items[3 * item + 2] as usize;

    let dim = comptime!(shape.head_dim);
    let tokens = comptime!(shape.group);
    let bits = comptime!(shape.key_bits);
    let store = comptime!(shape.key_store);
    let width = comptime!(shape.key_width());
    let per_word = comptime!(shape.keys_per_word());
    let promoted = comptime!(shape.promoted > 0);
    let unit = UNIT_POS as usize;

    let mut params = SharedMemory::<u32>::new(dim);
    // Of promoted channels: ranges, then 1 for those that are.
    let mut widths = SharedMemory::<u32>::new(comptime!(if promoted { dim } else { 1 }));
    let mut chosen = SharedMemory::<u32>::new(comptime!(if promoted { dim } else { 1 }));
    let mut channels =
        SharedMemory::<u32>::new(comptime!(if promoted { shape.promoted } else { 1 }));

    if comptime!(promoted) {
        let mut channel = unit;
        while channel < dim {
            let range =
                quantizer::range(arena, first, head * dim + channel, tokens, width, 0usize, store);
            widths[channel] = range.width();
            channel += units;
        }
        sync_cube();
        let mut channel = unit;
        while channel < dim {
            let own = widths[channel];
            let mut before = 0u32;
            for other in 0..dim {
                let width = widths[other];
                let earlier = width > own || (width == own && other < channel);
                before += select(earlier, 1u32, 0u32);
            }
            chosen[channel] = select(before < comptime!(shape.promoted as u32), 1u32, 0u32);
            channel += units;
        }
        sync_cube();
        let mut channel = unit;
        while channel < dim {
            if chosen[channel] == 1u32 {
                let mut rank = 0usize;
                for other in 0..channel {
                    rank += chosen[other] as usize;
                }
                channels[rank] = channel as u32;
            }
            channel += units;
        }
        let masks = comptime!(shape.mask_words());
        let mut word = unit;
        while word < masks {
            let mut mask = 0u32;
            for bit in 0..32usize {
                let channel = word * 32 + bit;
                if channel < dim {
                    mask |= chosen[channel] << bit as u32;
                }
            }
            arena[page + comptime!(shape.key_masks()) + group * masks + word] = mask;
            word += units;
        }
    }

    let mut channel = unit;
    while channel < dim {
        let range =
            quantizer::range(arena, first, head * dim + channel, tokens, width, 0usize, store);
        let mut word = range.params(comptime!(quantizer::reciprocal(bits)), 1.0);
        if is_chosen(&chosen, channel, promoted) {
            word = range.params(comptime!(quantizer::reciprocal(4)), 4.0);
        }
        params[channel] = word;
        arena[page + comptime!(shape.key_params()) + group * dim + channel] = word;
        channel += units;
    }
    sync_cube();

    let codes = page + group * comptime!(shape.key_group_words());
    let in_chunks = comptime!(shape.chunks() * shape.group);
    let rest = comptime!(shape.rest());
    let mut index = unit;
    while index < comptime!(shape.key_group_words()) {
        let mut word = 0u32;
        if index < in_chunks {
            let chunk = index / tokens;
            let row = first + index % tokens * width;
            for i in 0..per_word {
                let channel = chunk * per_word + i;
                let x = number::element(arena, row, head * dim + channel, store);
                let fine = is_chosen(&chosen, channel, promoted);
                let code = key_code(x, params[channel], fine, bits);
                word |= code << quantizer::shift(i, bits);
            }
        } else if comptime!(rest > 0) {
            let index = index - in_chunks;
            let channel = comptime!(shape.chunks() * shape.keys_per_word()) + index % rest;
            for i in 0..per_word {
                let row = first + (index / rest * per_word + i) * width;
                let x = number::element(arena, row, head * dim + channel, store);
                let fine = is_chosen(&chosen, channel, promoted);
                let code = key_code(x, params[channel], fine, bits);
                word |= code << (i as u32 * comptime!(bits as u32));
            }
        }
        arena[codes + index] = word;
        index += units;
    }

    if comptime!(promoted) {
        let count = comptime!(shape.promoted);
        let lows = page + comptime!(shape.key_lows()) + group * comptime!(shape.low_group_words());
        let mut index = unit;
        while index < comptime!(shape.low_group_words()) {
            let channel = channels[index % count] as usize;
            let mut word = 0u32;
            for i in 0..16usize {
                let row = first + (index / count * 16 + i) * width;
                let x = number::element(arena, row, head * dim + channel, store);
                let scale = number::scale_of(params[channel]) * 0.25f32;
                let code = quantizer::code(x - number::zero_of(params[channel]), scale, 4usize);
                word |= (code & 3u32) << (2u32 * i as u32);
            }
            arena[lows + index] = word;
            index += units;
        }
    }
}

/// Whether a channel is promoted.
#[cube]
fn is_chosen(chosen: &SharedMemory<u32>, channel: usize, #[comptime] promoted: bool) -> bool {
    if comptime!(promoted) { chosen[channel] == 1u32 } else { false.runtime() }
}

/// The code in the first plane.
#[cube]
fn key_code(x: f32, params: u32, promoted: bool, #[comptime] bits: usize) -> u32 {
    let distance = x - number::zero_of(params);
    let scale = number::scale_of(params);
    if promoted {
        quantizer::code(distance, scale * 0.25f32, 4usize) >> 2u32
    } else {
        quantizer::code(distance, scale, bits)
    }
}
