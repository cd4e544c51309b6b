//! One sequence: its positions and boundaries, and what a step does to them.

use crate::{CachePolicy, Error, KeyValue, PageId, PageRef, PoolSpec, Result, SequenceLayout};
use std::ops::Range;

#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub(super) tokens: usize,
    /// The current or the latest run of prompt tokens.
    pub(super) prompt: Range<usize>,
    /// First position that is not quantized.
    pub(super) packed: KeyValue<usize>,
    /// First position with a full-precision copy.
    pub(super) kept: KeyValue<usize>,
    /// Full-precision tokens the residual has room for.
    pub(super) capacity: KeyValue<usize>,
    /// Whether the backend has memory for the slot.
    pub(super) has_slot: bool,
    /// One page table per layer group.
    pub(super) tables: Vec<Vec<PageId>>,
    /// Tokens when a page was last given up.
    pub(super) dropped_at: usize,
}

/// What a step does to a sequence; computed before anything is changed.
#[derive(Debug)]
pub(super) struct Advance {
    pub(super) views: Vec<KeyValue<usize>>,
    pub(super) packed: KeyValue<usize>,
    pub(super) kept: KeyValue<usize>,
    pub(super) capacity_during: KeyValue<usize>,
    pub(super) capacity_after: KeyValue<usize>,
    /// Per layer group, the length of the page table after the step.
    pub(super) table_lengths: Vec<usize>,
    /// Per layer group, the pages that are written to.
    pub(super) writes: Vec<Writes>,
}

/// Indices of the pages that one step writes to: those of the keys and those of the values.
#[derive(Debug)]
pub(super) struct Writes {
    pub(super) group: usize,
    pages: KeyValue<Range<usize>>,
}

impl Writes {
    pub(super) fn touches(&self, index: usize) -> bool {
        self.pages.keys.contains(&index) || self.pages.values.contains(&index)
    }
}

impl Sequence {
    pub(super) fn empty(spec: &PoolSpec, policy: &dyn CachePolicy) -> Self {
        Self {
            tokens: 0,
            prompt: 0..0,
            packed: policy.packed(0),
            kept: policy.kept(0),
            capacity: spec.whole_groups(policy.residual_capacity()),
            has_slot: false,
            tables: vec![Vec::new(); spec.group_count()],
            dropped_at: 0,
        }
    }

    pub(super) fn layout(&self, slot: usize) -> SequenceLayout {
        SequenceLayout {
            slot,
            tokens: self.tokens,
            packed: self.packed,
            kept: self.kept,
            capacity: self.capacity,
            tables: self.tables.clone(),
        }
    }

    /// Bytes of the slot as it is.
    pub(super) fn slot_bytes(&self, spec: &PoolSpec) -> usize {
        if self.has_slot { spec.slot_bytes(self.capacity) } else { 0 }
    }

    pub(super) fn page_refs(&self) -> Vec<PageRef> {
        let tables = self.tables.iter().enumerate();
        let pages = tables
            .flat_map(|(group, table)| table.iter().map(move |&page| PageRef { group, page }));
        pages.filter(|page| page.page != PageId::DROPPED).collect()
    }

    /// Pages a group's table needs: up to the newest token if keys or values are stored there in
    /// full precision, otherwise up to the newest code.
    pub(super) fn pages_needed(
        spec: &PoolSpec,
        group: usize,
        tokens: usize,
        packed: KeyValue<usize>,
    ) -> usize {
        let format = spec.group_layer(group).format;
        let end = |bits: Option<crate::Bits>, packed| if bits.is_some() { packed } else { tokens };
        let ends = (end(format.keys.bits, packed.keys), end(format.values.bits, packed.values));
        spec.pages_until(ends.0.max(ends.1))
    }

    /// The segment of a prompt token, or `None` for a generated one.
    ///
    /// Segments start where the prompt starts and at `S + i·C`.
    fn segment(&self, spec: &PoolSpec, position: usize) -> Option<Range<usize>> {
        if !self.prompt.contains(&position) {
            return None;
        }
        let Some(c) = spec.config().segment_tokens() else {
            return Some(self.prompt.clone());
        };
        let sinks = spec.config().sink_length();
        let (start, end) = match position.checked_sub(sinks) {
            Some(after) => (sinks + after / c * c, sinks + (after / c + 1) * c),
            None => (0, sinks),
        };
        Some(start.max(self.prompt.start)..end.min(self.prompt.end))
    }

