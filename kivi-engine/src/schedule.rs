//! Who advances in a step, and who gives way.
//!
//! Branches are served in the order in which their requests came. The oldest that needs room takes it
//! from prefixes nobody uses, then from the youngest that runs; so the oldest always advances, and
//! every branch is the oldest at some time. Waiting ones begin in the same order, and only when nobody
//! had to give way.

use crate::{
    Admission, Engine, Error, Event, Preemption, Result,
    branch::{Branch, BranchId},
    prefix::PrefixKey,
    swap::Swapped,
};
use kivi_core::{DecoderBackend, SequenceId, StepRequest};
use std::{collections::HashSet, ops::Range, sync::Arc};

/// What one branch does in a step.
#[derive(Debug)]
pub(crate) struct Work {
    pub(crate) branch: BranchId,
    pub(crate) sequence: SequenceId,
    /// Its rows: known tokens that are not cached yet, then drafts.
    pub(crate) tokens: Vec<u32>,
    /// The rows whose logits are needed: that of the newest known token and those of the drafts.
    pub(crate) sampled: Range<usize>,
}

impl Work {
    /// Proposed tokens.
    pub(crate) fn drafts(&self) -> &[u32] {
        if self.sampled.is_empty() { &[] } else { &self.tokens[self.sampled.start + 1..] }
    }
}

/// A step being put together.
#[derive(Debug, Default)]
struct Batch {
    works: Vec<Work>,
    /// Bytes by which the cache grows during the step.
    growth: usize,
    /// Rows that pieces of prompts may still take.
    rows: usize,
    /// Whether somebody had to give way.
    preempted: bool,
}

impl Batch {
    /// Whether the step computes the last known token of a branch.
    fn completes(&self, id: BranchId) -> bool {
        self.works.iter().any(|work| work.branch == id && !work.sampled.is_empty())
    }
}

impl<B: DecoderBackend> Engine<B> {
    /// The next step.
    pub(crate) fn schedule(&mut self) -> Result<Vec<Work>> {
        let running: Vec<_> = self.running().collect();
        let decodes = |&&(id, sequence): &&(BranchId, SequenceId)| {
            self.branches.get(&id).is_some_and(|branch| self.missing(branch, sequence) == 1)
        };
        let decoding = running.iter().filter(decodes).count();
        // Prompts go on, however slowly.
        let rows = self.options.step_tokens.saturating_sub(decoding).max(1);
        let mut batch = Batch { rows, ..Batch::default() };
        for (id, _) in running {
            // Unless it had to give way to an older one.
            if let Some(work) = self.next_work(id, batch.rows)? {
                self.add(work, &mut batch)?;
            }
        }
        if !batch.preempted {
            self.admit(&mut batch)?;
        }
        let during = self.session.state().allocated_bytes() + batch.growth;
        self.stats.peak_bytes = self.stats.peak_bytes.max(during);
        Ok(batch.works)
    }

    /// Known tokens of a branch that its sequence does not hold.
    fn missing(&self, branch: &Branch, sequence: SequenceId) -> usize {
        let cached = self.session.state().tokens(sequence).unwrap_or_default();
        branch.tokens.len() - cached
    }

