//! Export to and import from the canonical form.

mod promoted;

use crate::cache::{Floats, Geometry, KeyOrder, LayerCache, Page, Tensor, order::Place};
use kivi_core::{
    Bits, CanonicalLayer, Error, FullTokens, KeyValue, PackedKeys, PackedValues, PageId, Result,
    SequenceLayout, quantizer::GroupParams,
};
use std::ops::Range;

impl LayerCache {
    pub(crate) fn export(&self, group: usize, layout: &SequenceLayout) -> Result<CanonicalLayer> {
        let (g, format) = (self.geometry, self.spec.format);
        let quantized = layout.packed.map(|end| end - g.sinks);
        let shape = |tokens| [g.kv_heads, tokens, g.head_dim];
        let mut packed_keys = PackedKeys::zeroed_for(format.keys, g.group, shape(quantized.keys))?;
        if let Some(all) = &mut packed_keys {
            let order = g.key_order(all.bits);
            for (index, tokens) in self.pages_until(quantized.keys) {
                let page = self.page_at("export", group, layout, index)?;
                let first = index * g.page_tokens;
                if let Tensor::Packed { codes, scales, zeros } = &page.keys {
                    let tokens = tokens.clone();
                    for_each_key(&g, order, tokens, |head, token, channel, params, at| {
                        if token.is_multiple_of(g.group) {
                            let group = (first + token) / g.group;
                            let (scale, zero) = (scales[params], zeros[params]);
                            all.set_params(head, group, channel, GroupParams { scale, zero });
                        }
                        all.set_code(head, first + token, channel, at.get(order.bits, codes));
                    });
                }
                if let Some(promoted) = &page.promoted {
                    promoted.export(&g, first, tokens, all);
                }
            }
        }
        let mut packed_values = None;
        if let Some(bits) = format.values.bits {
            let mut all = PackedValues::zeroed(bits, g.group, shape(quantized.values))?;
            for (index, tokens) in self.pages_until(quantized.values) {
                let page = self.page_at("export", group, layout, index)?;
                if let Tensor::Packed { codes, scales, zeros } = &page.values {
                    let first = index * g.page_tokens;
                    for_each_value(&g, bits, tokens, |head, token, channel, params, at| {
                        if channel.is_multiple_of(g.group) {
                            let (scale, zero) = (scales[params], zeros[params]);
                            let group = channel / g.group;
                            let params = GroupParams { scale, zero };
                            all.set_params(head, first + token, group, params);
                        }
                        all.set_code(head, first + token, channel, at.get(bits, codes));
                    });
                }
            }
            packed_values = Some(all);
        }
        let gather = |range: Range<usize>, keys: bool| self.gather(group, layout, range, keys);
        let first = |packs: bool, kept: usize| if packs { kept } else { g.sinks };
        let tail = |first: usize| first..layout.tokens.max(first);
        let in_sinks = || 0..layout.tokens.min(g.sinks);
        Ok(CanonicalLayer {
            sinks: KeyValue::new(gather(in_sinks(), true)?, gather(in_sinks(), false)?),
            full: KeyValue::new(
                gather(tail(first(packed_keys.is_some(), layout.kept.keys)), true)?,
                gather(tail(first(packed_values.is_some(), layout.kept.values)), false)?,
            ),
            packed_keys,
            packed_values,
        })
    }

