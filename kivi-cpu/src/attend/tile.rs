//! One tile of the cache, unpacked to f32 in scratch memory.

use super::Block;
use crate::{
    cache::{Floats, Geometry, LayerCache, Page, Slot, Tensor},
    isa::{LANES, Simd, slices},
};
use half::f16;
use kivi_core::{Bits, KeyValue, PageId, words_for};
use std::ops::Range;

/// Scratch for one tile of at most `G` tokens: with `G = 32` and head_dim 128, 16 KiB for the keys
/// and as much for the values. Rows of one step may see the same token as a code or in full
/// precision, so there is room for both.
pub(super) struct Tile {
    /// Positions in it.
    pub(super) positions: Range<usize>,
    /// Distance between two channels of keys: `G` in whole vectors.
    pub(super) stride: usize,
    /// Distance between two tokens of values: `head_dim` in whole vectors, the rest 0.
    pub(super) width: usize,
    pub(super) codes: KeyValue<Codes>,
    /// Keys `[head_dim, stride]`, values `[G, width]`.
    pub(super) full: KeyValue<Vec<f32>>,
}

/// Quantized keys or values of a tile.
#[derive(Default)]
pub(super) struct Codes {
    /// As [`Tile::full`], but codes.
    pub(super) codes: Vec<f32>,
    /// Keys `[head_dim]`, values `[groups, G]`.
    pub(super) scales: Vec<f32>,
    /// Likewise.
    pub(super) zeros: Vec<f32>,
}

/// Which forms of a tile the rows of a block read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Needs {
    pub(super) codes: KeyValue<bool>,
    pub(super) full: KeyValue<bool>,
}

impl Tile {
    pub(super) fn new(g: &Geometry) -> Self {
        let (stride, width) = (g.group.next_multiple_of(LANES), g.head_dim.next_multiple_of(LANES));
        let codes = |elements: usize, params: usize| Codes {
            codes: vec![0.0; elements],
            scales: vec![0.0; params],
            zeros: vec![0.0; params],
        };
        let elements = KeyValue::new(g.head_dim * stride, g.group * width);
        let groups = g.head_dim.div_ceil(g.group);
        Self {
            positions: 0..0,
            stride,
            width,
            codes: KeyValue::new(
                codes(elements.keys, g.head_dim),
                codes(elements.values, groups * g.group),
            ),
            full: elements.map(|elements| vec![0.0; elements]),
        }
    }

    /// Unpacks what is needed of the tile at `positions`; says whether the tile can be seen, which
    /// it cannot if its page was given up.
    #[inline(always)]
    pub(super) fn load<S: Simd>(
        &mut self,
        simd: S,
        layer: &LayerCache,
        group: usize,
        block: &Block<'_>,
        positions: Range<usize>,
        needs: Needs,
    ) -> bool {
        let (g, head) = (&layer.geometry, block.kv_head);
        let layout = &block.sequence.before;
        let Some(Some(slot)) = layer.slots.get(layout.slot) else {
            return false;
        };
        self.positions = positions;
        if self.positions.start < g.sinks {
            self.load_sinks(simd, g, slot, head);
            return true;
        }
        let (index, token) = g.locate(self.positions.start);
        let id = layout.tables[group].get(index).copied();
        if id == Some(PageId::DROPPED) {
            return false;
        }
        let page = id.and_then(|id| layer.pages.get(id.index())).and_then(Option::as_ref);
        let format = layer.spec.format;
        if let Some(page) = page {
            self.load_page(simd, layer, page, head, token, needs);
        }
        if needs.full.keys && format.keys.bits.is_some() {
            let first = slot.key_index(head, self.positions.start);
            self.load_key_tile(simd, g, &slot.ring.keys, first);
        }
        if needs.full.values && format.values.bits.is_some() {
            let first = self.positions.start;
            self.load_values(simd, g, &slot.ring.values, |t| slot.value_index(head, first + t));
        }
        true
    }

    #[inline(always)]
    fn load_sinks<S: Simd>(&mut self, simd: S, g: &Geometry, slot: &Slot, head: usize) {
        let start = self.positions.start;
        for channel in 0..g.head_dim {
            let first = (head * g.head_dim + channel) * g.sinks + start;
            let out = &mut self.full.keys[channel * self.stride..][..self.positions.len()];
            slot.sinks.keys.load(simd, first..first + out.len(), out);
        }
        self.load_values(simd, g, &slot.sinks.values, |t| g.value_index(g.sinks, head, start + t));
    }

