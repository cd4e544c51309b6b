//! The cache configuration, valid by construction.

mod named;

pub use named::NamedCache;

use crate::{Error, Format, Result};

/// When values leave the full-precision residual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ValueResidual {
    /// Each value on its own, when it is `residual_length` tokens old (the paper, Algorithm 1).
    #[default]
    Window,
    /// A whole block at once, together with its keys.
    Block,
}

/// What a cache is: formats, group size, residual. Every value has been checked.
///
/// ```
/// use kivi_core::{CacheConfig, Format};
/// let config = CacheConfig::builder().key(Format::KIVI4).value(Format::KIVI2).build()?;
/// assert_eq!((config.group_size(), config.residual_length()), (32, 128));
/// assert!(CacheConfig::builder().group_size(48).build().is_err());
/// # Ok::<(), kivi_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CacheConfig {
    key: Format,
    value: Format,
    group_size: usize,
    residual_length: usize,
    sink_length: usize,
    value_residual: ValueResidual,
    rollback_length: usize,
    page_tokens: usize,
    segment_tokens: Option<usize>,
}

/// No length of a configuration may exceed this: it keeps every sum of positions far from overflow.
const MAX_LENGTH: usize = 1 << 24;

impl CacheConfig {
    /// A builder with the paper's settings: 2 bits, `G = 32`, `R = 128`, no sinks.
    pub fn builder() -> CacheConfigBuilder {
        CacheConfigBuilder::default()
    }

    /// Default format of the keys; a [`LayerSpec`](crate::LayerSpec) may differ.
    pub fn key(&self) -> Format {
        self.key
    }

    /// Default format of the values.
    pub fn value(&self) -> Format {
        self.value
    }

    /// `G`: elements that share a scale and a zero; tokens for keys, channels for values.
    pub fn group_size(&self) -> usize {
        self.group_size
    }

    /// `R`: key tokens quantized at once, and the newest values kept in full precision.
    pub fn residual_length(&self) -> usize {
        self.residual_length
    }

    /// `S`: the first tokens, kept in full precision for ever.
    pub fn sink_length(&self) -> usize {
        self.sink_length
    }

    /// When values are quantized.
    pub fn value_residual(&self) -> ValueResidual {
        self.value_residual
    }

    /// How many tokens a truncation can take back exactly at any time.
    pub fn rollback_length(&self) -> usize {
        self.rollback_length
    }

    /// Tokens of a page: a multiple of `G` that divides `R`.
    pub fn page_tokens(&self) -> usize {
        self.page_tokens
    }

    /// `C`: tokens of a prompt that see each other in full precision; `None` is the whole prompt.
    pub fn segment_tokens(&self) -> Option<usize> {
        self.segment_tokens
    }
}

/// Builds a [`CacheConfig`].
#[derive(Clone, Debug)]
#[must_use]
pub struct CacheConfigBuilder {
    config: CacheConfig,
    page_tokens: Option<usize>,
}

impl Default for CacheConfigBuilder {
    fn default() -> Self {
        let config = CacheConfig {
            key: Format::KIVI2,
            value: Format::KIVI2,
            group_size: 32,
            residual_length: 128,
            sink_length: 0,
            value_residual: ValueResidual::Window,
            rollback_length: 0,
            page_tokens: 64,
            segment_tokens: None,
        };
        Self { config, page_tokens: None }
    }
}

impl CacheConfigBuilder {
    /// Format of the keys.
    pub fn key(mut self, format: Format) -> Self {
        self.config.key = format;
        self
    }

    /// Format of the values.
    pub fn value(mut self, format: Format) -> Self {
        self.config.value = format;
        self
    }

    /// `G` ∈ {16, 32, 64, 128}.
    pub fn group_size(mut self, tokens: usize) -> Self {
        self.config.group_size = tokens;
        self
    }

    /// `R`: a positive multiple of `G`.
    pub fn residual_length(mut self, tokens: usize) -> Self {
        self.config.residual_length = tokens;
        self
    }

    /// `S`: up to 2²⁴ tokens.
    pub fn sink_length(mut self, tokens: usize) -> Self {
        self.config.sink_length = tokens;
        self
    }

    /// When values are quantized.
    pub fn value_residual(mut self, mode: ValueResidual) -> Self {
        self.config.value_residual = mode;
        self
    }

    /// How many tokens must be exactly removable at any time, up to 2²⁴.
    pub fn rollback_length(mut self, tokens: usize) -> Self {
        self.config.rollback_length = tokens;
        self
    }

