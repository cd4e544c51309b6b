//! Where everything of one layer lies: sizes and offsets, in 32-bit words.
//!
//! Device memory of a layer is one array of words, the *arena*, which holds pages and slots. A
//! page is
//!
//! | part | shape, in words |
//! |---|---|
//! | key codes | `[kv_heads, groups, G/P · D]`, each group in the order of [`order`](crate::order) |
//! | key parameters | `[kv_heads, groups, D]`, scale in the lower half, zero in the upper |
//! | channel masks | `[kv_heads, groups, ⌈D/32⌉]` |
//! | promoted codes | `[kv_heads, groups, G/16, count]`, canonical order |
//! | value codes | `[kv_heads, page_tokens/P, ⌈D/P⌉·P]` |
//! | value parameters | `[kv_heads, page_tokens, ⌈D/G⌉]` |
//! | full keys, full values | `[page_tokens, kv_heads · D]` of an uncompressed format |
//!
//! with `P = 32 / bits` codes in a word. A slot is `[S + capacity, kv_heads · D]` keys, then values,
//! the residual being a ring: position `j` lies in row `S + (j − S) mod capacity`.

use kivi_core::{Bits, Error, KeyValue, LayerSpec, PoolSpec, Promotion, Result, StoreDtype};

/// Type of what is not quantized, as kernels know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// Two f16 in a word.
    F16,
    /// Two bf16 in a word.
    Bf16,
    /// One f32 in a word.
    F32,
}

impl Store {
    /// Elements in a word.
    pub const fn per_word(self) -> usize {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 1,
        }
    }
}

impl From<StoreDtype> for Store {
    fn from(store: StoreDtype) -> Self {
        match store {
            StoreDtype::F16 => Self::F16,
            StoreDtype::Bf16 => Self::Bf16,
            StoreDtype::F32 => Self::F32,
        }
    }
}

/// Cubes along one axis that every device can start.
pub(crate) const MAX_CUBES: usize = 65_535;

/// Sizes of one layer. Kernels are compiled for one shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// `D`: channels of a head.
    pub head_dim: usize,
    /// `G`
    pub group: usize,
    /// Tokens of a page.
    pub page_tokens: usize,
    /// `S`
    pub sinks: usize,
    /// Bits of a key's code; 0 for an uncompressed format.
    pub key_bits: usize,
    /// Bits of a value's code; 0 for an uncompressed format.
    pub value_bits: usize,
    /// Type of full-precision keys.
    pub key_store: Store,
    /// Type of full-precision values.
    pub value_store: Store,
    /// Promoted channels of a group of keys; 0 without.
    pub promoted: usize,
}

impl Shape {
    /// The shape of a layer of a pool.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when elements of 16 bits do not fill words: head_dim is odd.
    pub fn new(backend: &'static str, pool: &PoolSpec, layer: &LayerSpec) -> Result<Self> {
        let format = layer.format;
        let sixteen = format.keys.store.bytes() == 2 || format.values.store.bytes() == 2;
        if sixteen && !layer.head_dim.is_multiple_of(2) {
            let what = format!("an odd head_dim ({})", layer.head_dim);
            return Err(Error::Unsupported { backend, what });
        }
        if layer.kv_heads > MAX_CUBES {
            let what = format!("{} kv heads (at most {MAX_CUBES})", layer.kv_heads);
            return Err(Error::Unsupported { backend, what });
        }
        let config = pool.config();
        let bits = format.map(|format| format.bits.map_or(0, Bits::get));
        Ok(Self {
            kv_heads: layer.kv_heads,
            head_dim: layer.head_dim,
            group: config.group_size(),
            page_tokens: config.page_tokens(),
            sinks: config.sink_length(),
            key_bits: bits.keys,
            value_bits: bits.values,
            key_store: format.keys.store.into(),
            value_store: format.values.store.into(),
            promoted: layer.promoted_channels().unwrap_or(0),
        })
    }

    /// Whether keys and values are quantized.
    pub fn packs(&self) -> KeyValue<bool> {
        KeyValue::new(self.key_bits > 0, self.value_bits > 0)
    }

    /// Groups of tokens in a page.
    pub const fn groups(&self) -> usize {
        self.page_tokens / self.group
    }

    /// Groups of channels of a value.
    pub const fn channel_groups(&self) -> usize {
        self.head_dim.div_ceil(self.group)
    }

    /// Key codes in a word.
    pub const fn keys_per_word(&self) -> usize {
        match self.key_bits {
            0 => 32,
            bits => 32 / bits,
        }
    }

    /// Value codes in a word.
    pub const fn values_per_word(&self) -> usize {
        match self.value_bits {
            0 => 32,
            bits => 32 / bits,
        }
    }

    /// Rows of words that hold whole chunks of channels of a group of keys.
    pub const fn chunks(&self) -> usize {
        self.head_dim / self.keys_per_word()
    }

    /// Channels of a group of keys after the chunks, in canonical order.
    pub const fn rest(&self) -> usize {
        self.head_dim % self.keys_per_word()
    }

    /// Words of the codes of a group of keys of a head.
    pub const fn key_group_words(&self) -> usize {
        if self.key_bits == 0 { 0 } else { self.group / self.keys_per_word() * self.head_dim }
    }

