//! Decode and prefill attention over one split of a sequence, in f32, with shared memory only: it runs
//! on every device.
//!
//! A cube takes one split of one kv head for a block of queries (rows and query heads of the head
//! group). Scales and zeros are folded: `q·(s∘c + z) = (q∘s)·c + q·z` once per group of keys, and
//! `Σ p(s·c + z) = Σ (p·s)·c + Σ p·z` once per row of words of values, so that a code costs a shift, a
//! mask, a conversion and one multiplication per query.

mod codes;
mod full;
mod keys;
mod reduce;
mod values;

use super::number;
use crate::Shape;
use codes::{code_at, unfolded};
use cubecl::prelude::*;
use full::{full_row, sees_full};
use keys::{fold_keys, multiply_keys};
use reduce::{contribute, join};
use values::fold_values;

/// Stands for the logit of nothing; shaders may assume that there are no infinities.
pub(crate) const LOWEST: f32 = -3.0e38;

/// A page that was given up; its tokens are masked.
pub(crate) const DROPPED: u32 = u32::MAX;

/// How a code becomes a float.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unpack {
    /// Masked in place and read as a float: `c` at bit `p` is the denormal number `c·2^(p − 149)`. The
    /// power of two goes into the folded operand. Needs a device that keeps denormals.
    Denormal,
    /// Shifted, masked and converted.
    Convert,
}

/// `2^FOLDED_EXPONENT` times as large is an operand for codes that are denormals at bit 0.
const FOLDED_EXPONENT: u32 = 64;

/// What undoes it, with the `2⁻¹⁴⁹` of a denormal: 2⁸⁵.
const UNFOLD: f32 = 38_685_626_227_668_133_590_597_632.0;

/// What a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttendConfig {
    /// Sizes of the layer.
    pub shape: Shape,
    /// Queries of a cube: rows times query heads of the head group.
    pub queries: usize,
    /// Tokens of a split, a multiple of every group size.
    pub split: usize,
    /// Units of a cube, a power of two.
    pub units: usize,
    /// Units of a plane, by whose operations maxima and sums are found; 0 for shared memory only.
    pub plane: usize,
    /// How codes become floats.
    pub unpack: Unpack,
    /// Whether inner loops are unrolled: what a GPU needs, and what takes a software device seconds to
    /// compile.
    pub unroll: bool,
    /// Whether logits are soft-capped.
    pub softcap: bool,
    /// Whether there are ALiBi slopes.
    pub slopes: bool,
}

impl AttendConfig {
    /// Elements of the folded operand: of a group of keys, or of a row of values.
    pub const fn folded(&self) -> usize {
        let values = self.shape.values_per_word() * self.shape.channel_groups();
        if values > self.shape.head_dim { values } else { self.shape.head_dim }
    }

    /// Elements for reductions over a cube.
    pub const fn reduced(&self) -> usize {
        match self.plane {
            0 => self.units,
            plane => self.units / plane,
        }
    }

    /// Channels of a unit.
    pub const fn channels(&self) -> usize {
        self.shape.head_dim.div_ceil(self.units)
    }

    /// Bytes of shared memory.
    pub const fn shared_bytes(&self) -> usize {
        let promoted = if self.shape.promoted > 0 { self.shape.promoted } else { 1 };
        let partial = if self.units > self.reduced() { self.units } else { self.reduced() };
        let each = self.shape.head_dim
            + self.split
            + self.folded()
            + promoted
            + partial
            + self.shape.channel_groups()
            + 6;
        4 * self.queries * each
    }
}

/// Per query in shared memory: the first visible position, the one after the last, and the first
/// positions whose key and value it sees in full precision.
const BOUNDS: usize = 4;