    /// What a running branch would do next with at most `rows` rows for a piece of its prompt.
    fn next_work(&self, id: BranchId, rows: usize) -> Result<Option<Work>> {
        let Some(branch) = self.branches.get(&id) else { return Ok(None) };
        let Some(sequence) = branch.sequence else { return Ok(None) };
        let missing = self.missing(branch, sequence);
        let cached = branch.tokens.len() - missing;
        let mut count = if missing == 1 { 1 } else { missing.min(rows) };
        if count == 0 {
            return Ok(None);
        }
        // Every row of a step is held in full precision until its end, so a piece of a prompt ends
        // where a segment does, and what is computed again after it comes in residual lengths.
        let piece = match branch.prompt_len().checked_sub(cached) {
            None | Some(0) => self.session.state().spec().config().residual_length(),
            Some(left) => left.min(self.segment_end(cached).saturating_sub(cached)),
        };
        count = count.min(piece);
        let mut tokens = branch.tokens[cached..cached + count].to_vec();
        let caught_up = cached + count == branch.tokens.len();
        if let Some(lookup) = &self.lookup
            && missing == 1
            && branch.answered() > 0
        {
            // The step yields one token more than was drafted.
            let context = self.options.context - branch.tokens.len();
            let limit = branch.left().min(context).saturating_sub(1).min(rows.saturating_sub(1));
            tokens.extend(lookup.draft(&branch.tokens, limit));
        }
        let sampled = if caught_up { count - 1..tokens.len() } else { 0..0 };
        Ok(Some(Work { branch: id, sequence, tokens, sampled }))
    }

    /// Where the segment of a prompt's token ends.
    fn segment_end(&self, token: usize) -> usize {
        let config = self.session.state().spec().config();
        let (sinks, segment) = (config.sink_length(), config.segment_tokens());
        match (segment, token.checked_sub(sinks)) {
            (Some(segment), Some(after)) => sinks + (after / segment + 1) * segment,
            // The sinks stay in full precision, so that what follows them may be in the same step.
            (Some(segment), None) => sinks + segment,
            (None, _) => usize::MAX,
        }
    }

