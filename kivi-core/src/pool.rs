//! The shape of a cache pool: its layers, and how much it may hold.

use crate::{Bits, CacheConfig, Error, Format, KeyValue, Promotion, Result, words_for};

/// One layer's part of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LayerSpec {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Format of keys and values.
    pub format: KeyValue<Format>,
    /// Sliding window: a query at `t` sees only positions above `t − window`.
    pub window: Option<usize>,
}

impl LayerSpec {
    /// A layer with the configuration's formats and no window.
    pub fn new(config: &CacheConfig, kv_heads: usize, head_dim: usize) -> Self {
        let format = KeyValue::new(config.key(), config.value());
        Self { kv_heads, head_dim, format, window: None }
    }

    /// Whether keys and values are quantized, each for itself.
    pub fn packs(&self) -> KeyValue<bool> {
        self.format.map(|format| format.bits.is_some())
    }

    /// `⌈p·D⌉`, how many key channels of a group are promoted, if the format has such.
    pub fn promoted_channels(&self) -> Option<usize> {
        self.format.keys.promoted.map(|promotion| promotion.count(self.head_dim))
    }

    /// Whether position `token` is visible to a query at `query`.
    pub fn sees(&self, query: usize, token: usize) -> bool {
        token <= query && self.window.is_none_or(|window| query - token < window)
    }
}

/// A pool: the configuration, the layers and the capacity.
///
/// Layers that are equal form a *layer group*: their pages are allocated in lock-step, so a group
/// has one page table per sequence, and page `p` of a group stands for page `p` of each of its
/// layers.
#[derive(Clone, Debug, PartialEq)]
pub struct PoolSpec {
    config: CacheConfig,
    layers: Vec<LayerSpec>,
    groups: Vec<usize>,
    group_count: usize,
    max_pages: usize,
    max_sequences: usize,
}

impl PoolSpec {
    /// A pool of at most `max_sequences` sequences and `max_pages` pages per layer. Memory is
    /// allocated as it is needed.
    ///
    /// A layer whose window is at most `R` is kept in full precision: its codes would hardly ever
    /// be read.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] when there is no layer, a dimension is 0, a size overflows, or
    /// channels are promoted that cannot be.
    pub fn new(
        config: CacheConfig,
        mut layers: Vec<LayerSpec>,
        max_pages: usize,
        max_sequences: usize,
    ) -> Result<Self> {
        if layers.is_empty() {
            return Err(Error::config("layers", 0, "at least one"));
        }
        if max_sequences == 0 {
            return Err(Error::config("sequences", 0, "at least one"));
        }
        for layer in &mut layers {
            let dims = [layer.kv_heads, layer.head_dim];
            if dims.iter().any(|&n| n == 0 || n > 1 << 16) {
                let allowed = "kv heads and head_dim between 1 and 65536";
                return Err(Error::config("layer", format!("{dims:?}"), allowed));
            }
            layer.format.keys.check_keys()?;
            layer.format.values.check_values()?;
            if layer.window == Some(0) {
                return Err(Error::config("window", 0, "at least 1"));
            }
            if layer.window.is_some_and(|window| window <= config.residual_length()) {
                layer.format = layer.format.map(Format::full);
            }
        }
        let mut distinct: Vec<&LayerSpec> = Vec::new();
        let groups = layers
            .iter()
            .map(|layer| {
                distinct.iter().position(|known| *known == layer).unwrap_or_else(|| {
                    distinct.push(layer);
                    distinct.len() - 1
                })
            })
            .collect();
        let group_count = distinct.len();
        Ok(Self { config, layers, groups, group_count, max_pages, max_sequences })
    }

    /// A pool for `sequences` sequences of up to `tokens` tokens each.
    ///
    /// # Errors
    /// As [`PoolSpec::new`].
    pub fn for_context(
        config: CacheConfig,
        layers: Vec<LayerSpec>,
        sequences: usize,
        tokens: usize,
    ) -> Result<Self> {
        let pages = tokens.div_ceil(config.page_tokens());
        let max_pages = pages.checked_mul(sequences).filter(|&n| u32::try_from(n).is_ok());
        let max_pages = max_pages.ok_or_else(|| {
            Error::config("context", tokens, format!("fewer tokens for {sequences} sequences"))
        })?;
        Self::new(config, layers, max_pages, sequences)
    }

    /// The cache configuration.
    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Every layer, with the formats it really uses.
    pub fn layers(&self) -> &[LayerSpec] {
        &self.layers
    }

    /// The layer group of a layer.
    pub fn group_of(&self, layer: usize) -> usize {
        self.groups[layer]
    }

    /// How many layer groups there are.
    pub fn group_count(&self) -> usize {
        self.group_count
    }

