//! One row of the attention benchmark, and the bytes it takes.

use super::options::{Formats, Heads};
use kivi::{CacheConfig, CachePolicy, KeyValue, KiviPolicy, LayerSpec, PoolSpec, Result};

/// What is measured: one step of `batch` sequences, `queries` new tokens each.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Shape {
    /// Tokens the last query sees, itself included.
    pub(super) tokens: usize,
    pub(super) heads: Heads,
    pub(super) head_dim: usize,
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) formats: Formats,
}

/// Bytes of one row of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Bytes {
    /// Held by one layer before the step.
    pub(super) held: usize,
    /// What attention has to read of one layer: codes, scales and zeros of the packed tokens its
    /// queries see, and the tokens they see in full precision.
    pub(super) read: usize,
    /// Allocated by one layer.
    pub(super) allocated: usize,
    /// One sequence of a layer in canonical form.
    pub(super) canonical: usize,
}

impl Bytes {
    /// Layers that together take at least `bytes` to read.
    pub(super) fn layers_for(&self, bytes: usize) -> usize {
        bytes.div_ceil(self.read).max(1)
    }

    /// As many of `layers` as need no more than `limit` bytes; one if none does.
    pub(super) fn layers_within(&self, limit: usize, layers: usize) -> usize {
        let held = limit.saturating_sub(self.canonical) / self.allocated.max(1);
        let timed = limit / self.allocated.saturating_add(self.read).max(1);
        layers.min(held).min(timed).max(1)
    }

    /// Memory of a measurement over so many layers: the cache, and beside it a canonical layer, when
    /// it is filled and checked, or as much memory to read, when it is timed.
    pub(super) fn needed(&self, layers: usize) -> usize {
        let cache = self.allocated.saturating_mul(layers);
        cache.saturating_add(self.canonical.max(self.read.saturating_mul(layers)))
    }
}

impl Shape {
    /// Tokens in the cache before the step.
    pub(super) fn filled(&self) -> usize {
        self.tokens - self.queries
    }

    /// A pool of some layers.
    pub(super) fn pool(&self, config: &CacheConfig, layers: usize) -> Result<PoolSpec> {
        let layer = LayerSpec::new(config, self.heads.kv, self.head_dim);
        PoolSpec::for_context(config.clone(), vec![layer; layers], self.batch, self.tokens)
    }

    pub(super) fn bytes(&self, config: &CacheConfig) -> Result<Bytes> {
        let spec = self.pool(config, 1)?;
        let (layer, policy) = (spec.group_layer(0), KiviPolicy::new(config));
        let sinks = config.sink_length();
        let packs = layer.packs();
        // Of `tokens` tokens: codes up to `packed`, full precision from `kept` on and in the sinks.
        let of = |tokens: usize, packed: KeyValue<usize>, kept: KeyValue<usize>| {
            let packed = packed.map(|end| end - sinks);
            let full = kept.map(|kept| tokens.min(sinks) + tokens.saturating_sub(kept));
            let full = full.zip(packs).map(|(full, packs)| if packs { full } else { tokens });
            let params = spec.param_bytes(layer, packed) + spec.mask_bytes(layer, packed);
            (spec.code_bytes(layer, packed) + params, full)
        };
        let bytes = |(packed, full)| self.batch * (packed + spec.full_bytes(layer, full));
        // The queries' views lie between these two; a token counts in every form it is seen in.
        let first = policy.packed(self.filled());
        let last = policy.packed(self.tokens - 1);
        let held = of(self.filled(), first, first);
        let read = of(self.tokens, last, first);

        // Pages, and the residual at its largest.
        let pages = KeyValue::both(spec.pages_until(self.tokens) * config.page_tokens());
        let room = spec.whole_groups(policy.residual_capacity().map(|n| n + self.queries + sinks));
        let only = |keep: bool, tokens: KeyValue<usize>| {
            tokens.zip(packs).map(|(tokens, packs)| if packs == keep { tokens } else { 0 })
        };
        let allocated = spec.code_bytes(layer, pages)
            + spec.param_bytes(layer, pages)
            + spec.mask_bytes(layer, pages)
            + spec.full_bytes(layer, only(false, pages))
            + spec.full_bytes(layer, only(true, room));
        let elements = |full: KeyValue<usize>| (full.keys + full.values) * layer.kv_heads;
        Ok(Bytes {
            held: bytes(held),
            read: bytes(read),
            allocated: self.batch * allocated,
            canonical: read.0 + 4 * elements(read.1) * self.head_dim,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(tokens: usize, queries: usize, formats: &str) -> (Shape, CacheConfig) {
        let formats: Formats = formats.parse().unwrap();
        let heads = Heads { query: 4, kv: 2 };
        let shape = Shape { tokens, heads, head_dim: 64, batch: 3, queries, formats };
        let KeyValue { keys, values } = formats.0;
        (shape, CacheConfig::builder().key(keys).value(values).build().unwrap())
    }

    #[test]
    fn bytes_of_an_f16_row() {
        let (shape, config) = shape(300, 1, "f16");
        let bytes = shape.bytes(&config).unwrap();
        // 3 sequences, keys and values, 2 heads of 64 channels, 2 bytes each.
        assert_eq!(bytes.read, 3 * 300 * 2 * 2 * 64 * 2);
        assert_eq!(bytes.held, 3 * 299 * 2 * 2 * 64 * 2);
        assert_eq!(bytes.allocated, 3 * 320 * 2 * 2 * 64 * 2, "whole pages of 64");
        assert_eq!(bytes.layers_for(bytes.read * 4), 4);
        assert_eq!(bytes.layers_for(bytes.read * 4 + 1), 5);
    }

    #[test]
    fn bytes_of_a_quantized_row() {
        let (shape, config) = shape(300, 1, "kivi4:kivi2");
        let bytes = shape.bytes(&config).unwrap();
        // The query at 299 sees 256 keys and 171 values as codes, 44 and 129 in full precision.
        // A key of 64 channels is 32 bytes of codes and 2·64·2/32 of scales and zeros; a value is
        // 16 and 2·2·2.
        let head = 256 * (32 + 8) + 171 * (16 + 8) + (44 + 129) * 64 * 2;
        assert_eq!(bytes.read, 3 * 2 * head);
        let held = 256 * (32 + 8) + 171 * (16 + 8) + (43 + 128) * 64 * 2;
        assert_eq!(bytes.held, 3 * 2 * held);
        assert!(bytes.allocated >= bytes.held);
    }

    #[test]
    fn what_queries_see_in_two_forms_counts_twice() {
        let (shape, config) = shape(258, 3, "kivi8");
        let bytes = shape.bytes(&config).unwrap();
        // Queries at 255, 256 and 257: the first sees 128 keys and 127 values as codes, the last
        // 256 and 129. Full precision from 128 and 127 on.
        let packed = 256 * (64 + 8) + 129 * (64 + 8);
        let full = (258 - 128 + 258 - 127) * 64 * 2;
        assert_eq!(bytes.read, 3 * 2 * (packed + full));
    }
}
