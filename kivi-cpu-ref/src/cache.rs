//! What the reference keeps of a pool: every full-precision token in a map by its position, every
//! page in canonical form.

use kivi_core::{
    Error, KeyValue, LayerSpec, PackedKeys, PackedValues, PageId, PoolSpec, Result, SequenceLayout,
};
use std::collections::BTreeMap;

/// Position → `[kv_heads, head_dim]`, rounded to the store type.
pub(crate) type Tokens = BTreeMap<usize, Vec<f32>>;

/// The memory of a pool.
#[derive(Debug)]
pub struct Cache {
    pub(crate) spec: PoolSpec,
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) saturated: u64,
}

/// One layer of a pool.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) spec: LayerSpec,
    /// By page number.
    pub(crate) pages: Vec<Option<Page>>,
    /// By slot number.
    pub(crate) slots: Vec<Slot>,
}

/// `page_tokens` consecutive tokens.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    pub(crate) keys: Option<PackedKeys>,
    pub(crate) values: Option<PackedValues>,
    /// Tokens of uncompressed formats.
    pub(crate) full: KeyValue<Tokens>,
    /// Quantized tokens so far.
    pub(crate) filled: KeyValue<usize>,
}

/// The full-precision tokens of one sequence: sinks and residual.
#[derive(Clone, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) full: KeyValue<Tokens>,
    pub(crate) capacity: KeyValue<usize>,
    pub(crate) allocated: bool,
}

impl Cache {
    pub(crate) fn new(spec: &PoolSpec) -> Self {
        let layer = |spec: &LayerSpec| LayerCache {
            spec: spec.clone(),
            pages: Vec::new(),
            slots: Vec::new(),
        };
        let layers = spec.layers().iter().map(layer).collect();
        Self { spec: spec.clone(), layers, saturated: 0 }
    }

    pub(crate) fn expect_layer(&self, operation: &'static str, layer: usize) -> Result<()> {
        if layer < self.layers.len() {
            return Ok(());
        }
        let reason = format!("layer {layer} of {}", self.layers.len());
        Err(Error::request(operation, reason))
    }

    /// Allocates the pages and the slot of a layout, in every layer.
    pub(crate) fn make_room(&mut self, layout: &SequenceLayout) -> Result<()> {
        for index in 0..self.layers.len() {
            for &page in &layout.tables[self.spec.group_of(index)] {
                if page != PageId::DROPPED {
                    self.allocate_page(index, page)?;
                }
            }
            let slot = self.slot_mut(index, layout.slot);
            slot.allocated = true;
            slot.capacity = layout.capacity;
            // What lies beyond the end of the sequence was taken back by a truncation.
            for full in [&mut slot.full.keys, &mut slot.full.values] {
                full.split_off(&layout.tokens);
            }
        }
        Ok(())
    }

    fn allocate_page(&mut self, layer: usize, page: PageId) -> Result<()> {
        let shape = [
            self.layers[layer].spec.kv_heads,
            self.spec.config().page_tokens(),
            self.layers[layer].spec.head_dim,
        ];
        let g = self.spec.config().group_size();
        let format = self.layers[layer].spec.format;
        let pages = &mut self.layers[layer].pages;
        if pages.len() <= page.index() {
            pages.resize(page.index() + 1, None);
        }
        if pages[page.index()].is_some() {
            return Ok(());
        }
        let keys = PackedKeys::zeroed_for(format.keys, g, shape)?;
        let values =
            format.values.bits.map(|bits| PackedValues::zeroed(bits, g, shape)).transpose()?;
        let (full, filled) = (KeyValue::default(), KeyValue::default());
        pages[page.index()] = Some(Page { keys, values, full, filled });
        Ok(())
    }

    /// Gives up a page that nobody uses.
    pub(crate) fn free_page(&mut self, layer: usize, page: PageId) {
        if let Some(page) = self.layers[layer].pages.get_mut(page.index()) {
            *page = None;
        }
    }

    pub(crate) fn slot_mut(&mut self, layer: usize, slot: usize) -> &mut Slot {
        let slots = &mut self.layers[layer].slots;
        if slots.len() <= slot {
            slots.resize(slot + 1, Slot::default());
        }
        &mut slots[slot]
    }