    pub(crate) fn import(
        &mut self,
        group: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        for &page in layout.tables[group].iter().filter(|&&page| page != PageId::DROPPED) {
            self.allocate_page(page);
            // It may hold what its last owner left.
            self.page_mut("import", page)?.filled = KeyValue::default();
        }
        self.make_room(group, layout);
        let g = self.geometry;
        let quantized = layout.packed.map(|end| end - g.sinks);
        if let Some(keys) = &contents.packed_keys {
            for (index, tokens) in self.pages_until(quantized.keys) {
                let page = self.page_at_mut("import", group, layout, index)?;
                page.filled.keys = tokens.len();
                let first = index * g.page_tokens;
                if let Some(promoted) = &mut page.promoted {
                    promoted.import(&g, first, tokens.clone(), keys);
                }
                if let Tensor::Packed { codes, scales, zeros } = &mut page.keys {
                    let order = g.key_order(keys.bits);
                    for_each_key(&g, order, tokens, |head, token, channel, params, at| {
                        if token.is_multiple_of(g.group) {
                            let group = (first + token) / g.group;
                            let found = keys.params(head, group, channel);
                            (scales[params], zeros[params]) = (found.scale, found.zero);
                        }
                        at.set(keys.bits, codes, keys.code(head, first + token, channel));
                    });
                }
            }
        }
        if let Some(values) = &contents.packed_values {
            for (index, tokens) in self.pages_until(quantized.values) {
                let page = self.page_at_mut("import", group, layout, index)?;
                page.filled.values = tokens.len();
                if let Tensor::Packed { codes, scales, zeros } = &mut page.values {
                    let first = index * g.page_tokens;
                    for_each_value(&g, values.bits, tokens, |head, token, channel, params, at| {
                        if channel.is_multiple_of(g.group) {
                            let found = values.params(head, first + token, channel / g.group);
                            (scales[params], zeros[params]) = (found.scale, found.zero);
                        }
                        at.set(values.bits, codes, values.code(head, first + token, channel));
                    });
                }
            }
        }
        for (tokens, keys) in [
            (&contents.sinks.keys, true),
            (&contents.full.keys, true),
            (&contents.sinks.values, false),
            (&contents.full.values, false),
        ] {
            self.scatter(group, layout, tokens, keys)?;
        }
        Ok(())
    }

    /// Page indices and, of each, the tokens that lie before `tokens` after the sinks.
    fn pages_until(&self, tokens: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let page_tokens = self.geometry.page_tokens;
        (0..tokens.div_ceil(page_tokens)).map(move |index| {
            let start = index * page_tokens;
            (index, 0..page_tokens.min(tokens - start))
        })
    }

    fn page_at(
        &self,
        operation: &'static str,
        group: usize,
        layout: &SequenceLayout,
        index: usize,
    ) -> Result<&Page> {
        self.page(operation, page_id(operation, group, layout, index)?)
    }

    fn page_at_mut(
        &mut self,
        operation: &'static str,
        group: usize,
        layout: &SequenceLayout,
        index: usize,
    ) -> Result<&mut Page> {
        self.page_mut(operation, page_id(operation, group, layout, index)?)
    }

