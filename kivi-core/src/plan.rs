//! Step plans: what the state machine tells a backend to do.
//!
//! A step advances some sequences by one or more tokens each. A backend executes a plan as
//!
//! 1. [`begin_step`](crate::CacheBackend::begin_step): page copies, room for the new tokens;
//! 2. for each layer: *append* the rows in full precision, *quantize* the ranges of the plan,
//!    *attend*, *release* the full-precision copies that are no longer needed.
//!
//! Quantizing comes before attending, and full-precision copies live until the release: so rows of
//! one step may see the same token differently, each as its own view says.

use crate::{Error, KeyValue, PageId, PoolSpec, Result, SequenceId};
use std::ops::Range;

/// Where one sequence lives.
///
/// Position `j` of a tensor is held, in full precision, in the sinks if `j < S`; otherwise in page
/// `(j − S) / page_tokens` if the layer's format is full; otherwise as codes in that page if
/// `j < packed`, and as a full-precision copy in the residual if `j ≥ kept`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequenceLayout {
    /// Number of the sequence's residual slot.
    pub slot: usize,
    /// Tokens in the cache.
    pub tokens: usize,
    /// First position, at least `S`, that is not quantized.
    pub packed: KeyValue<usize>,
    /// First position, at least `S`, with a full-precision copy outside the sinks.
    pub kept: KeyValue<usize>,
    /// Full-precision tokens the residual has room for.
    pub capacity: KeyValue<usize>,
    /// One page table per layer group.
    pub tables: Vec<Vec<PageId>>,
}

impl SequenceLayout {
    /// Checks that the layout can belong to a pool of this shape.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when it has another number of page tables, or boundaries within the
    /// sinks.
    pub fn check(&self, operation: &'static str, spec: &PoolSpec) -> Result<()> {
        let sinks = spec.config().sink_length();
        let bounds = [self.packed.keys, self.packed.values, self.kept.keys, self.kept.values];
        if self.tables.len() != spec.group_count() || bounds.iter().any(|&bound| bound < sinks) {
            return Err(Error::request(operation, "the layout belongs to another pool"));
        }
        Ok(())
    }
}

/// A page of a layer group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageRef {
    /// The layer group.
    pub group: usize,
    /// The page in it.
    pub page: PageId,
}

/// A shared page that has to be copied before it is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageCopy {
    /// The layer group.
    pub group: usize,
    /// The shared page.
    pub from: PageId,
    /// The sequence's own.
    pub to: PageId,
}

/// What one sequence does in a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SequencePlan {
    /// The sequence.
    pub sequence: SequenceId,
    /// Its rows of the step's tensors.
    pub rows: Range<usize>,
    /// The state before the step, but with the page tables and the capacity of the step: the
    /// position of the first row is `before.tokens`.
    pub before: SequenceLayout,
    /// Per row, the first position that it sees in full precision.
    pub views: Vec<KeyValue<usize>>,
    /// Positions that are quantized in this step.
    pub quantize: KeyValue<Range<usize>>,
    /// First position whose full-precision copy outlives the step.
    pub kept: KeyValue<usize>,
    /// Full-precision tokens the residual has room for after the step.
    pub capacity: KeyValue<usize>,
}

impl SequencePlan {
    /// Tokens in the cache after the step.
    pub fn tokens_after(&self) -> usize {
        self.before.tokens + self.rows.len()
    }

    /// Positions of the rows.
    pub fn positions(&self) -> Range<usize> {
        self.before.tokens..self.tokens_after()
    }
}

/// One step of a ragged batch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Rows of the step's tensors.
    pub rows: usize,
    /// What each sequence does; their rows are consecutive and cover `0..rows`.
    pub sequences: Vec<SequencePlan>,
    /// Pages to copy first.
    pub copies: Vec<PageCopy>,
    /// Pages nobody uses any more, since the last step.
    pub freed: Vec<PageRef>,
    /// Slots nobody uses any more, since the last step.
    pub freed_slots: Vec<usize>,
}

impl StepPlan {
    /// Positions of all rows, in their order.
    pub fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.sequences.iter().flat_map(SequencePlan::positions)
    }

    /// The last row of every sequence.
    pub fn last_rows(&self) -> Vec<usize> {
        self.sequences.iter().map(|sequence| sequence.rows.end - 1).collect()
    }
}
