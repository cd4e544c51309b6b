//! Options of the cache.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use kivi::{CacheConfig, Format, Promotion, ValueResidual, models::ModelConfig};

/// `R` of the paper's experiments.
const DEFAULT_RESIDUAL_LENGTH: usize = 128;

/// Options of the cache.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheOptions {
    /// Format of the keys: kivi2, kivi4, kivi8, f16, bf16 or f32 [default: kivi2, or kivi4 for
    /// models whose query heads share kv heads (GQA)].
    #[arg(long, env = "KIVI_CACHE_TYPE_K", value_name = "TYPE")]
    cache_type_k: Option<Format>,
    /// Format of the values [default: kivi2].
    #[arg(long, env = "KIVI_CACHE_TYPE_V", value_name = "TYPE")]
    cache_type_v: Option<Format>,
    /// Share of the channels of every group of kivi2 keys that have 4 bits instead of 2, those with
    /// the largest range: 0.25 for a quarter. The same as kivi2+SHARE as the format of the keys.
    #[arg(long, env = "KIVI_KEY_PROMOTE", value_name = "SHARE")]
    key_promote: Option<Promotion>,
    /// Elements that share a scale and a zero: 16, 32, 64 or 128.
    #[arg(long, env = "KIVI_GROUP_SIZE", default_value_t = 32, value_name = "G")]
    group_size: usize,
    /// Newest tokens in full precision, a multiple of the group size.
    #[arg(long, env = "KIVI_RESIDUAL_LENGTH", default_value_t = DEFAULT_RESIDUAL_LENGTH, value_name = "R")]
    residual_length: usize,
    /// First tokens in full precision.
    #[arg(long, env = "KIVI_SINK_LENGTH", default_value_t = 0, value_name = "S")]
    sink_length: usize,
    /// When values are quantized: each as it leaves the window of R, or in blocks with their keys.
    #[arg(long, env = "KIVI_VALUE_RESIDUAL", value_enum, default_value = "window")]
    value_residual: ValueResidualName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ValueResidualName {
    Window,
    Block,
}

/// Formats of keys and values by default: 2 bits, but 4 bits for keys that several query heads
/// share, which suffer more (the authors recommend the same).
pub(super) fn default_formats(model: &ModelConfig) -> (Format, Format) {
    let key = if model.shares_kv_heads() { Format::KIVI4 } else { Format::KIVI2 };
    (key, Format::KIVI2)
}

impl CacheOptions {
    /// The configuration for a model.
    pub(super) fn config(&self, model: &ModelConfig) -> Result<CacheConfig> {
        // Room for both is allocated at once, so more than can ever be used is a mistake.
        let longest = model.context_length.max(DEFAULT_RESIDUAL_LENGTH);
        for (option, tokens) in
            [("residual-length", self.residual_length), ("sink-length", self.sink_length)]
        {
            if tokens > longest {
                bail!("--{option} {tokens} is beyond the model's context of {longest}");
            }
        }
        let (key, value) = self.formats(model)?;
        self.with_formats(key, value)
    }

    /// The configuration with other formats.
    pub(super) fn with_formats(&self, key: Format, value: Format) -> Result<CacheConfig> {
        let mode = match self.value_residual {
            ValueResidualName::Window => ValueResidual::Window,
            ValueResidualName::Block => ValueResidual::Block,
        };
        let builder = CacheConfig::builder()
            .key(key)
            .value(value)
            .group_size(self.group_size)
            .residual_length(self.residual_length)
            .sink_length(self.sink_length)
            .value_residual(mode);
        Ok(builder.build()?)
    }

    /// The formats asked for, or the default.
    fn formats(&self, model: &ModelConfig) -> Result<(Format, Format)> {
        let (key, value) = default_formats(model);
        let (mut key, value) =
            (self.cache_type_k.unwrap_or(key), self.cache_type_v.unwrap_or(value));
        if let Some(promotion) = self.key_promote {
            if key.promoted.is_some_and(|known| known != promotion) {
                bail!("--key-promote {promotion} contradicts --cache-type-k {key}");
            }
            key = key.with_promotion(promotion)?;
        }
        Ok((key, value))
    }

    /// The configuration in words, for the start-up line.
    pub(super) fn describe(&self, config: &CacheConfig, model: &ModelConfig) -> String {
        let mut text = format!("keys {}, values {}", config.key(), config.value());
        if config.key().bits.is_some() || config.value().bits.is_some() {
            text += &format!(", G = {}, R = {}", config.group_size(), config.residual_length());
        }
        if config.sink_length() > 0 {
            text += &format!(", {} sink tokens", config.sink_length());
        }
        if config.value_residual() == ValueResidual::Block {
            text += ", values in blocks";
        }
        if self.cache_type_k.is_none() && model.shares_kv_heads() {
            text += " (keys in 4 bits by default, since query heads share kv heads)";
        }
        text
    }
}
