//! The memory of a layer group: where pages and slots lie.
//!
//! The layers of a group allocate in lock-step, so one allocator serves them all and a place is the
//! same word in each layer's arena. Arenas grow by doubling.

use crate::{DeviceError, Shape};
use kivi_core::{
    Error, KeyValue, LayerSpec, PageId, PoolSpec, Result, SequenceLayout, memory::MeasuredBytes,
};
use range_alloc::RangeAllocator;
use std::ops::Range;

/// Words that ranges are multiples of, so that vectors of words are aligned.
const ALIGNMENT: usize = 4;

/// Words of a new arena.
const FIRST_WORDS: usize = 1 << 14;

/// A run of words to copy: source, target, length.
pub(crate) type Run = [usize; 3];

/// A page that belongs to somebody.
#[derive(Clone, Debug)]
struct PageRecord {
    words: Range<usize>,
    /// Tokens whose codes it holds.
    filled: KeyValue<usize>,
    /// Tokens it holds in full precision.
    full: usize,
}

/// A slot that belongs to a sequence.
#[derive(Clone, Debug)]
pub(crate) struct SlotRecord {
    pub(crate) keys: Range<usize>,
    pub(crate) values: Range<usize>,
    /// Tokens of the two rings.
    pub(crate) capacity: KeyValue<usize>,
    /// Tokens it holds, with sinks.
    held: KeyValue<usize>,
}

/// Where everything of a layer group lies.
#[derive(Debug)]
pub(crate) struct GroupMemory {
    pub(crate) shape: Shape,
    pub(crate) spec: LayerSpec,
    allocator: RangeAllocator<usize>,
    /// Words of an arena.
    pub(crate) words: usize,
    /// Words an arena may have.
    limit: usize,
    pages: Vec<Option<PageRecord>>,
    slots: Vec<Option<SlotRecord>>,
    /// What a step gives up at its end.
    retired: Vec<Range<usize>>,
}

fn round(words: usize) -> usize {
    words.next_multiple_of(ALIGNMENT)
}

impl GroupMemory {
    pub(crate) fn new(shape: Shape, spec: LayerSpec, limit: usize) -> Self {
        Self {
            shape,
            spec,
            allocator: RangeAllocator::new(0..0),
            words: 0,
            limit,
            pages: Vec::new(),
            slots: Vec::new(),
            retired: Vec::new(),
        }
    }

    fn allocate(&mut self, backend: &'static str, words: usize) -> Result<Range<usize>> {
        let words = round(words);
        if words == 0 {
            return Ok(0..0);
        }
        if let Ok(range) = self.allocator.allocate_range(words) {
            return Ok(range);
        }
        let needed = self.words + words;
        let size = needed.max(2 * self.words).max(FIRST_WORDS).min(self.limit.max(needed));
        if size > self.limit {
            let source = DeviceError::OutOfMemory { needed: 4 * needed, limit: 4 * self.limit };
            return Err(Error::Device { backend, operation: "begin step", source: source.into() });
        }
        self.allocator.grow_to(size);
        self.words = size;
        let range = self.allocator.allocate_range(words);
        range.map_err(|_| Error::request("begin step", format!("no {words} words in a row")))
    }

