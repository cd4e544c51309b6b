//! The cache state machine: pure bookkeeping, no device.

mod sequence;

use crate::{
    CachePolicy, Error, KeyValue, KiviPolicy, PageCopy, PageId, PageRef, PoolSpec, Result,
    SequenceLayout, SequencePlan, StepPlan, pages::PageAllocator,
};
use sequence::{Advance, Sequence, check_policy};
use std::sync::Arc;

/// Names one sequence of a pool. An id is never valid again after its sequence was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId {
    slot: u32,
    generation: u32,
}

impl SequenceId {
    /// Number of the sequence's residual slot.
    pub fn slot(self) -> usize {
        self.slot as usize
    }
}

/// "This sequence advances by so many tokens."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepRequest {
    /// The sequence.
    pub sequence: SequenceId,
    /// How many tokens; at least one.
    pub tokens: usize,
}

/// Bytes that a step takes for one of its sequences, all layers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepBytes {
    /// Of pages that are allocated or copied for it.
    pub pages: usize,
    /// Of its residual slot before the step.
    pub slot_before: usize,
    /// Of the slot while the step runs, at least as much.
    pub slot_during: usize,
    /// Of the slot after the step.
    pub slot_after: usize,
}

impl StepBytes {
    /// By how much the allocated bytes grow while the step runs.
    pub fn growth(&self) -> usize {
        self.pages + self.slot_during - self.slot_before
    }
}

/// Positions, boundaries, pages and reference counts of every sequence in a pool.
///
/// What a query reads of a token depends only on their positions, on where prompts begin and end
/// and on the configuration, never on how the work was cut into steps:
///
/// - a generated token at position `t` sees the state with `t` tokens, and itself;
/// - a prompt token sees the state at the start of its segment, and its segment in full precision.
///
/// ```
/// use kivi_core::*;
/// let config = CacheConfig::builder().build()?;
/// let layer = LayerSpec::new(&config, 8, 128);
/// let mut state = CacheState::new(PoolSpec::for_context(config, vec![layer; 32], 1, 4096)?);
/// let sequence = state.create_sequence()?;
/// state.begin_prompt(sequence, 300)?;
/// let mut plan = StepPlan::default();
/// state.plan(&[StepRequest { sequence, tokens: 300 }], &mut plan)?;
/// // 300 = 2 · 128 + 44: two key blocks are quantized, and all but the newest 128 values.
/// assert_eq!(plan.sequences[0].quantize, KeyValue::new(0..256, 0..172));
/// # Ok::<(), Error>(())
/// ```
#[derive(Debug)]
pub struct CacheState {
    spec: PoolSpec,
    policy: Arc<dyn CachePolicy>,
    allocators: Vec<PageAllocator>,
    slots: Vec<Option<Sequence>>,
    generations: Vec<u32>,
    freed: Vec<PageRef>,
    freed_slots: Vec<usize>,
}

impl CacheState {
    /// An empty pool under the paper's policy.
    pub fn new(spec: PoolSpec) -> Self {
        let policy = Arc::new(KiviPolicy::new(spec.config()));
        Self::with_policy(spec, policy)
    }

    /// An empty pool under another policy.
    pub fn with_policy(spec: PoolSpec, policy: Arc<dyn CachePolicy>) -> Self {
        let new_allocator = |_| PageAllocator::new(spec.max_pages());
        let allocators = (0..spec.group_count()).map(new_allocator).collect();
        let (slots, generations) = (Vec::new(), Vec::new());
        let (freed, freed_slots) = (Vec::new(), Vec::new());
        Self { spec, policy, allocators, slots, generations, freed, freed_slots }
    }

    /// The shape of the pool.
    pub fn spec(&self) -> &PoolSpec {
        &self.spec
    }

    /// The policy in force.
    pub fn policy(&self) -> &Arc<dyn CachePolicy> {
        &self.policy
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] when every slot is taken.
    pub fn create_sequence(&mut self) -> Result<SequenceId> {
        let sequence = Sequence::empty(&self.spec, self.policy.as_ref());
        self.insert(sequence)
    }

