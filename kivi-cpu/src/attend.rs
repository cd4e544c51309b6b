//! Attention over packed codes and full-precision tokens: one pass with a running maximum.
//!
//! With the scale and zero of a group folded out, the inner loops multiply a prepared number with
//! an integer code:
//!
//! - keys: `q·(s∘c + z) = (q∘s)·c + q·z`, with `q∘s` and `q·z` computed once per group of tokens;
//! - values: `Σ p_t (s_t c_t + z_t) = Σ (p_t s_t) c_t + Σ p_t z_t`.
//!
//! Keys with promoted channels add `Σ (q∘s/4)·lo` over these channels, `s` being the stored scale, by
//! the same loop over a second, shorter plane of codes.
//!
//! The prepared numbers are rounded to 16 bits and split into two bytes (see [`operand`]), so the
//! inner products run on byte-wise integer instructions and are exact: a quarter of the work of
//! floats, and the same for every instruction set.
//!
//! A sequence is read in *tiles* of [`TILE`] tokens that start at `S + i·TILE` (and at `i·TILE` within
//! the sinks). Tiles are gathered into *splits* of [`SPLIT_TOKENS`]; each split has its own running
//! maximum, and splits are combined in order. Tiles and splits depend on positions alone, never on
//! which rows are computed together or by which thread: that is what makes a row's result
//! bit-identical.
//!
//! The unit of work is (sequence, some kv heads, block of rows), further cut into splits when there
//! are too few of those for the threads, and taken by whichever thread is free. All rows of a block
//! and all query heads of a head group share one unpacking of a tile. A block goes through a tile head
//! by head, and then to the next: a page holds its heads one after the other, and the longer a piece
//! of memory that is read in order, the better the hardware foresees it (*measured*: 32,768 tokens of
//! 32 heads in f16 take a fifth less).

mod dots;
mod full;
mod keys;
mod operand;
mod partial;
mod places;
mod products;
mod promoted;
mod scratch;
mod values;
mod walk;

use crate::{Cpu, Matrix, cache::LayerCache};
use kivi_core::{Attention, Result, StepPlan};
use partial::Partial;
use rayon::prelude::*;
use scratch::Scratch;
use std::{cell::RefCell, ops::Range};
use walk::Walk;

/// Tokens of a tile: what is prepared and converted once per tile costs little, sums of codes fit
/// 16 bits, and the buffers of one query fit a level-1 cache. A multiple of every group size.
const TILE: usize = 128;

/// Tokens of a split: long enough that combining costs nothing, short enough to share out 2k
/// tokens among several threads. A multiple of [`TILE`].
const SPLIT_TOKENS: usize = 512;

/// Query vectors (rows × query heads) of a block. 64 vectors of logits over a tile are 32 KiB, a
/// sixteenth of a level-2 cache.
const BLOCK_QUERIES: usize = 64;

/// Blocks per thread from which on no block is cut into splits: enough that ragged ones balance.
const BALANCED_BLOCKS: usize = 16;

/// Tasks per thread that are done before their results are written: bounds the memory that a long
/// prompt takes.
const WAVE_TASKS: usize = 64;