    fn free(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            self.allocator.free_range(range);
        }
    }

    pub(crate) fn free_page(&mut self, page: PageId) {
        if let Some(record) = self.pages.get_mut(page.index()).and_then(Option::take) {
            self.free(record.words);
        }
    }

    pub(crate) fn free_slot(&mut self, slot: usize) {
        if let Some(record) = self.slots.get_mut(slot).and_then(Option::take) {
            self.free(record.keys);
            self.free(record.values);
        }
    }

    /// Ends a step: what it moved is free to be used again.
    pub(crate) fn retire(&mut self) {
        for range in std::mem::take(&mut self.retired) {
            self.free(range);
        }
    }

    /// The first word of a page; `None` if it has none.
    pub(crate) fn page(&self, page: PageId) -> Option<usize> {
        Some(self.pages.get(page.index())?.as_ref()?.words.start)
    }

    pub(crate) fn slot(&self, slot: usize) -> Option<&SlotRecord> {
        self.slots.get(slot)?.as_ref()
    }

    /// A page's words, allocated if it is new.
    pub(crate) fn require_page(&mut self, backend: &'static str, page: PageId) -> Result<usize> {
        if let Some(start) = self.page(page) {
            return Ok(start);
        }
        let words = self.allocate(backend, self.shape.page_words())?;
        let start = words.start;
        if self.pages.len() <= page.index() {
            self.pages.resize(page.index() + 1, None);
        }
        let record = PageRecord { words, filled: KeyValue::default(), full: 0 };
        self.pages[page.index()] = Some(record);
        Ok(start)
    }

    /// Gives a slot rings of `capacity`. The runs that its contents move by, positions
    /// `kept .. tokens` and sinks, are added to `runs`.
    pub(crate) fn require_slot(
        &mut self,
        backend: &'static str,
        slot: usize,
        capacity: KeyValue<usize>,
        (kept, tokens): (KeyValue<usize>, usize),
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        if self.slots.len() <= slot {
            self.slots.resize(slot + 1, None);
        }
        let old = self.slots[slot].clone();
        if old.as_ref().is_some_and(|old| old.capacity == capacity) {
            return Ok(());
        }
        let words = self.shape.slot_words(capacity);
        let same = |old: &Option<SlotRecord>, keys: bool| {
            let old = old.as_ref()?;
            let (range, unchanged) = match keys {
                true => (&old.keys, old.capacity.keys == capacity.keys),
                false => (&old.values, old.capacity.values == capacity.values),
            };
            unchanged.then(|| range.clone())
        };
        let keys = match same(&old, true) {
            Some(range) => range,
            None => self.allocate(backend, words.keys)?,
        };
        let values = match same(&old, false) {
            Some(range) => range,
            None => self.allocate(backend, words.values)?,
        };
        let (key_width, value_width) = (self.shape.key_width(), self.shape.value_width());
        let held = old.as_ref().map_or_else(KeyValue::default, |old| old.held);
        if let Some(old) = &old {
            let packs = self.shape.packs();
            if old.keys != keys {
                let lengths = [old.capacity.keys, capacity.keys];
                let live = if packs.keys { kept.keys..tokens } else { 0..0 };
                self.moved([&old.keys, &keys], lengths, live, tokens, key_width, runs);
                self.retired.push(old.keys.clone());
            }
            if old.values != values {
                let lengths = [old.capacity.values, capacity.values];
                let live = if packs.values { kept.values..tokens } else { 0..0 };
                self.moved([&old.values, &values], lengths, live, tokens, value_width, runs);
                self.retired.push(old.values.clone());
            }
        }
        self.slots[slot] = Some(SlotRecord { keys, values, capacity, held });
        Ok(())
    }

    /// Makes the slot of a fork the copy of another one.
    pub(crate) fn copy_slot(
        &mut self,
        backend: &'static str,
        from: usize,
        to: &SequenceLayout,
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        let Some(source) = self.slot(from).cloned() else { return Ok(()) };
        self.free_slot(to.slot);
        let nothing = (KeyValue::default(), 0);
        self.require_slot(backend, to.slot, to.capacity, nothing, runs)?;
        let Some(Some(copy)) = self.slots.get_mut(to.slot) else { return Ok(()) };
        copy.held = source.held;
        let copy = copy.clone();
        let (packs, tokens) = (self.shape.packs(), to.tokens);
        let live = packs.zip(to.kept).map(|(packs, kept)| if packs { kept..tokens } else { 0..0 });
        let lengths = source.capacity.zip(to.capacity).map(|(from, to)| [from, to]);
        let (key_width, value_width) = (self.shape.key_width(), self.shape.value_width());
        self.moved([&source.keys, &copy.keys], lengths.keys, live.keys, tokens, key_width, runs);
        let values = [&source.values, &copy.values];
        self.moved(values, lengths.values, live.values, tokens, value_width, runs);
        Ok(())
    }

    /// The runs that move sinks and the live positions from one ring to another.
    fn moved(
        &self,
        [from, to]: [&Range<usize>; 2],
        [old, new]: [usize; 2],
        live: Range<usize>,
        tokens: usize,
        width: usize,
        runs: &mut Vec<Run>,
    ) {
        let sinks = self.shape.sinks;
        push_run(runs, from.start, to.start, tokens.min(sinks) * width);
        let mut position = live.start.max(sinks);
        while position < live.end {
            let (at, goal) = ((position - sinks) % old, (position - sinks) % new);
            let count = (live.end - position).min(old - at).min(new - goal);
            let (at, goal) = (from.start + (sinks + at) * width, to.start + (sinks + goal) * width);
            push_run(runs, at, goal, count * width);
            position += count;
        }
    }

    /// Room for a sequence as it is before a step.
    pub(crate) fn make_room(
        &mut self,
        backend: &'static str,
        group: usize,
        layout: &SequenceLayout,
        runs: &mut Vec<Run>,
    ) -> Result<()> {
        for &page in layout.tables[group].iter().filter(|&&page| page != PageId::DROPPED) {
            self.require_page(backend, page)?;
        }
        let live = (layout.kept, layout.tokens);
        self.require_slot(backend, layout.slot, layout.capacity, live, runs)
    }

    /// Notes how much a sequence holds: codes up to `packed`, copies from `kept` on.
    pub(crate) fn note(
        &mut self,
        group: usize,
        layout: &SequenceLayout,
        (packed, kept): (KeyValue<usize>, KeyValue<usize>),
        tokens: usize,
    ) {
        let (sinks, page_tokens) = (self.shape.sinks, self.shape.page_tokens);
        let packs = self.shape.packs();
        for (index, page) in layout.tables[group].iter().enumerate() {
            let Some(Some(record)) = self.pages.get_mut(page.index()) else { continue };
            let start = sinks + index * page_tokens;
            let inside = |end: usize| end.saturating_sub(start).min(page_tokens);
            let filled = packed.map(inside).zip(packs);
            record.filled = filled.map(|(tokens, packs)| if packs { tokens } else { 0 });
            record.full = inside(tokens);
        }
        if let Some(Some(slot)) = self.slots.get_mut(layout.slot) {
            let held = kept.zip(packs).map(|(kept, packs)| {
                tokens.min(sinks) + if packs { tokens.saturating_sub(kept) } else { 0 }
            });
            slot.held = held;
        }
    }

    /// Bytes of one layer.
    pub(crate) fn measure(&self, pool: &PoolSpec) -> MeasuredBytes {
        let mut total = MeasuredBytes::default();
        let uncompressed = self.shape.packs().map(|packs| !packs);
        for record in self.pages.iter().flatten() {
            total.codes += pool.code_bytes(&self.spec, record.filled);
            total.scales_and_zeros += pool.param_bytes(&self.spec, record.filled);
            total.channel_masks += pool.mask_bytes(&self.spec, record.filled);
            let full = uncompressed.map(|full| if full { record.full } else { 0 });
            total.full_precision += pool.full_bytes(&self.spec, full);
            total.allocated += 4 * self.shape.page_words();
        }
        for slot in self.slots.iter().flatten() {
            total.full_precision += pool.full_bytes(&self.spec, slot.held);
            let words = self.shape.slot_words(slot.capacity);
            total.allocated += 4 * (words.keys + words.values);
        }
        total
    }
}

/// Adds a run, in pieces that one cube copies.
pub(crate) fn push_run(runs: &mut Vec<Run>, from: usize, to: usize, words: usize) {
    for start in (0..words).step_by(crate::kernels::copy::RUN) {
        let length = (words - start).min(crate::kernels::copy::RUN);
        runs.push([from + start, to + start, length]);
    }
}