    /// Declares the next `tokens` tokens of a sequence to be prompt. Everything else is generated.
    ///
    /// # Errors
    /// When the sequence is unknown, `tokens` is 0 or more than the pool has room for, or an earlier
    /// prompt is not finished.
    pub fn begin_prompt(&mut self, id: SequenceId, tokens: usize) -> Result<()> {
        let residual = self.policy.residual_capacity();
        let paged = self.spec.max_pages() * self.spec.config().page_tokens();
        let longest = self.spec.page_start(0) + paged + residual.keys.max(residual.values);
        let sequence = self.get_mut("begin prompt", id)?;
        if tokens == 0 {
            return Err(Error::request("begin prompt", "the prompt is empty"));
        }
        if sequence.tokens < sequence.prompt.end {
            let missing = sequence.prompt.end - sequence.tokens;
            let reason = format!("{missing} tokens of the current prompt are still to come");
            return Err(Error::request("begin prompt", reason));
        }
        if tokens > longest {
            let reason = format!("{tokens} tokens, and the whole pool has room for {longest}");
            return Err(Error::request("begin prompt", reason));
        }
        sequence.prompt = sequence.tokens..sequence.tokens + tokens;
        Ok(())
    }

    /// Sequences that were created and not removed.
    pub fn sequence_count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Tokens of a sequence.
    ///
    /// # Errors
    /// When the sequence is unknown.
    pub fn tokens(&self, id: SequenceId) -> Result<usize> {
        Ok(self.get("tokens", id)?.tokens)
    }

    /// Where a sequence lives.
    ///
    /// # Errors
    /// When the sequence is unknown.
    pub fn layout(&self, id: SequenceId) -> Result<SequenceLayout> {
        Ok(self.get("layout", id)?.layout(id.slot()))
    }

    /// Pages of a layer group that nobody uses.
    pub fn free_pages(&self, group: usize) -> usize {
        self.allocators[group].free_count()
    }

    /// Pages of a layer group in use, each counted once however many sequences share it.
    pub fn used_pages(&self, group: usize) -> usize {
        self.allocators[group].used_count()
    }

    /// Bytes the backend has allocated between two steps once it has executed everything planned so
    /// far and forgotten what was freed: pages, each counted once, and the slots of all sequences.
    pub fn allocated_bytes(&self) -> usize {
        let pages = |group| self.used_pages(group) * self.spec.page_bytes(group);
        let slots = self.slots.iter().flatten().map(|sequence| sequence.slot_bytes(&self.spec));
        (0..self.spec.group_count()).map(pages).sum::<usize>() + slots.sum::<usize>()
    }

    /// Bytes allocated for one sequence: its pages, shared ones included, and its slot, which it has
    /// from its first step on.
    ///
    /// # Errors
    /// When the sequence is unknown.
    pub fn sequence_bytes(&self, id: SequenceId) -> Result<usize> {
        let sequence = self.get("sequence bytes", id)?;
        let pages = sequence.page_refs().into_iter().map(|page| self.spec.page_bytes(page.group));
        Ok(pages.sum::<usize>() + sequence.slot_bytes(&self.spec))
    }

    /// What a step takes for one of its sequences. Those of a batch add up; a page that several of
    /// them would copy is counted for each, although the last of its users keeps it.
    ///
    /// # Errors
    /// When the sequence is unknown, the request is for 0 tokens or the policy breaks its contract.
    pub fn step_bytes(&self, request: &StepRequest) -> Result<StepBytes> {
        let sequence = self.get("step bytes", request.sequence)?;
        let advance = sequence.advance(&self.spec, self.policy.as_ref(), request.tokens)?;
        let pages = |group: usize| {
            let table = &sequence.tables[group];
            let new = advance.table_lengths[group].saturating_sub(table.len());
            let copied = self.shared_writes(table, &advance.writes[group]).count();
            (new + copied) * self.spec.page_bytes(group)
        };
        Ok(StepBytes {
            pages: (0..self.spec.group_count()).map(pages).sum(),
            slot_before: sequence.slot_bytes(&self.spec),
            slot_during: self.spec.slot_bytes(advance.capacity_during),
            slot_after: self.spec.slot_bytes(advance.capacity_after),
        })
    }

