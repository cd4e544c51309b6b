//! What a run cost: speeds, and the cache in bytes.

use kivi::{
    CachePolicy, PoolSpec,
    memory::{self, MeasuredBytes, MemoryUsage},
};
use serde::Serialize;

/// The cache of one sequence, measured.
#[derive(Clone, Debug, Serialize)]
pub(super) struct CacheSummary {
    /// Tokens in the cache.
    pub(super) tokens: usize,
    pub(super) codes_bytes: usize,
    /// Scales and zeros.
    pub(super) params_bytes: usize,
    /// Masks of promoted key channels.
    pub(super) masks_bytes: usize,
    /// Everything in full precision: sinks, residual, uncompressed formats.
    pub(super) residual_bytes: usize,
    /// In use.
    pub(super) total_bytes: usize,
    pub(super) allocated_bytes: usize,
    /// The memory model's predictions of the two.
    pub(super) predicted_total_bytes: usize,
    pub(super) predicted_allocated_bytes: usize,
    /// The same tokens in f16.
    pub(super) f16_bytes: usize,
    /// `f16_bytes / total_bytes`.
    pub(super) ratio: f64,
    pub(super) bits_per_element: f64,
    /// The model's context, and the ratio there.
    pub(super) context: usize,
    pub(super) ratio_at_context: f64,
}

impl CacheSummary {
    pub(super) fn new(
        spec: &PoolSpec,
        policy: &dyn CachePolicy,
        tokens: usize,
        context: usize,
        measured: MeasuredBytes,
        predicted: MemoryUsage,
    ) -> Self {
        let f16_bytes = memory::f16_bytes(spec, tokens);
        let total_bytes = measured.in_use();
        let at_context = memory::predict(spec, policy, context).in_use();
        Self {
            tokens,
            codes_bytes: measured.codes,
            params_bytes: measured.scales_and_zeros,
            masks_bytes: measured.channel_masks,
            residual_bytes: measured.full_precision,
            total_bytes,
            allocated_bytes: measured.allocated,
            predicted_total_bytes: predicted.in_use(),
            predicted_allocated_bytes: predicted.allocated(),
            f16_bytes,
            ratio: f16_bytes as f64 / total_bytes as f64,
            bits_per_element: 8.0 * total_bytes as f64 / memory::elements(spec, tokens) as f64,
            context,
            ratio_at_context: memory::f16_bytes(spec, context) as f64 / at_context as f64,
        }
    }

    /// The closing lines for people.
    pub(super) fn lines(&self) -> String {
        let masks = match self.masks_bytes {
            0 => String::new(),
            masks => format!(" + channel masks {}", bytes(masks)),
        };
        let mut text = format!(
            "cache after {} tokens: {} = codes {} + scales and zeros {}{masks} + full precision {}; \
             f16 would be {}: {:.2} times smaller, {:.2} bits per element ({} allocated)\n",
            self.tokens,
            bytes(self.total_bytes),
            bytes(self.codes_bytes),
            bytes(self.params_bytes),
            bytes(self.residual_bytes),
            bytes(self.f16_bytes),
            self.ratio,
            self.bits_per_element,
            bytes(self.allocated_bytes),
        );
        if self.codes_bytes == 0 && self.ratio_at_context > 1.01 {
            text += "so few tokens lie wholly in the full-precision residual; ";
        }
        text += &format!(
            "at the full context of {} tokens: {:.2} times smaller than f16\n",
            self.context, self.ratio_at_context
        );
        text
    }
}

/// A number of bytes for people.
pub(super) fn bytes(n: usize) -> String {
    match n {
        0..1024 => format!("{n} B"),
        1024..1_048_576 => format!("{:.1} KiB", n as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", n as f64 / 1_048_576.0),
        _ => format!("{:.2} GiB", n as f64 / 1_073_741_824.0),
    }
}