    /// A layer of a group; all are equal.
    pub fn group_layer(&self, group: usize) -> &LayerSpec {
        let first = self.groups.iter().position(|&g| g == group);
        &self.layers[first.unwrap_or_default()]
    }

    /// How many layers a group has.
    pub fn group_layers(&self, group: usize) -> usize {
        self.groups.iter().filter(|&&g| g == group).count()
    }

    /// Pages each layer may have.
    pub fn max_pages(&self) -> usize {
        self.max_pages
    }

    /// Sequences the pool may hold.
    pub fn max_sequences(&self) -> usize {
        self.max_sequences
    }

    /// First position of page `index`.
    pub fn page_start(&self, index: usize) -> usize {
        self.config.sink_length() + index * self.config.page_tokens()
    }

    /// Pages that cover the positions from the sinks up to `end`.
    pub fn pages_until(&self, end: usize) -> usize {
        end.saturating_sub(self.config.sink_length()).div_ceil(self.config.page_tokens())
    }

    /// Room in a residual for that many tokens: keys come in whole groups, so that a backend can
    /// keep the tokens of a group side by side, as their codes will be.
    pub fn whole_groups(&self, tokens: KeyValue<usize>) -> KeyValue<usize> {
        KeyValue::new(tokens.keys.next_multiple_of(self.config.group_size()), tokens.values)
    }

    /// Bytes of the codes of `tokens` quantized keys and values of a layer, with those of the second
    /// plane of promoted channels; 0 for a full format.
    pub fn code_bytes(&self, layer: &LayerSpec, tokens: KeyValue<usize>) -> usize {
        let plane = |bits, channels| words_for(bits, tokens.keys) * channels;
        let promoted = layer.promoted_channels().map_or(0, |count| plane(Bits::Two, count));
        let words = KeyValue::new(
            layer.format.keys.bits.map_or(0, |bits| plane(bits, layer.head_dim)) + promoted,
            layer
                .format
                .values
                .bits
                .map_or(0, |bits| words_for(bits, layer.head_dim) * tokens.values),
        );
        4 * layer.kv_heads * (words.keys + words.values)
    }

    /// Bytes of their scales and zeros, two f16 per group.
    pub fn param_bytes(&self, layer: &LayerSpec, tokens: KeyValue<usize>) -> usize {
        let g = self.config.group_size();
        let groups = KeyValue::new(
            layer.format.keys.bits.map_or(0, |_| tokens.keys.div_ceil(g) * layer.head_dim),
            layer.format.values.bits.map_or(0, |_| tokens.values * layer.head_dim.div_ceil(g)),
        );
        4 * layer.kv_heads * (groups.keys + groups.values)
    }

    /// Bytes of the masks of the promoted channels of `tokens` quantized keys, whole words for every
    /// group.
    pub fn mask_bytes(&self, layer: &LayerSpec, tokens: KeyValue<usize>) -> usize {
        let groups = tokens.keys.div_ceil(self.config.group_size());
        let words = layer.promoted_channels().map_or(0, |_| Promotion::mask_words(layer.head_dim));
        4 * layer.kv_heads * groups * words
    }

    /// Bytes of a page in all layers of a group.
    pub fn page_bytes(&self, group: usize) -> usize {
        self.layer_page_bytes(self.group_layer(group)) * self.group_layers(group)
    }

    /// Bytes of a page in one layer.
    pub(crate) fn layer_page_bytes(&self, layer: &LayerSpec) -> usize {
        let tokens = KeyValue::both(self.config.page_tokens());
        let full = tokens.zip(layer.packs()).map(|(tokens, packs)| if packs { 0 } else { tokens });
        self.code_bytes(layer, tokens)
            + self.param_bytes(layer, tokens)
            + self.mask_bytes(layer, tokens)
            + self.full_bytes(layer, full)
    }

    /// Bytes of a residual slot with room for `capacity` tokens, and of its sinks, in all layers.
    pub fn slot_bytes(&self, capacity: KeyValue<usize>) -> usize {
        self.layers.iter().map(|layer| self.layer_slot_bytes(layer, capacity)).sum()
    }

    /// The same in one layer.
    pub(crate) fn layer_slot_bytes(&self, layer: &LayerSpec, capacity: KeyValue<usize>) -> usize {
        let sinks = self.config.sink_length();
        let room = capacity.zip(layer.packs()).map(|(n, packs)| if packs { n } else { 0 });
        self.full_bytes(layer, room.map(|room| room + sinks))
    }

    /// Bytes of `tokens` keys and values of a layer in full precision.
    pub fn full_bytes(&self, layer: &LayerSpec, tokens: KeyValue<usize>) -> usize {
        let stored = layer.format.map(|format| format.store.bytes());
        layer.kv_heads
            * layer.head_dim
            * (stored.keys * tokens.keys + stored.values * tokens.values)
    }
}