    /// Advances sequences by one step and writes what the backend has to do into `plan`, whose
    /// buffers are reused.
    ///
    /// The state is that after the step as soon as this returns; a caller whose backend then fails
    /// must remove the sequences of the plan.
    ///
    /// # Errors
    /// When a sequence is unknown or named twice, a request is for 0 tokens, the policy breaks its
    /// contract, or ([`Error::PoolExhausted`]) there are too few pages. Nothing is changed then.
    pub fn plan(&mut self, requests: &[StepRequest], plan: &mut StepPlan) -> Result<()> {
        let mut advances = Vec::with_capacity(requests.len());
        for (i, request) in requests.iter().enumerate() {
            if requests[..i].iter().any(|other| other.sequence == request.sequence) {
                return Err(Error::request("plan", "a sequence appears twice in one step"));
            }
            let sequence = self.get("plan", request.sequence)?;
            advances.push(sequence.advance(&self.spec, self.policy.as_ref(), request.tokens)?);
        }
        // No query can tell a page it no longer sees from one that is gone.
        for request in requests {
            self.drop_unneeded_pages(request.sequence)?;
        }
        self.check_pages(requests, &advances)?;

        plan.rows = 0;
        plan.copies.clear();
        plan.sequences.clear();
        plan.freed.clear();
        plan.freed.append(&mut self.freed);
        plan.freed_slots.clear();
        plan.freed_slots.append(&mut self.freed_slots);
        for (request, advance) in requests.iter().zip(advances) {
            let rows = plan.rows..plan.rows + request.tokens;
            plan.rows = rows.end;
            let sequence = self.commit(request.sequence, rows, advance, &mut plan.copies)?;
            plan.sequences.push(sequence);
        }
        Ok(())
    }

    /// Takes the newest tokens back, so that `tokens` remain, as if the others had never been.
    ///
    /// # Errors
    /// When the sequence is unknown or shorter, or when full-precision copies needed for an exact
    /// result are gone: up to `rollback_length` tokens can always be taken back.
    pub fn truncate(&mut self, id: SequenceId, tokens: usize) -> Result<()> {
        check_policy(&self.spec, self.policy.as_ref(), tokens)?;
        let packed = self.policy.packed(tokens);
        let packs = KeyValue::new(
            self.spec.layers().iter().any(|layer| layer.packs().keys),
            self.spec.layers().iter().any(|layer| layer.packs().values),
        );
        let rollback = self.spec.config().rollback_length();
        let sequence = self.get("truncate", id)?;
        let now = sequence.tokens;
        if tokens > now {
            return Err(Error::request("truncate", format!("{tokens} tokens of {now}")));
        }
        let lost = |kept: usize, packed: usize, packs: bool| packs && kept > packed;
        // Tokens of an open segment were never quantized, so any of them can be taken back.
        if lost(sequence.kept.keys, packed.keys, packs.keys)
            || lost(sequence.kept.values, packed.values, packs.values)
        {
            let reason = format!(
                "cannot go back from {now} to {tokens} tokens exactly; rollback length is {rollback}"
            );
            return Err(Error::request("truncate", reason));
        }
        if tokens + rollback < sequence.dropped_at {
            let reason = format!(
                "pages that {tokens} tokens would need were given up at {}; rollback length is \
                 {rollback}",
                sequence.dropped_at
            );
            return Err(Error::request("truncate", reason));
        }
        let mut excess = Vec::new();
        let sequence = self.get_mut("truncate", id)?;
        sequence.tokens = tokens;
        sequence.prompt.end = sequence.prompt.end.min(tokens);
        sequence.prompt.start = sequence.prompt.start.min(tokens);
        sequence.packed = sequence.packed.zip(packed).map(|(now, then)| now.min(then));
        // Only matters where nothing is quantized, and nothing is copied then.
        sequence.kept = sequence.kept.zip(packed).map(|(now, then)| now.min(then));
        let ends = sequence.packed;
        for group in 0..self.spec.group_count() {
            let needed = Sequence::pages_needed(&self.spec, group, tokens, ends);
            let table = &mut self.get_mut("truncate", id)?.tables[group];
            let keep = needed.min(table.len());
            excess.extend(table.drain(keep..).map(|page| PageRef { group, page }));
        }
        self.release(excess);
        Ok(())
    }

