//! Flash decoding over packed pages, one split of a sequence per cube: for devices with planes of
//! 32 and pairs of halves.
//!
//! A cube takes a split of the sequence for one kv head and does the whole of it: logits from
//! packed keys, softmax in shared memory, weighted packed values. What it writes are partial
//! results that another kernel merges over splits.
//!
//! **No unpacking.** A masked word is two codes in the low bits of two halves. Read as f16 these
//! are the denormals `c·2^(b−24)`, exact, and are multiplied as they are. The other operand, the
//! folded query `q·s` or weight `p·s`, carries the power of two that undoes the bit's place `b`;
//! the scales and the query are first divided by powers of two, so that products fit f16. The
//! zeros' terms `q·z` and `Σ p·z` are sums of their own, once per group.
//!
//! **On matrix units** ([`Routine::Matrix`]) up to 8 query rows cost what one costs. Operand A of
//! `mma.m16n8k16` are codes, with tokens (keys) or channels (values) as rows; sums are f32. The
//! depth of a product may come in any order that both operands share, which saves all shuffles: a
//! lane (`gid = lane / 4`, `tig = lane % 4`) holds rows `gid`, `gid + 8` and depths `2·tig`,
//! `2·tig + 1`, `2·tig + 8`, `2·tig + 9` of A, columns `gid` and the same depths of B. Its 128-bit
//! load gives four rows' words of the same channels: words 0 and 1 are rows `gid` and `gid + 8` of
//! one product, words 2 and 3 of another; pair `j` of the words is depths `2·tig, 2·tig + 1`, pair
//! `j + 1` depths `2·tig + 8, 2·tig + 9`.
//!
//! **Without** ([`Routine::Plane`]) a pair of halves is multiplied and added at once, in chains of 8
//! that are then added up in f32.

mod fragments;
mod launch;
mod layout;
mod matrix_keys;
mod matrix_values;
mod parameters;
mod plane;
mod plane_keys;
mod plane_values;
mod queries;
mod softmax;

pub use launch::{SplitAttention, attend};
pub use layout::{Routine, SplitConfig};

use cubecl::prelude::*;
use half::f16;

/// 128 bits of words.
type Words = Vector<u32, Const<4>>;
/// Four floats, 128 bits.
type Floats = Vector<f32, Const<4>>;
/// A register of operands A and B: two neighbouring depths.
type Pair = Vector<f16, Const<2>>;
/// A register of the accumulator: two neighbouring columns.
type Sums = Vector<f32, Const<2>>;

