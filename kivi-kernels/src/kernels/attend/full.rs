//! Tokens in full precision.

use super::BOUNDS;
use crate::Shape;
use cubecl::prelude::*;

/// Whether a query sees a token at all, and in full precision; `which` is the view in its bounds.
#[cube]
pub(super) fn sees_full(
    bounds: &SharedMemory<u32>,
    query: usize,
    token: usize,
    #[comptime] which: usize,
    #[comptime] bits: usize,
    #[comptime] sinks: usize,
) -> bool {
    let first = bounds[query * BOUNDS] as usize;
    let end = bounds[query * BOUNDS + 1] as usize;
    let mut full = true;
    if comptime!(bits > 0) {
        full = token < sinks || token >= bounds[query * BOUNDS + which] as usize;
    }
    full && token >= first && token < end
}

/// The first word of a token in full precision.
#[cube]
pub(super) fn full_row(
    tables: &Array<u32>,
    table: usize,
    token: usize,
    slot: usize,
    capacity: usize,
    #[comptime] paged: bool,
    #[comptime] part: usize,
    #[comptime] width: usize,
    #[comptime] shape: Shape,
) -> usize {
    let sinks = comptime!(shape.sinks);
    let mut row = slot + token * width;
    if token >= sinks {
        let offset = token - sinks;
        if comptime!(paged) {
            let page = tables[table + offset / comptime!(shape.page_tokens)] as usize;
            row = page + part + offset % comptime!(shape.page_tokens) * width;
        } else {
            row = slot + (sinks + offset % capacity) * width;
        }
    }
    row
}