    /// Tokens of a page: a multiple of `G` that divides `R`. Default: the largest one up to 64, or
    /// `G` if that is more.
    pub fn page_tokens(mut self, tokens: usize) -> Self {
        self.page_tokens = Some(tokens);
        self
    }

    /// `C`: a positive multiple of `R`, or `None` for the whole prompt.
    pub fn segment_tokens(mut self, tokens: Option<usize>) -> Self {
        self.config.segment_tokens = tokens;
        self
    }

    /// Checks everything.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] that names the option, its value and what is allowed.
    pub fn build(self) -> Result<CacheConfig> {
        let mut config = self.config;
        config.key.check_keys()?;
        config.value.check_values()?;
        let (g, r) = (config.group_size, config.residual_length);
        if ![16, 32, 64, 128].contains(&g) {
            return Err(Error::config("group-size", g, "16, 32, 64 or 128"));
        }
        if r == 0 || !r.is_multiple_of(g) || r > MAX_LENGTH {
            let allowed = format!("a positive multiple of the group size {g}, up to {MAX_LENGTH}");
            return Err(Error::config("residual-length", r, allowed));
        }
        for (name, length) in
            [("sink-length", config.sink_length), ("rollback-length", config.rollback_length)]
        {
            if length > MAX_LENGTH {
                return Err(Error::config(name, length, format!("at most {MAX_LENGTH}")));
            }
        }
        if let Some(c) = config.segment_tokens
            && (c == 0 || !c.is_multiple_of(r) || c > MAX_LENGTH)
        {
            let allowed =
                format!("a positive multiple of the residual length {r}, up to {MAX_LENGTH}");
            return Err(Error::config("segment-tokens", c, allowed));
        }
        let legal = |page: usize| page > 0 && page.is_multiple_of(g) && r.is_multiple_of(page);
        config.page_tokens = match self.page_tokens {
            Some(page) if legal(page) => page,
            Some(page) => {
                let allowed = format!(
                    "a multiple of the group size {g} that divides the residual length {r}"
                );
                return Err(Error::config("page-tokens", page, allowed));
            }
            None => (g..=g.max(64)).rev().find(|&page| legal(page)).unwrap_or(g),
        };
        Ok(config)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(builder: CacheConfigBuilder) -> String {
        builder.build().unwrap_err().to_string()
    }

    #[test]
    fn refusals_say_what_is_allowed() {
        let b = CacheConfig::builder;
        assert_eq!(message(b().group_size(0)), "invalid group-size: 0 (16, 32, 64 or 128)");
        assert!(message(b().group_size(48)).contains("48"));
        assert!(message(b().residual_length(0)).contains("multiple of the group size 32"));
        assert!(message(b().residual_length(100)).contains("residual-length: 100"));
        assert!(message(b().residual_length(96).page_tokens(64)).contains("page-tokens: 64"));
        assert!(message(b().segment_tokens(Some(64))).contains("residual length 128"));
        assert!(message(b().sink_length(usize::MAX)).contains("sink-length"));
        assert!(message(b().rollback_length(usize::MAX)).contains("rollback-length"));
    }

    #[test]
    fn only_2_bit_keys_have_promoted_channels() {
        let (b, promoted) = (CacheConfig::builder, Format::KIVI2.promote(0.25).unwrap());
        assert_eq!(b().key(promoted).build().unwrap().key(), promoted);
        assert_eq!(
            message(b().value(promoted)),
            "invalid cache-type-v: kivi2+0.25 (only keys have promoted channels, values take the \
             format without)"
        );
        // The fields are public.
        let wide = Format { promoted: promoted.promoted, ..Format::KIVI4 };
        assert!(message(b().key(wide)).contains("kivi4+0.25"));
        let full = Format { promoted: promoted.promoted, ..Format::F16 };
        assert!(message(b().key(full)).contains("key-promote: f16+0.25"));
    }

    #[test]
    fn default_page_is_the_largest_legal_one_up_to_64() {
        let page = |g, r| {
            let config = CacheConfig::builder().group_size(g).residual_length(r).build().unwrap();
            config.page_tokens()
        };
        assert_eq!(page(32, 128), 64);
        assert_eq!(page(32, 32), 32);
        assert_eq!(page(32, 96), 32);
        assert_eq!(page(16, 48), 48);
        assert_eq!(page(128, 128), 128);
    }
}