    /// What advancing by `count` tokens does.
    pub(super) fn advance(
        &self,
        spec: &PoolSpec,
        policy: &dyn CachePolicy,
        count: usize,
    ) -> Result<Advance> {
        if count == 0 {
            return Err(Error::request("plan", "a sequence advances by 0 tokens"));
        }
        let sinks = spec.config().sink_length();
        let after = self.tokens.checked_add(count).filter(|&n| n < u32::MAX as usize);
        let after = after.ok_or_else(|| Error::request("plan", "too many tokens"))?;

        let seen = |position| self.segment(spec, position).map_or(position, |range| range.start);
        let views = (self.tokens..after).map(|position| policy.packed(seen(position))).collect();

        // An unfinished segment keeps the state of its start, and all of itself.
        let open = self.segment(spec, after - 1).filter(|segment| segment.end > after);
        let state = open.as_ref().map_or(after, |segment| segment.start);
        let packed = policy.packed(state);
        check_policy(spec, policy, state)?;
        if packed.keys < self.packed.keys || packed.values < self.packed.values {
            return Err(broken_policy(state, packed, self.packed));
        }
        // A truncation may have left fewer copies than the policy would keep.
        let kept = policy.kept(state).zip(self.kept).map(|(policy, held)| policy.max(held));

        let room = |end: usize, first: usize| end.saturating_sub(first);
        let end = open.as_ref().map_or(after, |segment| segment.end);
        let needed = kept.map(|kept| room(end, kept));
        let capacity_after = policy.residual_capacity().zip(needed).map(|(a, b)| a.max(b));
        let capacity_after = spec.whole_groups(capacity_after);
        let held = spec.whole_groups(self.kept.map(|kept| room(after, kept)));
        let capacity_during = capacity_after.zip(held).map(|(a, b)| a.max(b));
        let capacity_during = capacity_during.zip(self.capacity).map(|(a, b)| a.max(b));

        let groups = 0..spec.group_count();
        let table_lengths = groups
            .clone()
            .map(|group| {
                let needed = Self::pages_needed(spec, group, after, packed);
                needed.max(self.tables[group].len())
            })
            .collect();
        let appended = self.tokens.max(sinks)..after;
        let writes = groups
            .map(|group| {
                let format = spec.group_layer(group).format;
                let quantized = self.packed.zip(packed).map(|(from, to)| from..to);
                let pages = format.zip(quantized).map(|(format, range)| {
                    let range = if format.bits.is_some() { range } else { appended.clone() };
                    pages_of(spec, &range)
                });
                Writes { group, pages }
            })
            .collect();
        Ok(Advance { views, packed, kept, capacity_during, capacity_after, table_lengths, writes })
    }
}

/// Indices of the pages that hold a range of positions.
fn pages_of(spec: &PoolSpec, range: &Range<usize>) -> Range<usize> {
    if range.is_empty() {
        return 0..0;
    }
    let first = (range.start - spec.config().sink_length()) / spec.config().page_tokens();
    first..spec.pages_until(range.end)
}

/// Whether a policy keeps its contract with `tokens` tokens in the cache.
pub(super) fn check_policy(spec: &PoolSpec, policy: &dyn CachePolicy, tokens: usize) -> Result<()> {
    let sinks = spec.config().sink_length();
    let group = spec.config().group_size();
    let (packed, kept) = (policy.packed(tokens), policy.kept(tokens));
    let ordered =
        |packed: usize, kept: usize| sinks <= kept && kept <= packed && packed <= tokens.max(sinks);
    if ordered(packed.keys, kept.keys)
        && ordered(packed.values, kept.values)
        && (packed.keys - sinks).is_multiple_of(group)
        && (kept.keys - sinks).is_multiple_of(group)
    {
        return Ok(());
    }
    Err(broken_policy(tokens, packed, kept))
}

fn broken_policy(tokens: usize, a: KeyValue<usize>, b: KeyValue<usize>) -> Error {
    let reason = format!("the policy breaks its contract at {tokens} tokens: {a:?}, {b:?}");
    Error::request("plan", reason)
}
