//! The exact memory model: bytes of a cache, part by part, from its shape and length alone.
//!
//! Tests compare it with what the backends really allocate, byte for byte.

use crate::{CachePolicy, KeyValue, PoolSpec, SequenceLayout};
use std::ops::Range;

/// Bytes of a cache by part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Codes of quantized keys and values.
    pub codes: usize,
    /// Their scales and zeros.
    pub scales_and_zeros: usize,
    /// Masks of promoted key channels; their codes count as codes.
    pub channel_masks: usize,
    /// Keys and values of uncompressed formats.
    pub full_pages: usize,
    /// The sink tokens.
    pub sinks: usize,
    /// The newest tokens, not yet quantized.
    pub residual: usize,
    /// Full-precision copies of quantized tokens, kept for an exact truncation.
    pub rollback: usize,
    /// Full-precision tokens of an unfinished prompt segment, beyond what the residual holds.
    pub open_segment: usize,
    /// Allocated in pages but not filled.
    pub page_slack: usize,
    /// Allocated for residual and sinks but not filled.
    pub residual_slack: usize,
}

impl MemoryUsage {
    /// Everything in full precision.
    pub fn full_precision(&self) -> usize {
        self.full_pages + self.sinks + self.residual + self.rollback + self.open_segment
    }

    /// Bytes that hold something.
    pub fn in_use(&self) -> usize {
        self.codes + self.scales_and_zeros + self.channel_masks + self.full_precision()
    }

    /// That of `layers` equal layers.
    fn times(self, layers: usize) -> Self {
        let mut total = Self::default();
        for _ in 0..layers {
            total += self;
        }
        total
    }

    /// Bytes that are allocated.
    pub fn allocated(&self) -> usize {
        self.in_use() + self.page_slack + self.residual_slack
    }
}

impl std::ops::AddAssign for MemoryUsage {
    fn add_assign(&mut self, other: Self) {
        self.codes += other.codes;
        self.scales_and_zeros += other.scales_and_zeros;
        self.channel_masks += other.channel_masks;
        self.full_pages += other.full_pages;
        self.sinks += other.sinks;
        self.residual += other.residual;
        self.rollback += other.rollback;
        self.open_segment += other.open_segment;
        self.page_slack += other.page_slack;
        self.residual_slack += other.residual_slack;
    }
}

/// What a backend reports of its own buffers; to be equal to the model's [`MemoryUsage`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredBytes {
    /// Codes in use.
    pub codes: usize,
    /// Scales and zeros in use.
    pub scales_and_zeros: usize,
    /// Masks of promoted key channels in use.
    pub channel_masks: usize,
    /// Full-precision keys and values in use.
    pub full_precision: usize,
    /// Everything allocated for the cache, used or not.
    pub allocated: usize,
}

impl MeasuredBytes {
    /// Bytes that hold something.
    pub fn in_use(&self) -> usize {
        self.codes + self.scales_and_zeros + self.channel_masks + self.full_precision
    }
}

impl From<MemoryUsage> for MeasuredBytes {
    fn from(usage: MemoryUsage) -> Self {
        Self {
            codes: usage.codes,
            scales_and_zeros: usage.scales_and_zeros,
            channel_masks: usage.channel_masks,
            full_precision: usage.full_precision(),
            allocated: usage.allocated(),
        }
    }
}

