//! What a step plan says, as the lists of numbers that kernels read.

use crate::{
    Shape,
    kernels::{attend::DROPPED, splits::SplitConfig},
    memory::GroupMemory,
    place::Places,
};
use kivi_core::{PageId, Result, SequencePlan, StepPlan};
use std::ops::Range;

/// Words of a sequence in the tables.
const SEQUENCE_WORDS: usize = 8;

/// Words of a block of queries in the work list.
const BLOCK_WORDS: usize = 5;

/// The lists of one step for one layer group, the same for all its layers.
#[derive(Debug, Default)]
pub(crate) struct StepLists {
    /// Sequences, views and page tables, as `attend` reads them.
    pub(crate) tables: Vec<u32>,
    /// Where the views begin in it.
    pub(crate) views_at: usize,
    /// First words of the step's keys, then of its values.
    pub(crate) places: Vec<u32>,
    /// Items of `quantize_keys`.
    pub(crate) keys: Vec<u32>,
    /// Items of `quantize_values`.
    pub(crate) values: Vec<u32>,
}

/// Words of an arena and tables are counted in 32 bits.
fn word(place: usize) -> u32 {
    u32::try_from(place).unwrap_or(DROPPED)
}

impl StepLists {
    /// # Errors
    /// When the plan names pages or slots that were not made.
    pub(crate) fn new(memory: &GroupMemory, group: usize, plan: &StepPlan) -> Result<Self> {
        let mut lists = Self::default();
        let sequences = plan.sequences.len();
        lists.views_at = SEQUENCE_WORDS * sequences;
        lists.tables.resize(lists.views_at, 0);
        for sequence in &plan.sequences {
            for view in &sequence.views {
                lists.tables.extend([word(view.keys), word(view.values)]);
            }
        }
        let (mut key_places, mut value_places) = (Vec::new(), Vec::new());
        for (index, sequence) in plan.sequences.iter().enumerate() {
            let places = Places::new("begin step", memory, group, &sequence.before);
            let slot = places.slot()?;
            let table = lists.tables.len();
            let own = [
                table,
                slot.keys.start,
                slot.values.start,
                slot.capacity.keys,
                slot.capacity.values,
                sequence.rows.start,
                sequence.before.tokens,
                0,
            ];
            let words = own.map(word);
            lists.tables[SEQUENCE_WORDS * index..][..SEQUENCE_WORDS].copy_from_slice(&words);
            for &page in places.table {
                let place = if page == PageId::DROPPED { None } else { memory.page(page) };
                lists.tables.push(place.map_or(DROPPED, word));
            }
            for position in sequence.positions() {
                key_places.push(word(places.full(position, true)?));
                value_places.push(word(places.full(position, false)?));
            }
            let (shape, ranges) = (&memory.shape, sequence.quantize.clone());
            key_items(shape, &places, ranges.keys, &mut lists.keys)?;
            value_items(shape, &places, ranges.values, &mut lists.values)?;
        }
        lists.places = key_places;
        lists.places.extend(value_places);
        Ok(lists)
    }
}

/// Items of `quantize_keys`: the groups of a sequence that become codes.
fn key_items(
    shape: &Shape,
    places: &Places<'_>,
    range: Range<usize>,
    items: &mut Vec<u32>,
) -> Result<()> {
    if !shape.packs().keys {
        return Ok(());
    }
    for position in range.step_by(shape.group) {
        let (page, token) = places.page(position)?;
        items.extend([places.full(position, true)?, page, token / shape.group].map(word));
    }
    Ok(())
}

/// Items of `quantize_values`: all tokens of a row of words are one unit's work.
fn value_items(
    shape: &Shape,
    places: &Places<'_>,
    range: Range<usize>,
    items: &mut Vec<u32>,
) -> Result<()> {
    if !shape.packs().values {
        return Ok(());
    }
    let per_word = shape.values_per_word();
    let mut position = range.start;
    while position < range.end {
        let slot = places.slot()?;
        let (page, token) = places.page(position)?;
        let count = (per_word - token % per_word).min(range.end - position);
        let capacity = slot.capacity.values;
        let place = (position - shape.sinks) % capacity.max(1);
        items.extend([slot.values.start, place, capacity, page, token, count].map(word));
        position += count;
    }
    Ok(())
}