/// `work` begins with blocks, `[blocks, 5]`: sequence, first query, number of queries, first item, number
/// of items. From `items_at` on it holds items, `[items, 3]`: block, and the positions of the split.
/// `tables` begins with sequences, `[sequences, 8]`: where their page table begins, first words of the
/// slot's keys and values, lengths of the two rings, first row, tokens before the step, 0. From
/// `views_at` on it holds the views, `[rows, 2]`.
///
/// Writes `[items, kv_heads, queries]` un-normalised sums, `[D]` each, and `statistics`: the largest
/// logit and the denominator.
#[cube(launch_unchecked)]
pub(crate) fn attend(
    queries: &Array<f32>,
    arena: &Array<u32>,
    tables: &Array<u32>,
    work: &Array<u32>,
    slopes: &Array<f32>,
    sums: &mut Array<f32>,
    statistics: &mut Array<f32>,
    items: u32,
    items_at: u32,
    views_at: u32,
    head_group: u32,
    scale: f32,
    softcap: f32,
    window: u32,
    #[comptime] config: AttendConfig,
) {
    let item = CUBE_POS_X as usize + CUBE_POS_Z as usize * CUBE_COUNT_X as usize;
    let kv_head = CUBE_POS_Y as usize;
    if item >= items as usize {
        terminate!();
    }
    let unit = UNIT_POS as usize;
    let units = comptime!(config.units);
    let shape = comptime!(config.shape);
    let dim = comptime!(shape.head_dim);
    let room = comptime!(config.queries);
    let split = comptime!(config.split);
    let sinks = comptime!(shape.sinks);
    let page_tokens = comptime!(shape.page_tokens);
    let channel_groups = comptime!(shape.channel_groups());
    let group_heads = head_group as usize;

    let at = items_at as usize + 3 * item;
    let block = work[at] as usize;
    let start = work[at + 1] as usize;
    let end = work[at + 2] as usize;
    let sequence = work[5 * block] as usize;
    let first_query = work[5 * block + 1] as usize;
    let count = work[5 * block + 2] as usize;
    let table = tables[8 * sequence] as usize;
    let first_row = tables[8 * sequence + 5] as usize;
    let before = tables[8 * sequence + 6] as usize;

    let mut scaled = SharedMemory::<f32>::new(comptime!(room * dim));
    let mut weights = SharedMemory::<f32>::new(comptime!(room * split));
    let mut folded = SharedMemory::<f32>::new(comptime!(room * config.folded()));
    let mut lows = SharedMemory::<f32>::new(comptime!(
        room * if shape.promoted > 0 { shape.promoted } else { 1 }
    ));
    let mut partial = SharedMemory::<f32>::new(comptime!(room * units));
    let mut zeros = SharedMemory::<f32>::new(comptime!(room * channel_groups));
    let mut bounds = SharedMemory::<u32>::new(comptime!(room * BOUNDS));
    let mut largest = SharedMemory::<f32>::new(room);

    // What the queries see. Those beyond `count` see nothing.
    if unit < room {
        let inside = unit < count;
        let row = select(inside, (first_query + unit) / group_heads, 0usize);
        let position = (before + row) as u32;
        let first = select(position + 1u32 > window, position + 1u32 - window, 0u32);
        let view = views_at as usize + 2 * (first_row + row);
        bounds[unit * BOUNDS] = first;
        bounds[unit * BOUNDS + 1] = select(inside, position + 1u32, 0u32);
        bounds[unit * BOUNDS + 2] = tables[view];
        bounds[unit * BOUNDS + 3] = tables[view + 1];
    }
    let mut index = unit;
    while index < comptime!(room * dim) {
        let query = index / dim;
        let mut value = 0.0f32;
        if query < count {
            let row = first_row + (first_query + query) / group_heads;
            let head = kv_head * group_heads + (first_query + query) % group_heads;
            let heads = comptime!(shape.kv_heads) * group_heads;
            value = queries[(row * heads + head) * dim + index % dim] * scale;
        }
        scaled[index] = value;
        index += units;
    }
    let mut index = unit;
    while index < comptime!(room * channel_groups) {
        zeros[index] = 0.0f32;
        index += units;
    }
    sync_cube();
    let mut keys_end = 0usize;
    let mut values_end = 0usize;
    let mut values_full = 0xFFFF_FFFFusize;
    let mut visible_end = 0usize;
    let mut visible_start = 0xFFFF_FFFFusize;
    for query in 0..count {
        let sees = bounds[query * BOUNDS + 1] as usize;
        keys_end = max(keys_end, min(sees, bounds[query * BOUNDS + 2] as usize));
        values_end = max(values_end, min(sees, bounds[query * BOUNDS + 3] as usize));
        values_full = min(values_full, bounds[query * BOUNDS + 3] as usize);
        visible_end = max(visible_end, sees);
        visible_start = min(visible_start, bounds[query * BOUNDS] as usize);
    }

    // Logits of tokens that are codes, group by group.
    if comptime!(shape.key_bits > 0) {
        if start >= sinks {
            let mut token = start;
            while token < min(end, keys_end) {
                let offset = token - sinks;
                let page = tables[table + offset / page_tokens];
                if page != DROPPED {
                    let group = kv_head * comptime!(shape.groups())
                        + offset % page_tokens / comptime!(shape.group);
                    fold_keys(arena, &scaled, &mut folded, &mut lows, page as usize, group, config);
                    sync_cube();
                    multiply_keys(
                        arena,
                        &scaled,
                        &folded,
                        &lows,
                        &mut partial,
                        page as usize,
                        group,
                        config,
                    );
                    sync_cube();
                    let tokens = comptime!(shape.group);
                    let parts = comptime!(units / shape.group);
                    let mut index = unit;
                    while index < comptime!(room * shape.group) {
                        let query = index / tokens;
                        let own = index % tokens;
                        let mut logit = 0.0f32;
                        #[unroll(config.unroll)]
                        for part in 0..parts {
                            logit += partial[query * units + part * tokens + own];
                        }
                        weights[query * split + token - start + own] = logit;
                        index += units;
                    }
                    sync_cube();
                }
                token += comptime!(shape.group);
            }
        }
    }

    // Logits of tokens in full precision, one unit each.
    let mut index = unit;
    while index < end - start {
        let token = start + index;
        let mut wanted = false;
        for query in 0..count {
            wanted = wanted
                || sees_full(&bounds, query, token, 2usize, comptime!(shape.key_bits), sinks);
        }
        if wanted {
            let row = full_row(
                tables,
                table,
                token,
                tables[8 * sequence + 1] as usize,
                tables[8 * sequence + 3] as usize,
                comptime!(shape.key_bits == 0),
                comptime!(shape.full_keys()),
                comptime!(shape.key_width()),
                shape,
            );
            let mut logits = Array::<f32>::new(room);
            #[unroll(config.unroll)]
            for query in 0..room {
                logits[query] = 0.0f32;
            }
            for channel in 0..dim {
                let key = number::element(
                    arena,
                    row,
                    kv_head * dim + channel,
                    comptime!(shape.key_store),
                );
                #[unroll(config.unroll)]
                for query in 0..room {
                    logits[query] += scaled[query * dim + channel] * key;
                }
            }
            #[unroll(config.unroll)]
            for query in 0..room {
                if sees_full(&bounds, query, token, 2usize, comptime!(shape.key_bits), sinks) {
                    weights[query * split + index] = logits[query];
                }
            }
        }
        index += units;
    }
    sync_cube();

    // Softmax of the split.
    for query in 0..room {
        let first = bounds[query * BOUNDS] as usize;
        let sees = bounds[query * BOUNDS + 1] as usize;
        let mut own = comptime!(LOWEST).runtime();
        let mut index = unit;
        while index < end - start {
            let token = start + index;
            if token >= first && token < sees {
                let mut logit = weights[query * split + index];
                if comptime!(config.softcap) {
                    logit = softcap * (logit / softcap).tanh();
                }
                if comptime!(config.slopes) {
                    let head = kv_head * group_heads + (first_query + query) % group_heads;
                    logit -= slopes[head] * f32::cast_from((sees - 1 - token) as u32);
                }
                weights[query * split + index] = logit;
                own = max(own, logit);
            }
            index += units;
        }
        contribute(&mut partial, own, query, true, config);
    }
    sync_cube();
    join(&mut partial, true, config);
    if unit < room {
        largest[unit] = partial[unit * comptime!(config.reduced())];
    }
    sync_cube();
    for query in 0..room {
        let first = bounds[query * BOUNDS] as usize;
        let sees = bounds[query * BOUNDS + 1] as usize;
        let shift = largest[query];
        let mut own = 0.0f32;
        let mut index = unit;
        while index < end - start {
            let token = start + index;
            let mut weight = 0.0f32;
            if token >= first && token < sees {
                weight = (weights[query * split + index] - shift).exp();
            }
            weights[query * split + index] = weight;
            own += weight;
            index += units;
        }
        contribute(&mut partial, own, query, false, config);
    }
    sync_cube();
    join(&mut partial, false, config);
    if unit < count {
        let place = (item * comptime!(shape.kv_heads) + kv_head) * room + unit;
        statistics[2 * place] = largest[unit];
        statistics[2 * place + 1] = partial[unit * comptime!(config.reduced())];
    }
    sync_cube();

    // Weighted values.
    let channels = comptime!(config.channels());
    let mut outputs = Array::<f32>::new(comptime!(room * config.channels()));
    #[unroll(config.unroll)]
    for index in 0..comptime!(room * config.channels()) {
        outputs[index] = 0.0f32;
    }
    if comptime!(shape.value_bits > 0) {
        if start >= sinks {
            let per_word = comptime!(shape.values_per_word());
            let mut token = start;
            while token < min(end, values_end) {
                let offset = token - sinks;
                let page = tables[table + offset / page_tokens];
                if page != DROPPED {
                    let place = offset % page_tokens;
                    fold_values(
                        arena,
                        &weights,
                        &bounds,
                        &mut folded,
                        &mut zeros,
                        page as usize,
                        kv_head * page_tokens + place,
                        token,
                        start,
                        end,
                        config,
                    );
                    sync_cube();
                    let row = page as usize
                        + comptime!(shape.value_codes())
                        + (kv_head * comptime!(shape.value_rows()) + place / per_word)
                            * comptime!(shape.value_row_words());
                    #[unroll(config.unroll)]
                    for part in 0..channels {
                        let channel = unit + part * units;
                        if channel < dim {
                            let word = arena[row + channel];
                            let own = channel / comptime!(shape.group);
                            #[unroll(config.unroll)]
                            for i in 0..per_word {
                                let code = code_at(
                                    word,
                                    i,
                                    comptime!(shape.value_bits),
                                    comptime!(config.unpack),
                                );
                                #[unroll(config.unroll)]
                                for query in 0..room {
                                    outputs[part * room + query] += code
                                        * folded[(query * per_word + i) * channel_groups + own];
                                }
                            }
                        }
                    }
                    sync_cube();
                }
                token += per_word;
            }
        }
    }
    #[unroll(config.unroll)]
    for index in 0..comptime!(room * config.channels()) {
        outputs[index] = unfolded(outputs[index], comptime!(config.unpack));
    }
    let mut token = max(start, visible_start);
    if comptime!(shape.value_bits > 0) {
        if start >= sinks {
            token = max(token, values_full);
        }
    }
    while token < min(end, visible_end) {
        let row = full_row(
            tables,
            table,
            token,
            tables[8 * sequence + 2] as usize,
            tables[8 * sequence + 4] as usize,
            comptime!(shape.value_bits == 0),
            comptime!(shape.full_values()),
            comptime!(shape.value_width()),
            shape,
        );
        #[unroll(config.unroll)]
        for part in 0..channels {
            let channel = unit + part * units;
            if channel < dim {
                let store = comptime!(shape.value_store);
                let value = number::element(arena, row, kv_head * dim + channel, store);
                #[unroll(config.unroll)]
                for query in 0..room {
                    if sees_full(&bounds, query, token, 3usize, comptime!(shape.value_bits), sinks)
                    {
                        let weight = weights[query * split + token - start];
                        outputs[part * room + query] += weight * value;
                    }
                }
            }
        }
        token += 1;
    }
    #[unroll(config.unroll)]
    for part in 0..channels {
        let channel = unit + part * units;
        if channel < dim {
            #[unroll(config.unroll)]
            for query in 0..room {
                if query < count {
                    let place = (item * comptime!(shape.kv_heads) + kv_head) * room + query;
                    let zero = zeros[query * channel_groups + channel / comptime!(shape.group)];
                    sums[place * dim + channel] = outputs[part * room + query] + zero;
                }
            }
        }
    }
}