    /// Where a full-precision token lies: its buffer, the index of its first channel in head
    /// `head`, and the distance between channels.
    fn full_token<'a>(
        &self,
        slot: &'a crate::cache::Slot,
        page: Option<&'a Page>,
        (keys, head, position): (bool, usize, usize),
    ) -> (&'a Floats, usize, usize) {
        let g = &self.geometry;
        if position < g.sinks {
            return match keys {
                true => (&slot.sinks.keys, head * g.head_dim * g.sinks + position, g.sinks),
                false => (&slot.sinks.values, g.value_index(g.sinks, head, position), 1),
            };
        }
        let token = g.locate(position).1;
        match (keys, page.map(|page| if keys { &page.keys } else { &page.values })) {
            (true, Some(Tensor::Full(floats))) => {
                (floats, g.key_index(g.page_tokens / g.group, head, token), g.group)
            }
            (false, Some(Tensor::Full(floats))) => {
                (floats, g.value_index(g.page_tokens, head, token), 1)
            }
            (true, _) => (&slot.ring.keys, slot.key_index(head, position), g.group),
            (false, _) => (&slot.ring.values, slot.value_index(head, position), 1),
        }
    }

    fn gather(
        &self,
        group: usize,
        layout: &SequenceLayout,
        range: Range<usize>,
        keys: bool,
    ) -> Result<FullTokens> {
        let g = &self.geometry;
        let slot = self.slot("export", layout.slot)?;
        let mut data = Vec::with_capacity(range.len() * g.width());
        for head in 0..g.kv_heads {
            for position in range.clone() {
                let page = self.full_page(group, layout, position, keys)?;
                let (floats, first, stride) = self.full_token(slot, page, (keys, head, position));
                data.extend((0..g.head_dim).map(|channel| floats.get(first + channel * stride)));
            }
        }
        Ok(FullTokens { first: range.start, tokens: range.len(), data })
    }

    /// The page of a token of an uncompressed format.
    fn full_page(
        &self,
        group: usize,
        layout: &SequenceLayout,
        position: usize,
        keys: bool,
    ) -> Result<Option<&Page>> {
        let format = if keys { self.spec.format.keys } else { self.spec.format.values };
        if position < self.geometry.sinks || format.bits.is_some() {
            return Ok(None);
        }
        let index = self.geometry.locate(position).0;
        self.page_at("export", group, layout, index).map(Some)
    }

    fn scatter(
        &mut self,
        group: usize,
        layout: &SequenceLayout,
        tokens: &FullTokens,
        keys: bool,
    ) -> Result<()> {
        let g = self.geometry;
        let format = if keys { self.spec.format.keys } else { self.spec.format.values };
        for t in 0..tokens.tokens {
            let position = tokens.first + t;
            for head in 0..g.kv_heads {
                let from = (head * tokens.tokens + t) * g.head_dim;
                let row = &tokens.data[from..from + g.head_dim];
                if position >= g.sinks && format.bits.is_none() {
                    let (index, token) = g.locate(position);
                    let page = self.page_at_mut("import", group, layout, index)?;
                    let tiles = g.page_tokens / g.group;
                    let (tensor, filled, first, stride) = match keys {
                        true => {
                            let first = g.key_index(tiles, head, token);
                            (&mut page.keys, &mut page.filled.keys, first, g.group)
                        }
                        false => {
                            let first = g.value_index(g.page_tokens, head, token);
                            (&mut page.values, &mut page.filled.values, first, 1)
                        }
                    };
                    *filled = token + 1;
                    if let Tensor::Full(floats) = tensor {
                        floats.write(first, stride, row);
                    }
                    continue;
                }
                let slot = self.slot_mut("import", layout.slot)?;
                let (floats, first, stride) = match (keys, position < g.sinks) {
                    (true, true) => {
                        let first = head * g.head_dim * g.sinks + position;
                        (&mut slot.sinks.keys, first, g.sinks)
                    }
                    (false, true) => {
                        (&mut slot.sinks.values, g.value_index(g.sinks, head, position), 1)
                    }
                    (true, false) => {
                        let first = slot.key_index(head, position);
                        (&mut slot.ring.keys, first, g.group)
                    }
                    (false, false) => {
                        let first = slot.value_index(head, position);
                        (&mut slot.ring.values, first, 1)
                    }
                };
                floats.write(first, stride, row);
            }
        }
        Ok(())
    }
}

fn page_id(
    operation: &'static str,
    group: usize,
    layout: &SequenceLayout,
    index: usize,
) -> Result<PageId> {
    match layout.tables[group].get(index) {
        Some(&page) if page != PageId::DROPPED => Ok(page),
        _ => Err(Error::request(operation, format!("page {index} was given up"))),
    }
}

/// Calls `f` with head, token, channel, index of the scale and place of the code of every key of the
/// first `tokens` of a page, which lie in this order.
fn for_each_key(
    g: &Geometry,
    order: KeyOrder,
    tokens: Range<usize>,
    mut f: impl FnMut(usize, usize, usize, usize, Place),
) {
    let groups = g.page_tokens / g.group;
    for head in 0..g.kv_heads {
        for channel in 0..order.channels {
            for token in tokens.clone() {
                let row = head * groups + token / g.group;
                let Place { word, shift } = order.place(token % g.group, channel);
                let place = Place { word: row * order.words() + word, shift };
                f(head, token, channel, row * order.channels + channel, place);
            }
        }
    }
}

/// As [`for_each_key`], for values.
fn for_each_value(
    g: &Geometry,
    bits: Bits,
    tokens: Range<usize>,
    mut f: impl FnMut(usize, usize, usize, usize, Place),
) {
    let (order, groups) = (g.value_order(bits), g.head_dim.div_ceil(g.group));
    for head in 0..g.kv_heads {
        let first = head * order.words(g.page_tokens);
        for token in tokens.clone() {
            for channel in 0..g.head_dim {
                let params = (head * groups + channel / g.group) * g.page_tokens + token;
                let Place { word, shift } = order.place(token, channel);
                f(head, token, channel, params, Place { word: first + word, shift });
            }
        }
    }
}
