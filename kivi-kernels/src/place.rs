//! Where the tokens of a sequence lie in an arena.

use crate::memory::{GroupMemory, SlotRecord};
use kivi_core::{Error, PageId, Result, SequenceLayout};

/// The pages and the slot of one sequence.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    /// Named in errors.
    operation: &'static str,
    memory: &'a GroupMemory,
    pub(crate) table: &'a [PageId],
    slot: usize,
}

impl<'a> Places<'a> {
    /// Of a layout that belongs to the pool.
    pub(crate) fn new(
        operation: &'static str,
        memory: &'a GroupMemory,
        group: usize,
        layout: &'a SequenceLayout,
    ) -> Self {
        Self { operation, memory, table: &layout.tables[group], slot: layout.slot }
    }

    pub(crate) fn slot(&self) -> Result<&'a SlotRecord> {
        let slot = self.memory.slot(self.slot);
        slot.ok_or_else(|| Error::request(self.operation, format!("no slot {}", self.slot)))
    }

    /// The first word of the page of a position after the sinks, and the token's place in it.
    pub(crate) fn page(&self, position: usize) -> Result<(usize, usize)> {
        let shape = &self.memory.shape;
        let offset = position - shape.sinks;
        let id = self.table.get(offset / shape.page_tokens).filter(|&&id| id != PageId::DROPPED);
        let page = id.and_then(|&id| self.memory.page(id));
        let missing = || Error::request(self.operation, format!("no page for position {position}"));
        Ok((page.ok_or_else(missing)?, offset % shape.page_tokens))
    }

    /// The first word of a key, or a value, in full precision.
    pub(crate) fn full(&self, position: usize, keys: bool) -> Result<usize> {
        let shape = &self.memory.shape;
        let (packs, width, part) = match keys {
            true => (shape.packs().keys, shape.key_width(), shape.full_keys()),
            false => (shape.packs().values, shape.value_width(), shape.full_values()),
        };
        if position >= shape.sinks && !packs {
            let (page, token) = self.page(position)?;
            return Ok(page + part + token * width);
        }
        let slot = self.slot()?;
        let (start, capacity) = match keys {
            true => (slot.keys.start, slot.capacity.keys),
            false => (slot.values.start, slot.capacity.values),
        };
        let row = match position.checked_sub(shape.sinks) {
            None => position,
            Some(offset) => shape.sinks + offset % capacity.max(1),
        };
        Ok(start + row * width)
    }
}