    /// A second sequence with the same tokens. Pages are shared until one of the two writes to
    /// them; the backend must copy the residual slot of `id` to the
    /// [layout](CacheState::layout) of the new sequence
    /// ([`copy_slot`](crate::CacheBackend::copy_slot)) before the next step.
    ///
    /// # Errors
    /// When the sequence is unknown or every slot is taken.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let sequence = self.get("fork", id)?.clone();
        let shared = sequence.page_refs();
        let new = self.insert(sequence)?;
        for PageRef { group, page } in shared {
            self.allocators[group].share(page);
        }
        Ok(new)
    }

    /// A [`fork`](CacheState::fork) whose slot has room for nothing but what it holds: a sequence to
    /// keep and to fork from. It can advance like any other, with the full room then.
    ///
    /// # Errors
    /// As [`CacheState::fork`].
    pub fn fork_compact(&mut self, id: SequenceId) -> Result<SequenceId> {
        let new = self.fork(id)?;
        let held = |tokens: usize| move |kept: usize| tokens.saturating_sub(kept);
        let sequence = self.get_mut("fork", new)?;
        let needed = sequence.kept.map(held(sequence.tokens));
        let capacity = self.spec.whole_groups(needed);
        self.get_mut("fork", new)?.capacity = capacity;
        Ok(new)
    }

    /// A sequence with `tokens` tokens whose contents the caller imports
    /// ([`import`](crate::CacheBackend::import)): those of a sequence with no open segment that has
    /// not been truncated within its last `rollback_length` tokens.
    ///
    /// # Errors
    /// [`Error::PoolExhausted`] when there is no slot or there are too few pages.
    pub fn adopt_sequence(&mut self, tokens: usize) -> Result<SequenceId> {
        check_policy(&self.spec, self.policy.as_ref(), tokens)?;
        let mut sequence = Sequence::empty(&self.spec, self.policy.as_ref());
        sequence.tokens = tokens;
        sequence.packed = self.policy.packed(tokens);
        sequence.kept = self.policy.kept(tokens);
        sequence.has_slot = true;
        for group in 0..self.spec.group_count() {
            let needed = Sequence::pages_needed(&self.spec, group, tokens, sequence.packed);
            self.expect_pages(group, needed)?;
        }
        let (packed, id) = (sequence.packed, self.insert(sequence)?);
        for group in 0..self.spec.group_count() {
            let needed = Sequence::pages_needed(&self.spec, group, tokens, packed);
            self.grow_table(id, group, needed)?;
        }
        // Pages that are used again must not be cleared under their new owner.
        let tables = self.get("adopt", id)?.tables.clone();
        self.freed.retain(|freed| !tables[freed.group].contains(&freed.page));
        self.drop_unneeded_pages(id)?;
        Ok(id)
    }

    /// Removes a sequence.
    ///
    /// # Errors
    /// When the sequence is unknown.
    pub fn remove(&mut self, id: SequenceId) -> Result<()> {
        let pages = self.get("remove", id)?.page_refs();
        self.release(pages);
        self.slots[id.slot()] = None;
        self.generations[id.slot()] += 1;
        self.freed_slots.push(id.slot());
        Ok(())
    }

    fn get(&self, operation: &'static str, id: SequenceId) -> Result<&Sequence> {
        let current = self.generations.get(id.slot()) == Some(&id.generation);
        let sequence = self.slots.get(id.slot()).filter(|_| current).and_then(Option::as_ref);
        sequence.ok_or_else(|| Error::request(operation, "no such sequence"))
    }

    fn get_mut(&mut self, operation: &'static str, id: SequenceId) -> Result<&mut Sequence> {
        self.get(operation, id)?;
        let sequence = self.slots[id.slot()].as_mut();
        sequence.ok_or_else(|| Error::request(operation, "no such sequence"))
    }

    fn insert(&mut self, sequence: Sequence) -> Result<SequenceId> {
        let slot = match self.slots.iter().position(Option::is_none) {
            Some(slot) => slot,
            None if self.slots.len() < self.spec.max_sequences() => {
                self.slots.push(None);
                self.generations.push(0);
                self.slots.len() - 1
            }
            None => {
                let total = self.spec.max_sequences();
                return Err(Error::PoolExhausted {
                    what: "sequence slots",
                    needed: 1,
                    free: 0,
                    total,
                });
            }
        };
        // A slot that is filled again before the next step must not be cleared under its new owner.
        if sequence.has_slot {
            self.freed_slots.retain(|&freed| freed != slot);
        }
        self.slots[slot] = Some(sequence);
        Ok(SequenceId { slot: slot as u32, generation: self.generations[slot] })
    }

    fn expect_pages(&self, group: usize, needed: usize) -> Result<()> {
        let free = self.free_pages(group);
        if needed > free {
            let total = self.spec.max_pages();
            return Err(Error::PoolExhausted { what: "pages", needed, free, total });
        }
        Ok(())
    }

    /// Whether there are pages for every table's growth and for every shared page written to.
    fn check_pages(&self, requests: &[StepRequest], advances: &[Advance]) -> Result<()> {
        for group in 0..self.spec.group_count() {
            let mut needed = 0;
            for (request, advance) in requests.iter().zip(advances) {
                let table = &self.get("plan", request.sequence)?.tables[group];
                needed += advance.table_lengths[group].saturating_sub(table.len());
                needed += self.shared_writes(table, &advance.writes[group]).count();
            }
            self.expect_pages(group, needed)?;
        }
        Ok(())
    }

    /// Indices of the pages of `table` that would be written although they are shared.
    fn shared_writes<'a>(
        &'a self,
        table: &'a [PageId],
        writes: &'a sequence::Writes,
    ) -> impl Iterator<Item = usize> + 'a {
        let group = writes.group;
        let existing = (0..table.len()).filter(|&index| writes.touches(index));
        existing.filter(move |&index| {
            table[index] != PageId::DROPPED && self.allocators[group].is_shared(table[index])
        })
    }

    fn commit(
        &mut self,
        id: SequenceId,
        rows: std::ops::Range<usize>,
        advance: Advance,
        copies: &mut Vec<PageCopy>,
    ) -> Result<SequencePlan> {
        for group in 0..self.spec.group_count() {
            let table = &self.get("plan", id)?.tables[group];
            let shared: Vec<_> = self.shared_writes(table, &advance.writes[group]).collect();
            for index in shared {
                copies.push(self.unshare(id, group, index)?);
            }
            self.grow_table(id, group, advance.table_lengths[group])?;
        }
        let sequence = self.get_mut("plan", id)?;
        let mut before = sequence.layout(id.slot());
        before.capacity = advance.capacity_during;
        let quantize = sequence.packed.zip(advance.packed).map(|(from, to)| from..to);
        sequence.tokens += rows.len();
        sequence.packed = advance.packed;
        sequence.kept = advance.kept;
        sequence.capacity = advance.capacity_after;
        sequence.has_slot = true;
        let (kept, capacity, views) = (advance.kept, advance.capacity_after, advance.views);
        Ok(SequencePlan { sequence: id, rows, before, views, quantize, kept, capacity })
    }

    /// Gives the sequence a page of its own in place of a shared one.
    fn unshare(&mut self, id: SequenceId, group: usize, index: usize) -> Result<PageCopy> {
        let to = self.allocate(group)?;
        let page = &mut self.get_mut("plan", id)?.tables[group][index];
        let from = std::mem::replace(page, to);
        self.allocators[group].release(from);
        Ok(PageCopy { group, from, to })
    }

    fn grow_table(&mut self, id: SequenceId, group: usize, length: usize) -> Result<()> {
        while self.get("plan", id)?.tables[group].len() < length {
            let page = self.allocate(group)?;
            self.get_mut("plan", id)?.tables[group].push(page);
        }
        Ok(())
    }

    fn allocate(&mut self, group: usize) -> Result<PageId> {
        let total = self.spec.max_pages();
        let page = self.allocators[group].allocate();
        page.ok_or(Error::PoolExhausted { what: "pages", needed: 1, free: 0, total })
    }

    /// Gives up the pages the policy no longer needs.
    fn drop_unneeded_pages(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self.get("plan", id)?;
        let page_tokens = self.spec.config().page_tokens();
        let unneeded = |group: usize, index: usize| {
            let start = self.spec.page_start(index);
            let positions = start..start + page_tokens;
            let layer = self.spec.group_layer(group);
            positions.end <= sequence.tokens
                && !self.policy.needs_page(layer, positions, sequence.tokens)
        };
        let mut dropped = Vec::new();
        for (group, table) in sequence.tables.iter().enumerate() {
            let live = (0..table.len()).filter(|&index| table[index] != PageId::DROPPED);
            dropped
                .extend(live.filter(|&index| unneeded(group, index)).map(|index| (group, index)));
        }
        for (group, index) in dropped {
            let sequence = self.get_mut("plan", id)?;
            sequence.dropped_at = sequence.tokens;
            let page = std::mem::replace(&mut sequence.tables[group][index], PageId::DROPPED);
            self.release(vec![PageRef { group, page }]);
        }
        Ok(())
    }

    fn release(&mut self, pages: Vec<PageRef>) {
        for PageRef { group, page } in pages {
            if page != PageId::DROPPED && self.allocators[group].release(page) {
                self.freed.push(PageRef { group, page });
            }
        }
    }
}