/// Blocks and items of one launch of `attend` and `combine`.
#[derive(Debug, Default)]
pub(crate) struct WorkList {
    /// Blocks, then items.
    pub(crate) words: Vec<u32>,
    pub(crate) blocks: usize,
    pub(crate) items: usize,
}

/// What attention needs to know to cut its work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cutting {
    pub(crate) head_group: usize,
    /// Queries of a block.
    pub(crate) queries: usize,
    pub(crate) split: usize,
    pub(crate) sinks: usize,
    pub(crate) window: Option<usize>,
    /// Items of a launch, unless one block has more.
    pub(crate) max_items: usize,
}

impl Cutting {
    /// The work of a step, in as many launches as it takes. Of each sequence the first `done` tokens
    /// after the sinks are left out: whole groups.
    pub(crate) fn work(&self, plan: &StepPlan, done: Option<&[u32]>) -> Vec<WorkList> {
        let mut lists = Vec::new();
        let (mut blocks, mut items): (Vec<u32>, Vec<u32>) = (Vec::new(), Vec::new());
        let mut flush = |blocks: &mut Vec<u32>, items: &mut Vec<u32>| {
            let (count, size) = (blocks.len() / BLOCK_WORDS, items.len() / 3);
            let mut words = std::mem::take(blocks);
            words.append(items);
            lists.push(WorkList { words, blocks: count, items: size });
        };
        for (index, sequence) in plan.sequences.iter().enumerate() {
            let queries = sequence.rows.len() * self.head_group;
            for first in (0..queries).step_by(self.queries) {
                let count = self.queries.min(queries - first);
                let rows = first / self.head_group..(first + count - 1) / self.head_group + 1;
                let done = done.map_or(0, |done| done[index] as usize);
                let splits = self.splits(sequence.before.tokens, rows, done);
                let many = items.len() / 3 + splits.len() > self.max_items;
                if many && !items.is_empty() {
                    flush(&mut blocks, &mut items);
                }
                let block = blocks.len() / BLOCK_WORDS;
                blocks.extend([index, first, count, items.len() / 3, splits.len()].map(word));
                items.extend(splits.into_iter().flat_map(|s| [block, s.start, s.end].map(word)));
            }
        }
        if !blocks.is_empty() {
            flush(&mut blocks, &mut items);
        }
        lists
    }

    /// The splits that rows see something of: those of the sinks, then of what follows, at positions
    /// that depend on nothing else.
    fn splits(&self, before: usize, rows: Range<usize>, done: usize) -> Vec<Range<usize>> {
        let end = before + rows.end;
        let first = (before + rows.start + 1).saturating_sub(self.window.unwrap_or(usize::MAX));
        let sinks = self.sinks.min(end);
        let in_sinks = (0..sinks).step_by(self.split).map(|s| s..sinks.min(s + self.split));
        let after = (self.sinks..end.max(self.sinks)).step_by(self.split);
        let done = self.sinks + done;
        let after = after.map(|s| s.max(done)..end.min(s + self.split));
        let after = after.filter(|split| !split.is_empty());
        in_sinks.chain(after).filter(|split| split.end > first).collect()
    }
}

/// What [`splits`](crate::kernels::splits) reads, for a step of one row of each sequence.
#[derive(Debug)]
pub(crate) struct CodesList {
    pub(crate) config: SplitConfig,
    /// Query heads of a kv head.
    pub(crate) rows: usize,
    /// Splits of the longest sequence.
    pub(crate) splits: usize,
    pub(crate) max_pages: usize,
    /// `[sequences, max_pages]`: first words.
    pub(crate) pages: Vec<u32>,
    /// `[sequences]`: tokens after the sinks that are codes to their row, whole groups.
    pub(crate) tokens: Vec<u32>,
    /// `[sequences, rows, 2]`: the first token after the sinks that is seen, and the one after the
    /// last.
    pub(crate) visible: Vec<u32>,
}

