//! Caches that go by one name.

use super::CacheConfigBuilder;
use crate::{Error, Format, Promotion, Result};

/// Formats of keys and values, and the sink tokens that belong to them, under one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamedCache {
    /// The name.
    pub name: &'static str,
    /// Format of the keys.
    pub key: Format,
    /// Format of the values.
    pub value: Format,
    /// `S`: first tokens in full precision.
    pub sink_length: usize,
}

/// `kivi2` keys of which a quarter of every group's channels is promoted.
const KIVI2_QUARTER: Format = Format { promoted: Some(Promotion::QUARTER), ..Format::KIVI2 };

impl NamedCache {
    /// Every cache with a name: each format of [`Format::NAMED`] for keys and values alike, and
    /// [`NamedCache::KIVI2_PLUS`].
    pub const ALL: [Self; 7] = [
        Self::KIVI2_PLUS,
        Self::KIVI2,
        Self::KIVI4,
        Self::KIVI8,
        Self::F16,
        Self::both("bf16", Format::BF16),
        Self::both("f32", Format::F32),
    ];

    /// `kivi2`: the paper's cache, 3 bits per element in the limit at `G = 32`.
    pub const KIVI2: Self = Self::both("kivi2", Format::KIVI2);

    /// `kivi4`: 5 bits per element in the limit at `G = 32`.
    pub const KIVI4: Self = Self::both("kivi4", Format::KIVI4);

    /// `kivi8`: 9 bits per element in the limit at `G = 32`.
    pub const KIVI8: Self = Self::both("kivi8", Format::KIVI8);

    /// `f16`: not quantized.
    pub const F16: Self = Self::both("f16", Format::F16);

    /// `kivi2+`: 2-bit keys with a quarter of the channels in 4 bits, 2-bit values, 32 sink tokens.
    /// 3.27 bits per element in the limit at `G = 32`; the most accurate of the caches under 4 bits
    /// that were measured (`docs/src/explanation/quality.md`).
    pub const KIVI2_PLUS: Self =
        Self { name: "kivi2+", key: KIVI2_QUARTER, value: Format::KIVI2, sink_length: 32 };

    const fn both(name: &'static str, format: Format) -> Self {
        Self { name, key: format, value: format, sink_length: 0 }
    }
}

impl std::fmt::Display for NamedCache {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name)
    }
}

impl std::str::FromStr for NamedCache {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|cache| cache.name == name).ok_or_else(|| {
            let names = Self::ALL.map(|cache| cache.name).join(", ");
            Error::config("cache", name, format!("one of {names}"))
        })
    }
}

impl CacheConfigBuilder {
    /// Formats and sinks of a named cache.
    ///
    /// ```
    /// use kivi_core::{CacheConfig, NamedCache};
    /// let config = CacheConfig::builder().named(NamedCache::KIVI2_PLUS).build()?;
    /// assert_eq!(config.key().to_string(), "kivi2+0.25");
    /// assert_eq!((config.value().to_string(), config.sink_length()), ("kivi2".into(), 32));
    /// # Ok::<(), kivi_core::Error>(())
    /// ```
    pub fn named(self, cache: NamedCache) -> Self {
        self.key(cache.key).value(cache.value).sink_length(cache.sink_length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CacheConfig, KeyValue, LayerSpec, PoolSpec};

    #[test]
    fn names_lead_back_and_every_cache_can_be_built() {
        for cache in NamedCache::ALL {
            assert_eq!(cache.name.parse::<NamedCache>().unwrap(), cache);
            let config = CacheConfig::builder().named(cache).build().unwrap();
            assert_eq!((config.key(), config.value()), (cache.key, cache.value));
        }
        let message = "kivi3+".parse::<NamedCache>().unwrap_err().to_string();
        assert!(message.contains("kivi3+") && message.contains("kivi2+, kivi2"), "{message}");
    }

    /// Keys: 2 bits, half a bit for a quarter of the channels, 32/G of scale and zero, 1/G of mask;
    /// values 2 bits and 32/G.
    #[test]
    fn kivi2_plus_takes_at_most_3_3_bits_in_the_limit() {
        let config = CacheConfig::builder().named(NamedCache::KIVI2_PLUS).build().unwrap();
        for head_dim in [64, 128] {
            let layer = LayerSpec::new(&config, 3, head_dim);
            let spec = PoolSpec::new(config.clone(), vec![layer.clone()], 1, 1).unwrap();
            let tokens = KeyValue::both(1 << 20);
            let bytes = spec.code_bytes(&layer, tokens)
                + spec.param_bytes(&layer, tokens)
                + spec.mask_bytes(&layer, tokens);
            let elements = 2 * 3 * head_dim * (1 << 20);
            let bits = 8.0 * bytes as f64 / elements as f64;
            assert_eq!(bits, (3.0 + 0.5 + 1.0 / 32.0 + 3.0) / 2.0);
            assert!(bits <= 3.3);
        }
    }
}