thread_local! {
    /// Buffers of this thread, kept from step to step.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Some rows of one sequence and some kv heads.
#[derive(Clone, Debug)]
pub(crate) struct Block {
    /// Index in the plan.
    sequence: usize,
    kv_heads: Range<usize>,
    /// Rows, counted within the sequence.
    rows: Range<usize>,
    /// Splits that the last row sees.
    splits: usize,
}

/// Some splits of a block.
#[derive(Debug, Default)]
pub(crate) struct Task {
    block: usize,
    splits: Range<usize>,
    /// Of each kv head.
    partials: Vec<Partial>,
}

/// Lists of the work of a step, kept from step to step.
#[derive(Debug, Default)]
pub(crate) struct Work {
    blocks: Vec<Block>,
    tasks: Vec<Task>,
}

impl Work {
    /// Cuts the step into blocks: of as many heads as leave each of the threads enough to do.
    fn plan(
        &mut self,
        layer: &LayerCache,
        plan: &StepPlan,
        head_group: usize,
        threads: usize,
    ) -> Result<()> {
        let kv_heads = layer.spec.kv_heads;
        let rows_per_block = (BLOCK_QUERIES / head_group).max(1);
        let starts = |rows: usize| (0..rows).step_by(rows_per_block);
        let rows_of = |start: usize, rows: usize| start..rows.min(start + rows_per_block);
        let splits_of = |tokens: usize| tokens.div_ceil(SPLIT_TOKENS);
        let mut splits = 0;
        for sequence in &plan.sequences {
            layer.appended_slot("attend", sequence.before.slot)?;
            let (before, rows) = (sequence.before.tokens, sequence.rows.len());
            let ends = starts(rows).map(|start| rows_of(start, rows).end);
            splits += ends.map(|end| splits_of(before + end)).sum::<usize>();
        }
        let enough = splits * kv_heads / (BALANCED_BLOCKS * threads);
        self.blocks.clear();
        for (index, sequence) in plan.sequences.iter().enumerate() {
            for start in starts(sequence.rows.len()) {
                let rows = rows_of(start, sequence.rows.len());
                let splits = splits_of(sequence.before.tokens + rows.end);
                let heads = enough.min(BLOCK_QUERIES / (rows.len() * head_group)).max(1);
                for first in (0..kv_heads).step_by(heads) {
                    let (rows, kv_heads) = (rows.clone(), first..kv_heads.min(first + heads));
                    self.blocks.push(Block { sequence: index, kv_heads, rows, splits });
                }
            }
        }
        Ok(())
    }

    /// Makes tasks of the blocks from one on, one per split if `cut`, until there are `enough`; returns
    /// which blocks and how many tasks.
    fn cut(&mut self, first: usize, cut: bool, enough: usize) -> (Range<usize>, usize) {
        let (mut end, mut count) = (first, 0);
        while end < self.blocks.len() && count < enough {
            let (block, splits) = (end, self.blocks[end].splits);
            let step = if cut { 1 } else { splits };
            for first in (0..splits).step_by(step) {
                if self.tasks.len() == count {
                    self.tasks.push(Task::default());
                }
                let task = &mut self.tasks[count];
                (task.block, task.splits) = (block, first..first + step);
                count += 1;
            }
            end += 1;
        }
        (first..end, count)
    }
}

impl Cpu {
    pub(crate) fn attend_step(
        &self,
        layer: &LayerCache,
        group: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &Matrix,
    ) -> Result<Matrix> {
        let mut out = self.matrix(plan.rows, queries.width)?;
        let mut work =
            self.work.lock().map(|mut work| std::mem::take(&mut *work)).unwrap_or_default();
        work.plan(layer, plan, attention.head_group(&layer.spec), self.threads())?;
        let walk = Walk { layer, group, plan, attention, queries };
        let cut = work.blocks.len() < BALANCED_BLOCKS * self.threads();
        let mut first = 0;
        while first < work.blocks.len() {
            let (done, count) = work.cut(first, cut, WAVE_TASKS * self.threads());
            let Work { blocks, tasks } = &mut work;
            let (blocks, tasks) = (&blocks[..], &mut tasks[..count]);
            self.threads.install(|| self.attend_tasks(walk, blocks, tasks));
            for task in tasks.iter().filter(|task| task.splits.start == 0) {
                write(walk, &blocks[task.block], &task.partials, &mut out);
            }
            first = done.end;
        }
        if let Ok(mut kept) = self.work.lock() {
            *kept = work;
        }
        Ok(out)
    }

    /// Does the tasks of some blocks. Afterwards the first task of every block holds the block's
    /// result.
    fn attend_tasks(&self, walk: Walk<'_>, blocks: &[Block], tasks: &mut [Task]) {
        tasks.par_iter_mut().with_max_len(1).for_each(|task| {
            let block = &blocks[task.block];
            SCRATCH.with_borrow_mut(|scratch| {
                for split in task.splits.clone() {
                    if split == task.splits.start {
                        self.isa.run(walk.split(block, split, scratch, &mut task.partials));
                    } else {
                        let mut next = std::mem::take(&mut scratch.partials);
                        self.isa.run(walk.split(block, split, scratch, &mut next));
                        combine(&mut task.partials, &next);
                        scratch.partials = next;
                    }
                }
            });
        });
        if tasks.iter().all(|task| task.splits.start == 0) {
            return;
        }
        tasks.par_chunk_by_mut(|a, b| a.block == b.block).for_each(|tasks| {
            if let [first, rest @ ..] = tasks {
                rest.iter().for_each(|next| combine(&mut first.partials, &next.partials));
            }
        });
    }
}

/// Each head's part followed by the next one's.
fn combine(partials: &mut [Partial], next: &[Partial]) {
    partials.iter_mut().zip(next).for_each(|(partial, next)| partial.combine(next));
}

/// Writes the outputs of a block.
fn write(walk: Walk<'_>, block: &Block, results: &[Partial], out: &mut Matrix) {
    let head_dim = walk.layer.geometry.head_dim;
    let first = walk.plan.sequences[block.sequence].rows.start;
    for (kv_head, result) in block.kv_heads.clone().zip(results) {
        for (query, (row, head)) in walk.queries_of(block, kv_head).enumerate() {
            let sink = walk.attention.sink_logits.as_ref().map(|sinks| sinks[head]);
            let start = (first + row) * out.width + head * head_dim;
            result.finish(query, sink, &mut out.data[start..start + head_dim]);
        }
    }
}