impl CodesList {
    /// `tables` are those of the step's [`StepLists`].
    pub(crate) fn new(
        config: SplitConfig,
        tables: &[u32],
        rows: usize,
        cutting: &Cutting,
        plan: &StepPlan,
    ) -> Self {
        let sinks = cutting.sinks;
        let tokens_of = |sequence: &SequencePlan| {
            let view = sequence.views[0];
            let end = view.keys.min(view.values).min(sequence.before.tokens + 1);
            end.saturating_sub(sinks) / config.group_size * config.group_size
        };
        let counts: Vec<usize> = plan.sequences.iter().map(tokens_of).collect();
        let longest = counts.iter().copied().max().unwrap_or(0);
        let max_pages = longest.div_ceil(config.page_tokens).max(1);
        let (mut pages, mut visible) = (Vec::new(), Vec::new());
        for (index, (sequence, &tokens)) in plan.sequences.iter().zip(&counts).enumerate() {
            let table = tables[SEQUENCE_WORDS * index] as usize;
            let count = tokens.div_ceil(config.page_tokens);
            let own = &tables[table..table + count];
            // The place of a page that was given up is not seen; any other page stands for it.
            let any = own.iter().copied().find(|&page| page != DROPPED).unwrap_or(0);
            let live = own.iter().map(|&page| if page == DROPPED { any } else { page });
            pages.extend(live.chain(std::iter::repeat_n(any, max_pages - count)));
            let end = sequence.before.tokens + 1;
            let first = end.saturating_sub(cutting.window.unwrap_or(usize::MAX));
            let seen = [first, end].map(|position| word(position.saturating_sub(sinks)));
            visible.extend(std::iter::repeat_n(seen, rows).flatten());
        }
        Self {
            config,
            rows,
            splits: longest.div_ceil(config.split_tokens),
            max_pages,
            pages,
            tokens: counts.into_iter().map(word).collect(),
            visible,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CUTTING: Cutting =
        Cutting { head_group: 3, queries: 4, split: 256, sinks: 4, window: None, max_items: 100 };

    #[test]
    fn splits_start_after_the_sinks() {
        assert_eq!(CUTTING.splits(600, 0..1, 0), [0..4, 4..260, 260..516, 516..601]);
        assert_eq!(CUTTING.splits(0, 0..3, 0), vec![0..3; 1]);
        // 320 tokens after the sinks are done.
        assert_eq!(CUTTING.splits(600, 0..1, 320), [0..4, 324..516, 516..601]);
        let windowed = Cutting { window: Some(100), ..CUTTING };
        // A query at 600 sees from 501 on.
        assert_eq!(windowed.splits(600, 0..1, 0), [260..516, 516..601]);
    }

    #[test]
    fn blocks_cut_rows_and_heads() {
        let sequence = SequencePlan { rows: 0..3, ..SequencePlan::default() };
        let plan = StepPlan { rows: 3, sequences: vec![sequence], ..StepPlan::default() };
        let work = CUTTING.work(&plan, None);
        assert_eq!(work.len(), 1);
        // Nine queries: four, four and one; rows up to 1, 2 and 2.
        let blocks = [[0, 0, 4, 0, 1], [0, 4, 4, 1, 1], [0, 8, 1, 2, 1]];
        let items = [[0, 0, 2], [1, 0, 3], [2, 0, 3]];
        assert_eq!(work[0].words, [blocks.as_flattened(), items.as_flattened()].concat());
        let few = Cutting { max_items: 1, ..CUTTING };
        assert_eq!(
            few.work(&plan, None).iter().map(|list| list.blocks).collect::<Vec<_>>(),
            [1, 1, 1]
        );
    }
}
