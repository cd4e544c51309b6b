//! One group of full-precision tokens, converted to f32 in scratch memory.

use crate::{
    cache::{Floats, Geometry, Page, Slot, Tensor},
    isa::{LANES, Simd},
};
use std::ops::Range;

/// How many channels of keys ahead of its use memory is asked for, and how many tokens of values: a
/// sequence's own tokens lie apart from everything else that a step reads.
const KEYS_AHEAD: usize = 16;
const VALUES_AHEAD: usize = 8;

/// Scratch for at most `G` tokens: with `G = 32` and head_dim 128, 16 KiB each for keys and values.
#[derive(Debug, Default)]
pub(super) struct Full {
    /// `[head_dim, G]`
    pub(super) keys: Vec<f32>,
    /// `[G, width]`, the channels after head_dim 0.
    pub(super) values: Vec<f32>,
    /// head_dim in whole vectors.
    pub(super) width: usize,
}

/// Where full-precision tokens of one head are: the slot for sinks and residual, the page for
/// uncompressed formats.
#[derive(Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) geometry: &'a Geometry,
    pub(super) slot: &'a Slot,
    pub(super) page: Option<&'a Page>,
    pub(super) head: usize,
}

impl Full {
    pub(super) fn resize(&mut self, g: &Geometry) {
        self.width = g.head_dim.next_multiple_of(LANES);
        self.keys.resize(g.head_dim * g.group, 0.0);
        // A narrower head must not find another's channels.
        self.values.clear();
        self.values.resize(g.group * self.width, 0.0);
    }

    /// Converts the keys at `positions`, which start a group.
    #[inline(always)]
    pub(super) fn load_keys<S: Simd>(
        &mut self,
        simd: S,
        from: Source<'_>,
        positions: Range<usize>,
    ) {
        let (g, slot) = (from.geometry, from.slot);
        if positions.start < g.sinks {
            let first = from.head * g.head_dim * g.sinks + positions.start;
            self.convert_keys(simd, &slot.sinks.keys, first, [g.sinks, positions.len(), g.group]);
            return;
        }
        let (floats, first) = match from.page.map(|page| &page.keys) {
            Some(Tensor::Full(floats)) => {
                let token = g.locate(positions.start).1;
                (floats, g.key_index(g.page_tokens / g.group, from.head, token))
            }
            _ => (&slot.ring.keys, slot.key_index(from.head, positions.start)),
        };
        self.convert_keys(simd, floats, first, [g.group; 3]);
    }

    /// Channels that start `step` elements apart from `first` on, `length` tokens of each.
    #[inline(always)]
    fn convert_keys<S: Simd>(
        &mut self,
        simd: S,
        floats: &Floats,
        mut first: usize,
        [step, length, group]: [usize; 3],
    ) {
        for out in self.keys.chunks_exact_mut(group) {
            let ahead = first + KEYS_AHEAD * step;
            floats.prefetch(simd, ahead..ahead + length);
            floats.load(simd, first..first + length, &mut out[..length]);
            first += step;
        }
    }

    /// Converts the values at `positions`; the first lies in row 0.
    #[inline(always)]
    pub(super) fn load_values<S: Simd>(
        &mut self,
        simd: S,
        from: Source<'_>,
        positions: Range<usize>,
    ) {
        let (g, slot, head) = (from.geometry, from.slot, from.head);
        for (position, out) in positions.zip(self.values.chunks_exact_mut(self.width)) {
            let (floats, first) = if position < g.sinks {
                (&slot.sinks.values, g.value_index(g.sinks, head, position))
            } else {
                match from.page.map(|page| &page.values) {
                    Some(Tensor::Full(floats)) => {
                        (floats, g.value_index(g.page_tokens, head, g.locate(position).1))
                    }
                    _ => (&slot.ring.values, slot.value_index(head, position)),
                }
            };
            let ahead = first + VALUES_AHEAD * g.head_dim;
            floats.prefetch(simd, ahead..ahead + g.head_dim);
            floats.load(simd, first..first + g.head_dim, &mut out[..g.head_dim]);
        }
    }
}
