//! Joins the splits of a sequence.

use super::attend::LOWEST;
use cubecl::prelude::*;

/// What the splits of a block of queries are joined with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CombineConfig {
    pub(crate) head_dim: usize,
    pub(crate) kv_heads: usize,
    pub(crate) units: usize,
}

/// `work` holds blocks and items as for `attend`; a block is followed by the number of its first item
/// and how many there are. One cube for each block and kv head, `outputs` is `[rows, query_heads · D]`.
#[cube(launch_unchecked)]
pub(crate) fn combine(
    work: &Array<u32>,
    tables: &Array<u32>,
    sums: &Array<f32>,
    statistics: &Array<f32>,
    more_sums: &Array<f32>,
    more_statistics: &Array<f32>,
    sink_logits: &Array<f32>,
    outputs: &mut Array<f32>,
    blocks: u32,
    room: u32,
    splits: u32,
    more_rows: u32,
    has_sinks: u32,
    head_group: u32,
    #[comptime] config: CombineConfig,
) {
    let block = CUBE_POS_X as usize;
    let kv_head = CUBE_POS_Y as usize;
    if block >= blocks as usize {
        terminate!();
    }
    let sequence = work[5 * block] as usize;
    let first_query = work[5 * block + 1] as usize;
    let queries = work[5 * block + 2] as usize;
    let first_item = work[5 * block + 3] as usize;
    let items = work[5 * block + 4] as usize;
    let first_row = tables[8 * sequence + 5] as usize;
    let dim = comptime!(config.head_dim);
    let heads = comptime!(config.kv_heads);
    let group = head_group as usize;

    for query in 0..queries {
        let row = first_row + (first_query + query) / group;
        let head = kv_head * group + (first_query + query) % group;
        let mut largest = comptime!(LOWEST).runtime();
        if has_sinks == 1u32 {
            largest = sink_logits[head];
        }
        for item in first_item..first_item + items {
            let place = (item * heads + kv_head) * room as usize + query;
            largest = max(largest, statistics[2 * place]);
        }
        let more = (sequence * heads + kv_head) * splits as usize;
        let of_codes = first_query + query;
        for split in 0..splits as usize {
            let place = (more + split) * more_rows as usize + of_codes;
            if more_statistics[2 * place + 1] > 0.0f32 {
                largest = max(largest, more_statistics[2 * place]);
            }
        }
        let mut denominator = 0.0f32;
        if has_sinks == 1u32 {
            denominator = (sink_logits[head] - largest).exp();
        }
        for item in first_item..first_item + items {
            let place = (item * heads + kv_head) * room as usize + query;
            let share = (statistics[2 * place] - largest).exp();
            denominator += share * statistics[2 * place + 1];
        }
        for split in 0..splits as usize {
            let place = (more + split) * more_rows as usize + of_codes;
            let own = more_statistics[2 * place + 1];
            if own > 0.0f32 {
                denominator += (more_statistics[2 * place] - largest).exp() * own;
            }
        }
        let mut channel = UNIT_POS as usize;
        while channel < dim {
            let mut sum = 0.0f32;
            for item in first_item..first_item + items {
                let place = (item * heads + kv_head) * room as usize + query;
                let share = (statistics[2 * place] - largest).exp();
                sum += share * sums[place * dim + channel];
            }
            for split in 0..splits as usize {
                let place = (more + split) * more_rows as usize + of_codes;
                if more_statistics[2 * place + 1] > 0.0f32 {
                    let share = (more_statistics[2 * place] - largest).exp();
                    sum += share * more_sums[place * dim + channel];
                }
            }
            outputs[(row * heads * group + head) * dim + channel] = sum / denominator;
            channel += comptime!(config.units);
        }
    }
}