/// Flash decoding of one split of one sequence for one kv head, over packed pages.
///
/// Cubes: `(splits, kv_heads, sequences)`, of `(32, config.warps())` units.
///
/// - `queries`: `[sequences, kv_heads, rows, head_dim]`, f32;
/// - `wide`, `narrow`: the arena of the layer, twice; see [`SplitConfig`] for the parts of a page;
/// - `pages`: `[sequences, max_pages]`, the first word of each page;
/// - `tokens`: `[sequences]`, tokens whose keys and values are both packed: whole groups;
/// - `visible`: `[sequences, rows, 2]`, the first token that a row sees, and the one after the last;
/// - `sums`: `[sequences, kv_heads, splits, rows, head_dim]`, f32: `Σ exp(l − max)·v`;
/// - `extremes`: `[sequences, kv_heads, splits, rows, 2]`: `max l` and `Σ exp(l − max)`.
///
/// A row that sees nothing in the split, and every row of a split behind the last token, gets the
/// denominator 0; its sums are not written and must not be read. `l = scale · q·k`, or with
/// `config.soft_cap`: `cap · tanh(scale · q·k / cap)`.
#[cube(launch_unchecked)]
fn attend_split(
    queries: &Array<Floats>,
    wide: &Array<Words>,
    narrow: &Array<u32>,
    pages: &Array<u32>,
    tokens: &Array<u32>,
    visible: &Array<u32>,
    sums: &mut Array<Floats>,
    extremes: &mut Array<f32>,
    rows: u32,
    max_pages: u32,
    scale: f32,
    cap: f32,
    #[comptime] config: SplitConfig,
) {
    let split = CUBE_POS_X as usize;
    let head = CUBE_POS_Y as usize;
    let sequence = CUBE_POS_Z as usize;
    let rows = rows as usize;
    let first = split * config.split_tokens;
    let end = tokens[sequence] as usize;
    let output = ((sequence * config.kv_heads + head) * CUBE_COUNT_X as usize + split) * rows;

    if first >= end {
        if UNIT_POS_Y == 0 && (UNIT_POS_X as usize) < rows {
            extremes[(output + UNIT_POS_X as usize) * 2 + 1] = 0.0;
        }
        terminate!();
    }

    let mut bases = SharedMemory::<u32>::new(comptime!(config.split_pages()));
    let mut query =
        SharedMemory::<Words>::new(comptime!(2 * config.rows * config.channel_stride()));
    let mut units = SharedMemory::<f32>::new(config.rows);
    let mut largest = SharedMemory::<u32>::new(comptime!(config.warps()));
    let mut scales = SharedMemory::<Words>::new(comptime!(config.parameter_words()));
    let mut bias = SharedMemory::<f32>::new(comptime!(config.rows * config.split_groups()));
    let mut logits = SharedMemory::<Words>::new(comptime!(config.rows * config.logit_stride()));
    let mut zero_sums = SharedMemory::<f32>::new(comptime!(config.warps() * config.rows * 8));

    // In 128-bit words. Pages behind the last token have no entry; what is read in their place gets
    // no weight.
    let pages_left = (end - first).div_ceil(config.page_tokens);
    let unit = UNIT_POS as usize;
    if unit < config.split_pages() {
        let page = first / config.page_tokens + unit;
        let entry = select(unit < pages_left, page, first / config.page_tokens);
        bases[unit] = pages[sequence * max_pages as usize + entry] / 4;
    }
    let at = (sequence * config.kv_heads + head) * rows;
    queries::fold(queries, at, rows, &mut query, &mut units, config);
    sync_cube();

    let tokens_left = min(end - first, config.split_tokens);
    let left = tokens_left / config.group_size;
    let matrix = comptime!(config.routine == Routine::Matrix);
    let mut raw = Array::<Words>::new(comptime!(2 * config.key_items()));
    parameters::read_keys(wide, &bases, head, left, &mut raw, &mut largest, config);
    sync_cube();
    let mut unit = scale;
    if matrix {
        let mut zeros = SharedMemory::<Words>::new(comptime!(config.parameter_words()));
        let power = parameters::store_keys(&raw, &largest, &mut scales, &mut zeros, config);
        unit *= fragments::key_unit(power);
        sync_cube();
        let mut q = Array::<Pair>::new(comptime!(config.key_pairs()));
        queries::load(&query, &mut q, config);
        matrix_keys::bias(&query, &q, &zeros, &mut bias, power, config);
        sync_cube();
        matrix_keys::logits(wide, &bases, head, &q, &scales, &bias, &mut logits, left, config);
    } else {
        let power = plane_keys::fold(&raw, &largest, &query, &mut scales, &mut bias, config);
        unit *= fragments::key_unit(power);
        sync_cube();
        plane_keys::logits(wide, &bases, head, &scales, &bias, &mut logits, left, config);
    }

    // The values' scales take the place of the keys'.
    let mut raw = Array::<u32>::new(comptime!(8 * config.value_items()));
    parameters::read_values(narrow, &bases, head, tokens_left, &mut raw, &mut largest, config);
    sync_cube();
    softmax::weights(
        &mut logits,
        &units,
        unit,
        cap,
        visible,
        sequence,
        first,
        tokens_left,
        rows,
        output,
        extremes,
        config,
    );
    if matrix {
        let mut zeros = SharedMemory::<Words>::new(comptime!(config.parameter_words()));
        let power = parameters::store_values(&raw, &largest, &mut scales, &mut zeros, config);
        sync_cube();
        let steps = tokens_left.div_ceil(comptime!(4 * config.value_word()));
        matrix_values::zero_terms(&logits, &zeros, &mut zero_sums, steps, config);
        sync_cube();
        matrix_values::weighted(
            wide, &bases, head, &logits, &scales, &zero_sums, power, rows, output, sums, steps,
            config,
        );
    } else {
        sync_cube();
        let power =
            plane_values::fold(&raw, &largest, &logits, &mut scales, &mut zero_sums, config);
        sync_cube();
        let steps = tokens_left.div_ceil(config.value_word());
        plane_values::weighted(
            wide, &bases, head, &scales, &zero_sums, power, rows, output, sums, steps, config,
        );
    }
}
