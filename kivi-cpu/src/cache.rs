//! The memory of a pool: pages of codes, and full-precision tokens of every sequence.
//!
//! Keys lie token beside token, in tiles of `G` tokens that start `S + i·G` positions into the
//! sequence: a tile is `[head_dim, G]`, so that a vector holds one channel of several tokens both
//! before and after they are quantized, and a query is multiplied with a tile without a horizontal
//! sum. Values lie channel beside channel. [`groups`] says what a group of packed ones consists of,
//! [`order`] how its codes lie in words.

mod floats;
mod groups;
pub(crate) mod order;
mod page;
mod residual;
mod words;

pub(crate) use floats::Floats;
pub(crate) use groups::{
    KeyGroup, KeyGroupMut, KeyLayout, ValueGroup, ValueGroupMut, ValueLayout, channels_of,
};
pub(crate) use order::{KeyOrder, ValueOrder};
pub(crate) use page::{Page, Tensor};
pub(crate) use residual::Slot;

use crate::quantize;
use kivi_core::{
    Bits, Error, LayerSpec, PageId, PoolSpec, Result, SequenceLayout, StepPlan,
    memory::MeasuredBytes,
};
use std::ops::Range;

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
    pub(crate) geometry: Geometry,
    /// By page number.
    pub(crate) pages: Vec<Option<Page>>,
    /// By slot number.
    pub(crate) slots: Vec<Option<Slot>>,
    /// Memory of the list of pages that a step fills; empty between steps.
    pub(crate) filling: Vec<quantize::Work>,
}

/// The sizes that every address computation needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    /// `G`
    pub(crate) group: usize,
    pub(crate) page_tokens: usize,
    /// `S`
    pub(crate) sinks: usize,
    /// Promoted channels of a group of keys.
    pub(crate) promoted: Option<usize>,
}

impl Cache {
    pub(crate) fn new(spec: &PoolSpec) -> Self {
        let layer = |layer: &LayerSpec| LayerCache {
            spec: layer.clone(),
            geometry: Geometry {
                kv_heads: layer.kv_heads,
                head_dim: layer.head_dim,
                group: spec.config().group_size(),
                page_tokens: spec.config().page_tokens(),
                sinks: spec.config().sink_length(),
                promoted: layer.promoted_channels(),
            },
            pages: Vec::new(),
            slots: Vec::new(),
            filling: Vec::new(),
        };
        let layers = spec.layers().iter().map(layer).collect();
        Self { spec: spec.clone(), layers, saturated: 0 }
    }

    pub(crate) fn layer(&self, operation: &'static str, index: usize) -> Result<&LayerCache> {
        let layer = self.layers.get(index);
        layer.ok_or_else(|| no_layer(operation, index, self.layers.len()))
    }

    pub(crate) fn layer_mut(
        &mut self,
        operation: &'static str,
        index: usize,
    ) -> Result<&mut LayerCache> {
        let layers = self.layers.len();
        let layer = self.layers.get_mut(index);
        layer.ok_or_else(|| no_layer(operation, index, layers))
    }

    /// Forgets what was freed, allocates new pages and copies shared ones, and gives every
    /// residual the capacity of the step.
    pub(crate) fn begin_step(&mut self, plan: &StepPlan) -> Result<()> {
        for sequence in &plan.sequences {
            sequence.before.check("begin step", &self.spec)?;
        }
        for (index, layer) in self.layers.iter_mut().enumerate() {
            let group = self.spec.group_of(index);
            for freed in plan.freed.iter().filter(|freed| freed.group == group) {
                if let Some(page) = layer.pages.get_mut(freed.page.index()) {
                    *page = None;
                }
            }
            for &slot in &plan.freed_slots {
                if let Some(slot) = layer.slots.get_mut(slot) {
                    *slot = None;
                }
            }
            for sequence in &plan.sequences {
                layer.make_room(group, &sequence.before);
            }
            for copy in plan.copies.iter().filter(|copy| copy.group == group) {
                layer.allocate_page(copy.to);
                let from = layer.page("begin step", copy.from)?.clone();
                layer.pages[copy.to.index()] = Some(from);
            }
        }
        Ok(())
    }

    /// The bytes of the buffers, not a formula.
    pub(crate) fn measure(&self) -> MeasuredBytes {
        let mut total = MeasuredBytes::default();
        for layer in &self.layers {
            for page in layer.pages.iter().flatten() {
                page.measure(&layer.spec, &layer.geometry, &mut total);
            }
            for slot in layer.slots.iter().flatten() {
                slot.measure(&mut total);
            }
        }
        total
    }
}

