//! Export to and import from the canonical form.

mod groups;

use crate::cache::{Floats, LayerCache, Page, Tensor};
use kivi_core::{
    CanonicalLayer, Error, FullTokens, KeyValue, PackedKeys, PackedValues, PageId, Result,
    SequenceLayout,
};
use std::ops::Range;

impl LayerCache {
    pub(crate) fn export(&self, group: usize, sequence: &SequenceLayout) -> Result<CanonicalLayer> {
        let (g, format) = (self.geometry, self.spec.format);
        let quantized = sequence.packed.map(|end| end - g.sinks);
        let shape = |tokens| [g.kv_heads, tokens, g.head_dim];
        let mut packed_keys = PackedKeys::zeroed_for(format.keys, g.group, shape(quantized.keys))?;
        if let Some(all) = &mut packed_keys {
            let layout = g.key_layout(all.bits);
            for (index, tokens) in self.pages_until(quantized.keys) {
                let page = self.page_at("export", group, sequence, index)?;
                for [head, token] in g.groups_of(&tokens) {
                    let first = index * g.page_tokens + token;
                    if let Some(group) = page.key_group(&g, layout, [head, token]) {
                        group.export(layout, [head, first], all);
                    }
                }
            }
        }
        let mut packed_values = None;
        if let Some(bits) = format.values.bits {
            let mut all = PackedValues::zeroed(bits, g.group, shape(quantized.values))?;
            let layout = g.value_layout(bits);
            for (index, tokens) in self.pages_until(quantized.values) {
                let page = self.page_at("export", group, sequence, index)?;
                for [head, token] in g.groups_of(&tokens) {
                    let (first, count) = (index * g.page_tokens + token, tokens.end - token);
                    if let Some(part) = page.value_group(&g, layout, [head, token]) {
                        part.export(layout, [head, first], count.min(g.group), &mut all);
                    }
                }
            }
            packed_values = Some(all);
        }
        let gather = |range: Range<usize>, keys: bool| self.gather(group, sequence, range, keys);
        let first = |packs: bool, kept: usize| if packs { kept } else { g.sinks };
        let tail = |first: usize| first..sequence.tokens.max(first);
        let in_sinks = || 0..sequence.tokens.min(g.sinks);
        Ok(CanonicalLayer {
            sinks: KeyValue::new(gather(in_sinks(), true)?, gather(in_sinks(), false)?),
            full: KeyValue::new(
                gather(tail(first(packed_keys.is_some(), sequence.kept.keys)), true)?,
                gather(tail(first(packed_values.is_some(), sequence.kept.values)), false)?,
            ),
            packed_keys,
            packed_values,
        })
    }

    pub(crate) fn import(
        &mut self,
        group: usize,
        sequence: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        for &page in sequence.tables[group].iter().filter(|&&page| page != PageId::DROPPED) {
            self.allocate_page(page);
            // It may hold what its last owner left.
            self.page_mut("import", page)?.filled = KeyValue::default();
        }
        self.make_room(group, sequence);
        self.slot_mut("import", sequence.slot)?.make_room();
        let g = self.geometry;
        let quantized = sequence.packed.map(|end| end - g.sinks);
        if let Some(keys) = &contents.packed_keys {
            let layout = g.key_layout(keys.bits);
            for (index, tokens) in self.pages_until(quantized.keys) {
                let page = self.page_at_mut("import", group, sequence, index)?;
                page.filled.keys = tokens.len();
                let Some(groups) = page.keys.groups_mut() else { continue };
                for [head, token] in g.groups_of(&tokens) {
                    let first = index * g.page_tokens + token;
                    if let Some(mut group) = layout.group_mut(g.group_row(head, token), groups) {
                        group.import(layout, [head, first], keys);
                    }
                }
            }
        }
        if let Some(values) = &contents.packed_values {
            let layout = g.value_layout(values.bits);
            for (index, tokens) in self.pages_until(quantized.values) {
                let page = self.page_at_mut("import", group, sequence, index)?;
                page.filled.values = tokens.len();
                let Some(groups) = page.values.groups_mut() else { continue };
                for [head, token] in g.groups_of(&tokens) {
                    let (first, count) = (index * g.page_tokens + token, tokens.end - token);
                    if let Some(mut group) = layout.group_mut(g.group_row(head, token), groups) {
                        group.import(layout, [head, first], count.min(g.group), values);
                    }
                }
            }
        }
        for (tokens, keys) in [
            (&contents.sinks.keys, true),
            (&contents.full.keys, true),
            (&contents.sinks.values, false),
            (&contents.full.values, false),
        ] {
            self.scatter(group, sequence, tokens, keys)?;
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