    /// Words of the mask of a group of keys of a head.
    pub const fn mask_words(&self) -> usize {
        if self.promoted == 0 { 0 } else { Promotion::mask_words(self.head_dim) }
    }

    /// Words of the lower codes of a group of keys of a head.
    pub const fn low_group_words(&self) -> usize {
        self.group / 16 * self.promoted
    }

    /// Words of a row of values of a head.
    pub const fn value_row_words(&self) -> usize {
        let per_word = self.values_per_word();
        if self.value_bits == 0 { 0 } else { self.head_dim.div_ceil(per_word) * per_word }
    }

    /// Rows of words of the values of a page.
    pub const fn value_rows(&self) -> usize {
        self.page_tokens / self.values_per_word()
    }

    /// Words of a full-precision key: all heads of a token.
    pub const fn key_width(&self) -> usize {
        self.kv_heads * self.head_dim / self.key_store.per_word()
    }

    /// Words of a full-precision value: all heads of a token.
    pub const fn value_width(&self) -> usize {
        self.kv_heads * self.head_dim / self.value_store.per_word()
    }

    /// First word of the key parameters in a page.
    pub const fn key_params(&self) -> usize {
        self.kv_heads * self.groups() * self.key_group_words()
    }

    /// First word of the channel masks in a page.
    pub const fn key_masks(&self) -> usize {
        let params = if self.key_bits == 0 { 0 } else { self.head_dim };
        self.key_params() + self.kv_heads * self.groups() * params
    }

    /// First word of the codes of promoted channels in a page.
    pub const fn key_lows(&self) -> usize {
        self.key_masks() + self.kv_heads * self.groups() * self.mask_words()
    }

    /// First word of the value codes in a page.
    pub const fn value_codes(&self) -> usize {
        self.key_lows() + self.kv_heads * self.groups() * self.low_group_words()
    }

    /// First word of the value parameters in a page.
    pub const fn value_params(&self) -> usize {
        let rows = if self.value_bits == 0 { 0 } else { self.value_rows() };
        self.value_codes() + self.kv_heads * rows * self.value_row_words()
    }

    /// First word of the full-precision keys in a page.
    pub const fn full_keys(&self) -> usize {
        let params = if self.value_bits == 0 { 0 } else { self.channel_groups() };
        self.value_params() + self.kv_heads * self.page_tokens * params
    }

    /// First word of the full-precision values in a page.
    pub const fn full_values(&self) -> usize {
        let keys = if self.key_bits == 0 { self.page_tokens * self.key_width() } else { 0 };
        self.full_keys() + keys
    }

    /// Words of a page.
    pub const fn page_words(&self) -> usize {
        let values = if self.value_bits == 0 { self.page_tokens * self.value_width() } else { 0 };
        self.full_values() + values
    }

    /// Words of a slot whose residual holds `capacity` tokens: keys, then values. A format that is
    /// not quantized has no residual, only sinks.
    pub fn slot_words(&self, capacity: KeyValue<usize>) -> KeyValue<usize> {
        let rows = capacity.zip(self.packs()).map(|(n, packs)| if packs { n } else { 0 });
        let rows = rows.map(|rows| rows + self.sinks);
        KeyValue::new(rows.keys * self.key_width(), rows.values * self.value_width())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kivi_core::{CacheConfig, Format};

    /// A page takes exactly the bytes of the canonical form.
    #[test]
    fn pages_take_the_bytes_of_the_memory_model() {
        let formats = [Format::KIVI2, Format::KIVI4, Format::KIVI8, Format::F16, Format::F32];
        let promoted = Format::KIVI2.promote(0.25).unwrap();
        for head_dim in [20, 64, 72, 80, 128, 256] {
            for key in formats.into_iter().chain([promoted]) {
                for value in formats {
                    let builder = CacheConfig::builder().key(key).value(value).sink_length(4);
                    let config = builder.build().unwrap();
                    let layer = LayerSpec::new(&config, 3, head_dim);
                    let pool = PoolSpec::new(config, vec![layer.clone()], 4, 1).unwrap();
                    let shape = Shape::new("test", &pool, &layer).unwrap();
                    let tokens = KeyValue::both(shape.page_tokens);
                    let full = layer.packs().map(|packs| if packs { 0 } else { tokens.keys });
                    let expected = pool.code_bytes(&layer, tokens)
                        + pool.param_bytes(&layer, tokens)
                        + pool.mask_bytes(&layer, tokens)
                        + pool.full_bytes(&layer, full);
                    assert_eq!(4 * shape.page_words(), expected, "{key} {value} {head_dim}");
                }
            }
        }
    }

    #[test]
    fn odd_head_dims_are_refused() {
        let config = CacheConfig::builder().build().unwrap();
        let layer = LayerSpec::new(&config, 1, 71);
        let pool = PoolSpec::new(config, vec![layer.clone()], 4, 1).unwrap();
        let error = Shape::new("test", &pool, &layer).unwrap_err().to_string();
        assert_eq!(error, "backend test does not support an odd head_dim (71)");
    }
}