    #[inline(always)]
    fn load_page<S: Simd>(
        &mut self,
        simd: S,
        layer: &LayerCache,
        page: &Page,
        head: usize,
        token: usize,
        needs: Needs,
    ) {
        let g = &layer.geometry;
        match (&page.keys, layer.spec.format.keys.bits) {
            (Tensor::Full(floats), _) => {
                let first = g.key_index(g.page_tokens / g.group, head, token);
                self.load_key_tile(simd, g, floats, first);
            }
            (Tensor::Packed { codes, scales, zeros }, Some(bits)) if needs.codes.keys => {
                let first = head * words_for(bits, g.page_tokens) + words_for(bits, token);
                self.unpack_keys(simd, g, bits, &codes[first * g.head_dim..]);
                let first = (head * g.page_tokens + token) / g.group * g.head_dim;
                let keys = &mut self.codes.keys;
                let params = first..first + g.head_dim;
                load_f16(simd, &scales[params.clone()], &mut keys.scales);
                load_f16(simd, &zeros[params], &mut keys.zeros);
            }
            _ => {}
        }
        match (&page.values, layer.spec.format.values.bits) {
            (Tensor::Full(floats), _) => {
                self.load_values(simd, g, floats, |t| {
                    g.value_index(g.page_tokens, head, token + t)
                });
            }
            (Tensor::Packed { codes, scales, zeros }, Some(bits)) if needs.codes.values => {
                let (words, groups) = (words_for(bits, g.head_dim), g.head_dim.div_ceil(g.group));
                let values = &mut self.codes.values;
                for t in 0..self.positions.len() {
                    let row = head * g.page_tokens + token + t;
                    let out = &mut values.codes[t * self.width..][..g.head_dim];
                    unpack(simd, bits, &codes[row * words..][..words], out);
                    for group in 0..groups {
                        let at = row * groups + group;
                        values.scales[group * g.group + t] = scales[at].to_f32();
                        values.zeros[group * g.group + t] = zeros[at].to_f32();
                    }
                }
            }
            _ => {}
        }
    }

    /// A tile of full-precision keys, `[head_dim, G]` from `first` on.
    #[inline(always)]
    fn load_key_tile<S: Simd>(&mut self, simd: S, g: &Geometry, floats: &Floats, first: usize) {
        for channel in 0..g.head_dim {
            let from = first + channel * g.group;
            let out = &mut self.full.keys[channel * self.stride..][..g.group];
            floats.load(simd, from..from + g.group, out);
        }
    }

    /// Full-precision values; token `t` of the tile starts at `index(t)`.
    #[inline(always)]
    fn load_values<S: Simd>(
        &mut self,
        simd: S,
        g: &Geometry,
        floats: &Floats,
        index: impl Fn(usize) -> usize,
    ) {
        for t in 0..self.positions.len() {
            let from = index(t);
            let out = &mut self.full.values[t * self.width..][..g.head_dim];
            floats.load(simd, from..from + g.head_dim, out);
        }
    }

    /// One group of keys from canonical words, `[G · bits / 32, head_dim]`: a word holds tokens of
    /// one channel, so a channel's words unpack to its row of the tile.
    #[inline(always)]
    fn unpack_keys<S: Simd>(&mut self, simd: S, g: &Geometry, bits: Bits, codes: &[u32]) {
        // 128 tokens of 8 bits.
        let mut words = [0; 32];
        let words = &mut words[..words_for(bits, g.group)];
        for channel in 0..g.head_dim {
            for (i, word) in words.iter_mut().enumerate() {
                *word = codes[i * g.head_dim + channel];
            }
            let out = &mut self.codes.keys.codes[channel * self.stride..][..g.group];
            unpack(simd, bits, words, out);
        }
    }
}

#[inline(always)]
fn unpack<S: Simd>(simd: S, bits: Bits, words: &[u32], out: &mut [f32]) {
    match bits {
        Bits::Two => slices::unpack_codes::<S, 2>(simd, words, out),
        Bits::Four => slices::unpack_codes::<S, 4>(simd, words, out),
        Bits::Eight => slices::unpack_codes::<S, 8>(simd, words, out),
    }
}

#[inline(always)]
fn load_f16<S: Simd>(simd: S, x: &[f16], out: &mut [f32]) {
    slices::f16_to_f32(simd, bytemuck::cast_slice(x), out);
}