/// Bytes of one sequence that owns all its pages, between two steps.
///
/// The state machine's answer to "how much does this sequence hold"; sequences that share pages
/// hold less together than the sum.
pub fn of_sequence(
    spec: &PoolSpec,
    policy: &dyn CachePolicy,
    layout: &SequenceLayout,
) -> MemoryUsage {
    let sinks = spec.config().sink_length();
    let page_tokens = spec.config().page_tokens();
    let n = layout.tokens;
    let closed = (policy.packed(n), policy.kept(n));
    let mut total = MemoryUsage::default();
    for group in 0..spec.group_count() {
        let layer = spec.group_layer(group);
        let table = &layout.tables[group];
        let live: Vec<_> =
            (0..table.len()).filter(|&page| table[page] != crate::PageId::DROPPED).collect();
        let paged = |range: Range<usize>| -> usize {
            let start = |page| spec.page_start(page);
            let overlap = |page: usize| {
                let (a, b) =
                    (start(page).max(range.start), (start(page) + page_tokens).min(range.end));
                b.saturating_sub(a)
            };
            live.iter().map(|&page| overlap(page)).sum()
        };
        let packs = layer.packs();
        let only = |keep: KeyValue<bool>, tokens: KeyValue<usize>| {
            tokens.zip(keep).map(|(tokens, keep)| if keep { tokens } else { 0 })
        };
        let quantized = only(packs, layout.packed.map(|end| paged(sinks..end)));
        let uncompressed = packs.map(|packs| !packs);
        let full = only(uncompressed, KeyValue::both(paged(sinks..n)));

        let codes = spec.code_bytes(layer, quantized);
        let params = spec.param_bytes(layer, quantized);
        let masks = spec.mask_bytes(layer, quantized);
        let full_pages = spec.full_bytes(layer, full);
        let page_bytes = live.len() * spec.layer_page_bytes(layer);

        let bytes = |tokens: KeyValue<usize>| spec.full_bytes(layer, only(packs, tokens));
        let count = |first: KeyValue<usize>| first.map(|first| n.saturating_sub(first));
        let held = bytes(count(layout.kept));
        let residual = bytes(count(closed.0));
        // A truncation may have left fewer copies than the policy would keep.
        let copied = closed.1.zip(layout.kept).map(|(policy, held)| policy.max(held));
        let rollback = bytes(count(copied)) - residual;
        let in_sinks = spec.full_bytes(layer, KeyValue::both(n.min(sinks)));
        let slot_bytes = spec.layer_slot_bytes(layer, layout.capacity);
        let usage = MemoryUsage {
            codes,
            scales_and_zeros: params,
            channel_masks: masks,
            full_pages,
            sinks: in_sinks,
            residual,
            rollback,
            open_segment: held.saturating_sub(residual + rollback),
            page_slack: page_bytes - codes - params - masks - full_pages,
            residual_slack: slot_bytes.saturating_sub(held + in_sinks),
        };
        total += usage.times(spec.group_layers(group));
    }
    total
}

/// Bytes of one sequence of `tokens` tokens with no open segment: the prediction.
pub fn predict(spec: &PoolSpec, policy: &dyn CachePolicy, tokens: usize) -> MemoryUsage {
    let packed = policy.packed(tokens);
    let tables = (0..spec.group_count())
        .map(|group| {
            let layer = spec.group_layer(group);
            let ends = layer
                .format
                .zip(packed)
                .map(|(format, packed)| if format.bits.is_some() { packed } else { tokens });
            let pages = 0..spec.pages_until(ends.keys.max(ends.values));
            let page_tokens = spec.config().page_tokens();
            let id = |page: usize| {
                let start = spec.page_start(page);
                let positions = start..start + page_tokens;
                // The last step dropped what the state before it no longer needed.
                let before = tokens.saturating_sub(1);
                let dropped =
                    positions.end <= before && !policy.needs_page(layer, positions, before);
                if dropped { crate::PageId::DROPPED } else { crate::PageId(page as u32) }
            };
            pages.map(id).collect()
        })
        .collect();
    let (kept, capacity) = (policy.kept(tokens), spec.whole_groups(policy.residual_capacity()));
    let layout = SequenceLayout { slot: 0, tokens, packed, kept, capacity, tables };
    of_sequence(spec, policy, &layout)
}

/// Elements of the keys and values of `tokens` tokens over all layers.
pub fn elements(spec: &PoolSpec, tokens: usize) -> usize {
    let of_layer = |layer: &crate::LayerSpec| 2 * layer.kv_heads * layer.head_dim;
    spec.layers().iter().map(of_layer).sum::<usize>().saturating_mul(tokens)
}

/// Bytes of `tokens` tokens in an uncompressed f16 cache.
pub fn f16_bytes(spec: &PoolSpec, tokens: usize) -> usize {
    elements(spec, tokens).saturating_mul(2)
}
