//! Quantizes values: per token, `G` consecutive channels.

use super::{number, quantizer};
use crate::Shape;
use cubecl::prelude::*;

/// `items` is `[n, 6]`: the first word of the slot's values, the place of the first token in its ring,
/// the ring's length, the page, the first token within it, and how many tokens, all of one row of
/// words. One cube for each item and kv head.
#[cube(launch_unchecked)]
pub(crate) fn quantize_values(
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
    let slot = items[6 * item] as usize;
    let place = items[6 * item + 1] as usize;
    let capacity = items[6 * item + 2] as usize;
    let page = items[6 * item + 3] as usize;
    let token = items[6 * item + 4] as usize;
    let tokens = items[6 * item + 5] as usize;

    let dim = comptime!(shape.head_dim);
    let bits = comptime!(shape.value_bits);
    let store = comptime!(shape.value_store);
    let width = comptime!(shape.value_width());
    let per_word = comptime!(shape.values_per_word());
    let groups = comptime!(shape.channel_groups());
    let sinks = comptime!(shape.sinks);
    let unit = UNIT_POS as usize;
    let mut params = SharedMemory::<u32>::new(comptime!(per_word * groups));

    let mut index = unit;
    while index < tokens * groups {
        let i = index / groups;
        let group = index % groups;
        let row = slot + (sinks + (place + i) % capacity) * width;
        let start = group * comptime!(shape.group);
        let end = min(start + comptime!(shape.group), dim);
        let range =
            quantizer::range(arena, row, head * dim + start, end - start, 0usize, 1usize, store);
        let word = range.params(comptime!(quantizer::reciprocal(bits)), 1.0);
        params[index] = word;
        let at = (head * comptime!(shape.page_tokens) + token + i) * groups + group;
        arena[page + comptime!(shape.value_params()) + at] = word;
        index += units;
    }
    sync_cube();

    let row = token / per_word;
    let before = token % per_word;
    let row_words = comptime!(shape.value_row_words());
    let codes = page
        + comptime!(shape.value_codes())
        + (head * comptime!(shape.value_rows()) + row) * row_words;
    let mut channel = unit;
    while channel < dim {
        // Later tokens of the row may have left codes in a page that is used again.
        let old = arena[codes + channel];
        let mut word = 0u32;
        for i in 0..per_word {
            let shift = quantizer::shift(i, bits);
            if i < before {
                word |= old & (comptime!((1u32 << bits) - 1) << shift);
            } else if i < before + tokens {
                let at = slot + (sinks + (place + i - before) % capacity) * width;
                let x = number::element(arena, at, head * dim + channel, store);
                let own = params[(i - before) * groups + channel / comptime!(shape.group)];
                let distance = x - number::zero_of(own);
                word |= quantizer::code(distance, number::scale_of(own), bits) << shift;
            }
        }
        arena[codes + channel] = word;
        channel += units;
    }
}