    pub(crate) fn slot(&self, layer: usize, slot: usize) -> Result<&Slot> {
        let found = self.layers[layer].slots.get(slot);
        found.ok_or_else(|| Error::request("read cache", format!("no slot {slot}")))
    }

    /// The page of a position and the token's index in it; `None` if it was dropped.
    pub(crate) fn locate(
        &self,
        layer: usize,
        layout: &SequenceLayout,
        position: usize,
    ) -> Option<(PageId, usize)> {
        let offset = position - self.spec.config().sink_length();
        let page_tokens = self.spec.config().page_tokens();
        let table = &layout.tables[self.spec.group_of(layer)];
        let page = *table.get(offset / page_tokens)?;
        (page != PageId::DROPPED).then_some((page, offset % page_tokens))
    }

    pub(crate) fn page(&self, layer: usize, page: PageId) -> Result<&Page> {
        let found = self.layers[layer].pages.get(page.index()).and_then(Option::as_ref);
        found.ok_or_else(|| unknown_page(page))
    }

    pub(crate) fn page_mut(&mut self, layer: usize, page: PageId) -> Result<&mut Page> {
        let found = self.layers[layer].pages.get_mut(page.index()).and_then(Option::as_mut);
        found.ok_or_else(|| unknown_page(page))
    }

    /// Whether a position can be seen at all: its page was not given up.
    pub(crate) fn is_present(
        &self,
        layer: usize,
        layout: &SequenceLayout,
        position: usize,
    ) -> bool {
        let Some(offset) = position.checked_sub(self.spec.config().sink_length()) else {
            return true;
        };
        let table = &layout.tables[self.spec.group_of(layer)];
        table.get(offset / self.spec.config().page_tokens()) != Some(&PageId::DROPPED)
    }

    /// The key of a token as a query with the view `boundary` sees it: `[kv_heads, head_dim]`.
    pub(crate) fn key(
        &self,
        layer: usize,
        layout: &SequenceLayout,
        position: usize,
        boundary: usize,
    ) -> Result<Vec<f32>> {
        let slot = self.slot(layer, layout.slot)?;
        self.token(layer, layout, position, boundary, &slot.full.keys, |page| {
            (
                &page.full.keys,
                page.keys
                    .as_ref()
                    .map(|keys| move |head, token, channel| keys.dequantize(head, token, channel)),
            )
        })
    }

    /// The value of a token, likewise.
    pub(crate) fn value(
        &self,
        layer: usize,
        layout: &SequenceLayout,
        position: usize,
        boundary: usize,
    ) -> Result<Vec<f32>> {
        let slot = self.slot(layer, layout.slot)?;
        self.token(layer, layout, position, boundary, &slot.full.values, |page| {
            (
                &page.full.values,
                page.values.as_ref().map(|values| {
                    move |head, token, channel| values.dequantize(head, token, channel)
                }),
            )
        })
    }

    /// Sinks and what the query sees in full precision from the slot, everything else from pages.
    fn token<'a, D: Fn(usize, usize, usize) -> f32 + 'a>(
        &'a self,
        layer: usize,
        layout: &SequenceLayout,
        position: usize,
        boundary: usize,
        slot: &Tokens,
        of_page: impl Fn(&'a Page) -> (&'a Tokens, Option<D>),
    ) -> Result<Vec<f32>> {
        let missing = || Error::request("read cache", format!("no token at position {position}"));
        if position < self.spec.config().sink_length() {
            return slot.get(&position).cloned().ok_or_else(missing);
        }
        let located = self.locate(layer, layout, position);
        let page = located.map(|(page, _)| self.page(layer, page)).transpose()?;
        match page.map(of_page) {
            // An uncompressed format.
            Some((full, None)) => full.get(&position).cloned().ok_or_else(missing),
            Some((_, Some(dequantize))) if position < boundary => {
                let token = located.map_or(0, |(_, token)| token);
                let spec = &self.layers[layer].spec;
                let channels = |head| (0..spec.head_dim).map(move |channel| (head, channel));
                let row = (0..spec.kv_heads).flat_map(channels);
                Ok(row.map(|(head, channel)| dequantize(head, token, channel)).collect())
            }
            _ => slot.get(&position).cloned().ok_or_else(missing),
        }
    }
}

fn unknown_page(page: PageId) -> Error {
    Error::request("read cache", format!("page {} does not exist", page.0))
}
