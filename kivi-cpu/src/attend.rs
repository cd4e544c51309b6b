//! Attention over packed codes and full-precision tokens: one pass with a running maximum.
//!
//! With the scale and zero of a group folded out, the inner loops multiply a prepared number with
//! an integer code:
//!
//! - keys: `q·(s∘c + z) = (q∘s)·c + q·z`, with `q∘s` and `q·z` computed once per group of tokens;
//! - values: `Σ p_t (s_t c_t + z_t) = Σ (p_t s_t) c_t + Σ p_t z_t`.
//!
//! A sequence is read in *tiles* of at most `G` tokens that start at `S + i·G` (and at `i·G` within
//! the sinks), so a tile lies in one page and its keys are all quantized or all not. Tiles are
//! gathered into *splits* of [`SPLIT_TOKENS`]; each split has its own running maximum, and splits
//! are combined in order. Tiles and splits depend on positions alone, never on which rows are
//! computed together or by which thread: that is what makes a row's result bit-identical.
//!
//! The unit of work is (sequence, kv head, block of rows), further cut into splits when there are
//! too few of those for the threads. All rows of a block and all query heads of the head group
//! share one unpacking of a tile.

mod partial;
mod products;
mod tile;
mod walk;

use crate::{Cpu, Matrix, cache::LayerCache};
use kivi_core::{Attention, Result, SequencePlan, StepPlan};
use partial::Partial;
use rayon::prelude::*;
use std::ops::Range;
use walk::Walk;

/// Tokens of a split: long enough that combining costs nothing, short enough to share out 4k
/// tokens among several threads.
const SPLIT_TOKENS: usize = 1024;

/// Query vectors (rows × query heads of the head group) that share one unpacking. 64 vectors of
/// logits over a tile of 32 tokens are 8 KiB, a quarter of a level-1 cache.
const BLOCK_QUERIES: usize = 64;

/// Some rows of one sequence and one kv head.
#[derive(Clone)]
pub(crate) struct Block<'a> {
    sequence: &'a SequencePlan,
    kv_head: usize,
    /// Rows, counted within the sequence.
    rows: Range<usize>,
}

impl Block<'_> {
    /// Splits that the last row sees.
    fn splits(&self) -> usize {
        (self.sequence.before.tokens + self.rows.end).div_ceil(SPLIT_TOKENS)
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
        let head_group = attention.head_group(&layer.spec);
        let rows_per_block = (BLOCK_QUERIES / head_group).max(1);
        let mut blocks = Vec::new();
        for sequence in &plan.sequences {
            layer.slot("attend", sequence.before.slot)?;
            for start in (0..sequence.rows.len()).step_by(rows_per_block) {
                let rows = start..sequence.rows.len().min(start + rows_per_block);
                let kv_heads = 0..layer.spec.kv_heads;
                blocks.extend(kv_heads.map(|kv_head| {
                    let rows = rows.clone();
                    Block { sequence, kv_head, rows }
                }));
            }
        }
        let walk = Walk { layer, group, attention, queries };
        let few = blocks.len() < 4 * self.threads();
        let results: Vec<Partial> = self.threads.install(|| {
            let all_splits = |block: &Block| {
                let splits =
                    (0..block.splits()).map(|split| self.isa.run(walk.split(block, split)));
                self.combine(splits)
            };
            if !few {
                return blocks.par_iter().map(all_splits).collect();
            }
            // One task per split, combined afterwards in the same order as above.
            let tasks =
                blocks.iter().flat_map(|block| (0..block.splits()).map(move |s| (block, s)));
            let tasks: Vec<_> = tasks.collect();
            let partials: Vec<Partial> = tasks
                .par_iter()
                .map(|&(block, split)| self.isa.run(walk.split(block, split)))
                .collect();
            let mut partials = partials.into_iter();
            blocks
                .iter()
                .map(|block| self.combine(partials.by_ref().take(block.splits())))
                .collect()
        });

        let head_dim = layer.spec.head_dim;
        let mut out = Matrix::zeroed(plan.rows, queries.width);
        for (block, result) in blocks.iter().zip(&results) {
            for (query, row, head) in walk.queries_of(block) {
                let sink = attention.sink_logits.as_ref().map(|sinks| sinks[head]);
                let start = (block.sequence.rows.start + row) * out.width + head * head_dim;
                result.finish(query, sink, &mut out.data[start..start + head_dim]);
            }
        }
        Ok(out)
    }

    fn combine(&self, splits: impl Iterator<Item = Partial>) -> Partial {
        splits.reduce(|total, split| total.combine(&split)).unwrap_or_default()
    }
}