    /// The first whole segment of a branch's prompt that ends after `cached` tokens, and its end.
    fn next_boundary<'b>(
        &self,
        branch: &'b Branch,
        cached: usize,
    ) -> Option<(&'b PrefixKey, usize)> {
        let depth = (0..branch.shared.keys.len()).find(|&depth| self.boundary(depth) > cached)?;
        Some((&branch.shared.keys[depth], self.boundary(depth)))
    }

    /// Where segment `depth` of a prompt ends.
    pub(crate) fn boundary(&self, depth: usize) -> usize {
        let config = self.session.state().spec().config();
        config.sink_length() + (depth + 1) * config.segment_tokens().unwrap_or_default()
    }

    /// Adds work to a step if there is, or can be made, room for it.
    fn add(&mut self, mut work: Work, batch: &mut Batch) -> Result<bool> {
        loop {
            let state = self.session.state();
            let request = StepRequest { sequence: work.sequence, tokens: work.tokens.len() };
            let growth = state.step_bytes(&request)?.growth();
            if state.allocated_bytes() + batch.growth + growth <= self.kv_memory {
                batch.growth += growth;
                // A row for a branch that decodes was set aside.
                let aside = usize::from(work.sampled.start == 0 && !work.sampled.is_empty());
                let extra = work.tokens.len() - aside;
                batch.rows = batch.rows.saturating_sub(extra);
                batch.works.push(work);
                return Ok(true);
            }
            if !work.drafts().is_empty() {
                work.tokens.truncate(work.sampled.start + 1);
                work.sampled.end = work.tokens.len();
            } else if !self.evict()? {
                let youngest = self.running().map(|(id, _)| id).last();
                match youngest.filter(|&id| id > work.branch) {
                    Some(id) => {
                        self.give_way(id)?;
                        batch.preempted = true;
                    }
                    None if work.tokens.len() > 1 => {
                        work.tokens.truncate(work.tokens.len() / 2);
                        work.sampled = 0..0;
                    }
                    // Older ones fill the pool: another time.
                    None if !batch.works.is_empty() => return Ok(false),
                    None if self.running().next().is_some_and(|(id, _)| id != work.branch) => {
                        return Ok(false);
                    }
                    None => {
                        self.fail_too_large(work.branch)?;
                        return Ok(false);
                    }
                }
            }
        }
    }

    fn fail_too_large(&mut self, id: BranchId) -> Result<()> {
        let tokens = self.branches.get(&id).map_or(0, |branch| branch.tokens.len());
        let (needed, budget) = (self.predict(tokens), self.kv_memory);
        self.fail(id.request, &Arc::new(Error::TooLarge { tokens, needed, budget }))
    }

    /// Gives up the prefix that was not used for longest.
    fn evict(&mut self) -> Result<bool> {
        let Some(sequence) = self.prefixes.evict() else { return Ok(false) };
        self.stats.evicted += 1;
        self.release(sequence)?;
        Ok(true)
    }

    /// Whether so many more bytes can be allocated, after prefixes were given up.
    pub(crate) fn find_room(&mut self, bytes: usize) -> Result<bool> {
        while self.session.state().allocated_bytes() + bytes > self.kv_memory {
            if !self.evict()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes the cache from a running branch.
    fn give_way(&mut self, id: BranchId) -> Result<()> {
        let Some(branch) = self.branches.get_mut(&id) else { return Ok(()) };
        let Some(sequence) = branch.sequence.take() else { return Ok(()) };
        let swapped = match self.options.preemption {
            Preemption::Swap => self.swap_out(id, sequence)?,
            Preemption::Recompute => None,
        };
        match swapped.is_some() {
            true => self.stats.swapped_out += 1,
            false => self.stats.forgotten += 1,
        }
        if let Some(branch) = self.branches.get_mut(&id) {
            branch.swapped = swapped;
            branch.gave_way = true;
        }
        self.release(sequence)
    }

    /// Copies a sequence to host memory if it can be and there is room.
    fn swap_out(&mut self, id: BranchId, sequence: SequenceId) -> Result<Option<Swapped>> {
        let Some(branch) = self.branches.get(&id) else { return Ok(None) };
        let state = self.session.state();
        let mut tokens = state.tokens(sequence)?;
        if tokens < branch.prompt_len() {
            // An open segment goes back to its start, which is exact.
            let config = state.spec().config();
            let (sinks, segment) = (config.sink_length(), config.segment_tokens());
            let Some(segment) = segment.filter(|&segment| tokens >= sinks + segment) else {
                return Ok(None);
            };
            tokens = sinks + (tokens - sinks) / segment * segment;
            self.session.state_mut().truncate(sequence, tokens)?;
        }
        let held = self.branches.values().filter_map(|branch| branch.swapped.as_ref());
        let held: usize = held.map(Swapped::bytes).sum();
        let Some(branch) = self.branches.get(&id) else { return Ok(None) };
        let swapped = Swapped::out(&self.session, sequence, &branch.tokens[..tokens]);
        let swapped = swapped.unwrap_or_else(|error| {
            tracing::warn!("cannot swap a sequence out, so it will be computed again: {error}");
            None
        });
        Ok(swapped.filter(|swapped| held + swapped.bytes() <= self.options.swap_memory))
    }

    /// Begins waiting branches while there is room for them.
    fn admit(&mut self, batch: &mut Batch) -> Result<()> {
        let mut computing = self.being_computed();
        let waiting = self.branches.iter().filter(|(_, branch)| branch.sequence.is_none());
        let waiting: Vec<_> = waiting.map(|(&id, _)| id).collect();
        let mut running = self.running().count();
        for id in waiting {
            if batch.rows == 0 || running >= self.options.max_running {
                break;
            }
            let Some(branch) = self.branches.get(&id) else { continue };
            if branch.swapped.is_none() {
                let keys = &branch.shared.keys;
                let found = self.prefixes.longest(keys).map_or(0, |(segments, _)| segments);
                // What an older one is computing will be there to share.
                if keys.get(found).is_some_and(|key| computing.contains(key)) {
                    continue;
                }
            }
            match self.begin(id, batch) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.fail(id.request, &Arc::new(error))?;
                    continue;
                }
            }
            running += 1;
            if let Some(work) = self.next_work(id, batch.rows)?
                && !self.add_young(work, batch)?
            {
                break;
            }
            computing = self.being_computed();
        }
        Ok(())
    }

    /// As [`Engine::add`], for a branch that only takes what is free.
    fn add_young(&mut self, work: Work, batch: &mut Batch) -> Result<bool> {
        if batch.works.is_empty() {
            return self.add(work, batch);
        }
        let state = self.session.state();
        let request = StepRequest { sequence: work.sequence, tokens: work.tokens.len() };
        let needed = batch.growth + state.step_bytes(&request)?.growth();
        if !self.find_room(needed)? {
            return Ok(false);
        }
        self.add(work, batch)
    }

    /// The segments that running branches are computing.
    fn being_computed(&self) -> HashSet<PrefixKey> {
        let next = |(id, sequence)| {
            let branch = self.branches.get(&id)?;
            let cached = branch.tokens.len() - self.missing(branch, sequence);
            self.next_boundary(branch, cached).map(|(key, _)| *key)
        };
        self.running().filter_map(next).collect()
    }

    /// Bytes that running branches are going to take beyond what is allocated, as far as
    /// [`Admission`] looks ahead, and one page for each.
    fn promised(&self, batch: &Batch) -> usize {
        let state = self.session.state();
        let spec = state.spec();
        let page: usize = (0..spec.group_count()).map(|group| spec.page_bytes(group)).sum();
        let of = |(id, sequence): (BranchId, SequenceId)| {
            let Some(branch) = self.branches.get(&id) else { return 0 };
            let missing = self.missing(branch, sequence);
            let cached = branch.tokens.len() - missing;
            let held = state.sequence_bytes(sequence).unwrap_or_default();
            match self.options.admission {
                Admission::Prompt if missing == 1 => page,
                Admission::Prompt => page + self.predict(branch.tokens.len()).saturating_sub(held),
                Admission::WholeAnswer => {
                    let whole = self.predict(self.longest(&branch.shared.request));
                    // A prompt may take more while it is computed than the answer at its end. Where
                    // this step completes it, the step counts that.
                    let prompt = branch.prompt_len();
                    let peak = match cached < prompt && !batch.completes(id) {
                        true => whole.max(self.prefill_bytes(prompt)),
                        false => whole,
                    };
                    // Samples that have not branched out yet.
                    let samples =
                        if branch.answered() == 0 { branch.shared.request.samples - 1 } else { 0 };
                    peak.saturating_sub(held) + samples * whole
                }
            }
        };
        self.running().map(of).sum()
    }

    /// Gives a waiting branch a sequence if the pool has room for what [`Admission`] asks for: its own
    /// from host memory, a shared prefix, or an empty one.
    fn begin(&mut self, id: BranchId, batch: &mut Batch) -> Result<bool> {
        let alone = self.running().next().is_none();
        let promised = self.promised(batch).max(batch.growth);
        loop {
            let Some(branch) = self.branches.get(&id) else { return Ok(false) };
            let shared = Arc::clone(&branch.shared);
            let found = match branch.swapped {
                None => self.prefixes.longest(&shared.keys),
                Some(_) => None,
            };
            let needed = self.needed(id, branch, found.map(|(segments, _)| segments), batch);
            let allocated = self.session.state().allocated_bytes();
            if let Some((segments, _)) = found {
                self.prefixes.touch(&shared.keys, segments);
            }
            if allocated + promised + needed <= self.kv_memory {
                return self.materialize(id, found).map(|()| true);
            }
            if !self.evict()? {
                if alone && batch.works.is_empty() && promised == 0 {
                    // `WholeAnswer` may promise more than is ever used at once.
                    return self.materialize(id, None).map(|()| true);
                }
                return Ok(false);
            }
        }
    }

    /// Bytes that a waiting branch must find room for, whose first `shared` segments are kept.
    fn needed(&self, id: BranchId, branch: &Branch, shared: Option<usize>, batch: &Batch) -> usize {
        let request = &branch.shared.request;
        let longest = self.longest(request);
        let state = self.session.state();
        match self.options.admission {
            Admission::Prompt => {
                // Whoever gave way once comes back when its whole answer fits, lest it go to and fro
                // for every page.
                let tokens = if branch.gave_way { longest } else { branch.tokens.len() };
                let all = self.predict(tokens);
                // Without the shared pages; those that are written to are copied, which is a few.
                let held = shared.map_or(0, |segments| self.boundary(segments - 1));
                all - (self.predict(held) - state.spec().slot_bytes(self.full_room())).min(all)
            }
            Admission::WholeAnswer => {
                let answers = self.predict(longest) * (request.samples - id.sample);
                let prompt = self.prefill_bytes(request.prompt.len());
                let one_step = self.segment_end(0).min(batch.rows) >= branch.tokens.len();
                let during = state.allocated_bytes() + batch.growth + prompt;
                // What a prompt takes that is computed in this step is gone before the others grow.
                if one_step && during <= self.kv_memory { answers } else { answers.max(prompt) }
            }
        }
    }

    fn materialize(&mut self, id: BranchId, found: Option<(usize, SequenceId)>) -> Result<()> {
        let Some(branch) = self.branches.get_mut(&id) else { return Ok(()) };
        let (prompt, mut reused) = (branch.prompt_len(), 0);
        let swapped = branch.swapped.take();
        let sequence = match (&swapped, found) {
            (Some(swapped), _) => swapped.back(&mut self.session)?,
            (None, Some((segments, sequence))) => {
                reused = self.boundary(segments - 1);
                let fork = self.session.fork(sequence)?;
                // It ends here: what comes is the rest of another prompt.
                self.session.state_mut().truncate(fork, reused)?;
                fork
            }
            (None, None) => self.session.create_sequence()?,
        };
        let cached = self.session.state().tokens(sequence)?;
        if cached < prompt {
            self.session.state_mut().begin_prompt(sequence, prompt - cached)?;
        }
        self.stats.reused_tokens += reused as u64;
        if let Some(branch) = self.branches.get_mut(&id) {
            branch.sequence = Some(sequence);
            if !std::mem::replace(&mut branch.started, true) {
                branch.tell(Event::Started { reused });
            }
        }
        Ok(())
    }

    /// Keeps the prefix that a piece of a prompt has completed, if there is room.
    pub(crate) fn keep_prefix(&mut self, work: &Work) -> Result<()> {
        let Some(branch) = self.branches.get(&work.branch) else { return Ok(()) };
        let cached = self.session.state().tokens(work.sequence)?;
        let shared = Arc::clone(&branch.shared);
        let depth = (0..shared.keys.len()).find(|&depth| self.boundary(depth) == cached);
        let Some(depth) = depth.filter(|&depth| !self.prefixes.contains(&shared.keys[depth]))
        else {
            return Ok(());
        };
        self.prefixes.touch(&shared.keys, depth);
        if self.find_room(self.compact_bytes(cached))?
            && let Err(error) = self.insert_prefix(shared.keys[depth], depth, work.sequence)
        {
            tracing::warn!("cannot keep a prefix of {cached} tokens: {error}");
        }
        Ok(())
    }

    /// Bytes of the slot of a kept prefix.
    pub(crate) fn compact_bytes(&self, tokens: usize) -> usize {
        let state = self.session.state();
        let kept = state.policy().kept(tokens).map(|kept| tokens.saturating_sub(kept));
        state.spec().slot_bytes(state.spec().whole_groups(kept))
    }

    /// Keeps a compact fork of a sequence as the prefix of a key.
    pub(crate) fn insert_prefix(
        &mut self,
        key: PrefixKey,
        depth: usize,
        sequence: SequenceId,
    ) -> Result<()> {
        let kept = self.session.fork_compact(sequence)?;
        self.prefixes.insert(key, depth, kept);
        let allocated = self.session.state().allocated_bytes();
        self.stats.peak_bytes = self.stats.peak_bytes.max(allocated);
        Ok(())
    }
}