impl LayerCache {
    /// Allocates the slot and the pages of a sequence that do not exist yet. Pages are added at
    /// the end of a table, so the first one already in use ends the search.
    pub(crate) fn make_room(&mut self, group: usize, layout: &SequenceLayout) {
        for &page in layout.tables[group].iter().rev() {
            if page != PageId::DROPPED && !self.allocate_page(page) {
                break;
            }
        }
        if self.slots.len() <= layout.slot {
            self.slots.resize_with(layout.slot + 1, || None);
        }
        let slot =
            self.slots[layout.slot].get_or_insert_with(|| Slot::new(&self.spec, &self.geometry));
        slot.prepare(layout);
    }

    /// Whether the page was not in use before.
    pub(crate) fn allocate_page(&mut self, page: PageId) -> bool {
        if self.pages.len() <= page.index() {
            self.pages.resize_with(page.index() + 1, || None);
        }
        let place = &mut self.pages[page.index()];
        let new = place.is_none();
        place.get_or_insert_with(|| Page::new(&self.spec, &self.geometry));
        new
    }

    pub(crate) fn page(&self, operation: &'static str, page: PageId) -> Result<&Page> {
        let found = self.pages.get(page.index()).and_then(Option::as_ref);
        found.ok_or_else(|| Error::request(operation, format!("no page {}", page.0)))
    }

    pub(crate) fn page_mut(&mut self, operation: &'static str, page: PageId) -> Result<&mut Page> {
        let found = self.pages.get_mut(page.index()).and_then(Option::as_mut);
        found.ok_or_else(|| Error::request(operation, format!("no page {}", page.0)))
    }

    pub(crate) fn slot(&self, operation: &'static str, slot: usize) -> Result<&Slot> {
        let found = self.slots.get(slot).and_then(Option::as_ref);
        found.ok_or_else(|| Error::request(operation, format!("no slot {slot}")))
    }

    /// As [`slot`](Self::slot), of a step whose tokens have been appended.
    pub(crate) fn appended_slot(&self, operation: &'static str, slot: usize) -> Result<&Slot> {
        let found = self.slot(operation, slot)?;
        let late = || Error::request(operation, format!("slot {slot} before this step's append"));
        found.has_room().then_some(found).ok_or_else(late)
    }

    pub(crate) fn slot_mut(&mut self, operation: &'static str, slot: usize) -> Result<&mut Slot> {
        let found = self.slots.get_mut(slot).and_then(Option::as_mut);
        found.ok_or_else(|| Error::request(operation, format!("no slot {slot}")))
    }
}

impl Geometry {
    /// Index in the page table and token within the page of a position after the sinks.
    pub(crate) fn locate(&self, position: usize) -> (usize, usize) {
        let offset = position - self.sinks;
        (offset / self.page_tokens, offset % self.page_tokens)
    }

    /// Elements of one token.
    pub(crate) fn width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// How a group of keys lies.
    pub(crate) fn key_layout(&self, bits: Bits) -> KeyLayout {
        let order = |bits, channels| KeyOrder { bits, channels, group: self.group };
        let promoted = self.promoted.map(|count| order(Bits::Two, count));
        KeyLayout { order: order(bits, self.head_dim), promoted }
    }

    /// How the values of a group of tokens lie.
    pub(crate) fn value_layout(&self, bits: Bits) -> ValueLayout {
        ValueLayout { order: ValueOrder { bits, channels: self.head_dim }, group: self.group }
    }

    /// Number of a head's group of packed tokens, in a page of which `token` is one.
    pub(crate) fn group_row(&self, head: usize, token: usize) -> usize {
        // A group is a power of two, which the compiler cannot know: attention asks this often.
        (head * self.page_tokens + token) >> self.group.trailing_zeros()
    }

    /// Head and first token of every group of packed tokens of a page that holds one of `tokens`.
    pub(crate) fn groups_of(
        &self,
        tokens: &Range<usize>,
    ) -> impl Iterator<Item = [usize; 2]> + use<> {
        let (tokens, group) = (tokens.clone(), self.group);
        let of_head = move |head| tokens.clone().step_by(group).map(move |token| [head, token]);
        (0..self.kv_heads).flat_map(of_head)
    }

    /// Where element `(head, token, channel 0)` of keys lies in tiles of `group` tokens, `tiles`
    /// to a head; channels are `group` elements apart.
    pub(crate) fn key_index(&self, tiles: usize, head: usize, token: usize) -> usize {
        let tile = head * tiles + token / self.group;
        tile * self.head_dim * self.group + token % self.group
    }

    /// Where element `(head, token, channel 0)` of values lies, `tokens` to a head.
    pub(crate) fn value_index(&self, tokens: usize, head: usize, token: usize) -> usize {
        (head * tokens + token) * self.head_dim
    }
}

fn no_layer(operation: &'static str, index: usize, layers: usize) -> Error {
    Error::request(operation, format!("layer {index} of {layers}"))
}
