//! Options of the cache.

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use kivi::{
    CacheConfig, CacheConfigBuilder, DecoderBackend, Format, KeyValue, KiviPolicy, LayerSpec,
    NamedCache, PoolSpec, Promotion, ValueResidual, memory,
    models::{CachePlan, Llama, ModelConfig, Session},
};
use std::path::{Path, PathBuf};

/// `R` of the paper's experiments.
const DEFAULT_RESIDUAL_LENGTH: usize = 128;

/// Options of the cache.
#[derive(Args, Clone, Debug)]
pub(super) struct CacheOptions {
    /// Cache by name: kivi2, kivi4, kivi8, f16, bf16, f32, or kivi2+, which is kivi2 with a quarter of
    /// the key channels in 4 bits and 32 sink tokens [default: kivi2, or kivi2+ for models whose query
    /// heads share kv heads (GQA)].
    #[arg(long, env = "KIVI_CACHE", value_name = "NAME")]
    cache: Option<NamedCache>,
    /// Formats of each layer, from a JSON file as kivi tune writes it.
    #[arg(long, env = "KIVI_CACHE_PLAN", value_name = "FILE", conflicts_with_all = ["cache", "cache_type_k", "cache_type_v", "key_promote"])]
    cache_plan: Option<PathBuf>,
    /// Format of the keys: kivi2, kivi4, kivi8, f16, bf16 or f32 [default: the cache's].
    #[arg(long, env = "KIVI_CACHE_TYPE_K", value_name = "TYPE", conflicts_with = "cache")]
    cache_type_k: Option<Format>,
    /// Format of the values [default: the cache's].
    #[arg(long, env = "KIVI_CACHE_TYPE_V", value_name = "TYPE", conflicts_with = "cache")]
    cache_type_v: Option<Format>,
    /// Share of the channels of every group of kivi2 keys that have 4 bits instead of 2, those with
    /// the largest range: 0.25 for a quarter. The same as kivi2+SHARE as the format of the keys.
    #[arg(long, env = "KIVI_KEY_PROMOTE", value_name = "SHARE", conflicts_with = "cache")]
    key_promote: Option<Promotion>,
    #[command(flatten)]
    lengths: LengthOptions,
}

/// Options that say how a cache of any formats is laid out.
#[derive(Args, Clone, Debug)]
pub(super) struct LengthOptions {
    /// Elements that share a scale and a zero: 16, 32, 64 or 128 [default: 32].
    #[arg(long, env = "KIVI_GROUP_SIZE", value_name = "G")]
    group_size: Option<usize>,
    /// Newest tokens in full precision, a multiple of the group size [default: 128].
    #[arg(long, env = "KIVI_RESIDUAL_LENGTH", value_name = "R")]
    residual_length: Option<usize>,
    /// First tokens in full precision [default: the cache's; 0 where formats are given].
    #[arg(long, env = "KIVI_SINK_LENGTH", value_name = "S")]
    sink_length: Option<usize>,
    /// When values are quantized: each as it leaves the window of R, or in blocks with their keys.
    #[arg(long, env = "KIVI_VALUE_RESIDUAL", value_enum, default_value = "window")]
    value_residual: ValueResidualName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ValueResidualName {
    Window,
    Block,
}

/// The cache a model gets when nothing is asked for: `kivi2`, but `kivi2+` where several query heads
/// share the keys, which then suffer more from 2 bits.
pub(super) fn default_cache(model: &ModelConfig) -> NamedCache {
    if model.shares_kv_heads() { NamedCache::KIVI2_PLUS } else { NamedCache::KIVI2 }
}

/// What the options come to for one model.
#[derive(Clone, Debug)]
pub(super) struct Cache {
    pub(super) config: CacheConfig,
    /// One per layer of the model.
    pub(super) layers: Vec<LayerSpec>,
    /// Where the formats are from, if not from options that name them.
    source: String,
}

impl CacheOptions {
    /// The cache for a model.
    pub(super) fn cache(&self, model: &ModelConfig) -> Result<Cache> {
        let (plan, source) = match &self.cache_plan {
            Some(path) => (read_plan(path)?, format!(" (plan {})", path.display())),
            None => (self.plan_of_formats(model)?, self.source(model)),
        };
        let mut builder = plan.builder()?;
        if self.cache_plan.is_none() {
            let (key, value) = self.formats(model)?;
            builder = builder.key(key).value(value);
        }
        let config = self.lengths.apply(builder).build()?;
        check_lengths(&config, model)?;
        let layers = plan.layers(model, &config)?;
        Ok(Cache { config, layers, source })
    }

    /// Whether formats are asked for one by one.
    fn names_formats(&self) -> bool {
        self.cache_type_k.is_some() || self.cache_type_v.is_some() || self.key_promote.is_some()
    }

    /// A plan without layers of their own. Formats that are given one by one come without sinks.
    fn plan_of_formats(&self, model: &ModelConfig) -> Result<CachePlan> {
        let mut plan = CachePlan::default();
        if !self.names_formats() {
            plan.cache = Some(self.cache.unwrap_or_else(|| default_cache(model)).name.into());
        }
        Ok(plan)
    }

    /// The formats asked for, or those of the cache by name.
    fn formats(&self, model: &ModelConfig) -> Result<(Format, Format)> {
        let named = self.cache.unwrap_or_else(|| default_cache(model));
        let mut key = self.cache_type_k.unwrap_or(named.key);
        if let Some(promotion) = self.key_promote {
            let asked = self.cache_type_k.unwrap_or(Format::KIVI2);
            if asked.promoted.is_some_and(|known| known != promotion) {
                bail!("--key-promote {promotion} contradicts --cache-type-k {asked}");
            }
            key = asked.with_promotion(promotion)?;
        }
        Ok((key, self.cache_type_v.unwrap_or(named.value)))
    }

    /// Where the formats are from, for the start-up line.
    fn source(&self, model: &ModelConfig) -> String {
        match self.cache {
            Some(cache) => format!(" ({cache})"),
            None if !self.names_formats() && model.shares_kv_heads() => {
                format!(" ({} by default, since query heads share kv heads)", default_cache(model))
            }
            None => String::new(),
        }
    }
}

impl LengthOptions {
    /// A configuration with what was asked for.
    pub(super) fn apply(&self, mut builder: CacheConfigBuilder) -> CacheConfigBuilder {
        if let Some(tokens) = self.group_size {
            builder = builder.group_size(tokens);
        }
        if let Some(tokens) = self.residual_length {
            builder = builder.residual_length(tokens);
        }
        if let Some(tokens) = self.sink_length {
            builder = builder.sink_length(tokens);
        }
        builder.value_residual(match self.value_residual {
            ValueResidualName::Window => ValueResidual::Window,
            ValueResidualName::Block => ValueResidual::Block,
        })
    }
}

/// Room for residual and sinks is allocated at once, so more than can ever be used is a mistake.
pub(super) fn check_lengths(config: &CacheConfig, model: &ModelConfig) -> Result<()> {
    let longest = model.context_length.max(DEFAULT_RESIDUAL_LENGTH);
    for (option, tokens) in
        [("residual-length", config.residual_length()), ("sink-length", config.sink_length())]
    {
        if tokens > longest {
            bail!("--{option} {tokens} is beyond the model's context of {longest}");
        }
    }
    Ok(())
}

/// Reads a plan file.
fn read_plan(path: &Path) -> Result<CachePlan> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", path.display()))?;
    CachePlan::from_json(&text).map_err(|error| anyhow::anyhow!("{}: {error}", path.display()))
}

impl Cache {
    /// The formats of a configuration in every layer.
    pub(super) fn uniform(config: CacheConfig, model: &ModelConfig) -> Self {
        let layers = model.cache_layers(&config);
        Self { config, layers, source: String::new() }
    }

    /// The cache of a plan file.
    pub(super) fn of_plan(path: &Path, model: &ModelConfig) -> Result<Self> {
        let plan = read_plan(path)?;
        let config = plan.builder()?.build()?;
        let layers = plan.layers(model, &config)?;
        Ok(Self { config, layers, source: format!(" (plan {})", path.display()) })
    }

    /// The same cache without quantization.
    pub(super) fn uncompressed(&self) -> Result<Self> {
        let mut layers = self.layers.clone();
        for layer in &mut layers {
            layer.format = KeyValue::both(Format::F16);
        }
        let builder = CacheConfig::builder().key(Format::F16).value(Format::F16);
        Ok(Self { config: builder.build()?, layers, source: String::new() })
    }

    /// A session over this cache.
    pub(super) fn session<B: DecoderBackend>(
        &self,
        llama: &Llama<B>,
        sequences: usize,
        context: usize,
    ) -> Result<Session<B>> {
        let (config, layers) = (self.config.clone(), self.layers.clone());
        Ok(Session::with_layers(llama, config, layers, sequences, context)?)
    }

    /// A pool for one sequence of some length, to ask the memory model about.
    pub(super) fn pool(&self, tokens: usize) -> Result<PoolSpec> {
        Ok(PoolSpec::for_context(self.config.clone(), self.layers.clone(), 1, tokens)?)
    }

    /// Bits per element of one sequence of `tokens` tokens.
    pub(super) fn bits_per_element(&self, tokens: usize) -> Result<f64> {
        let spec = self.pool(tokens)?;
        let bytes = memory::predict(&spec, &KiviPolicy::new(&self.config), tokens).in_use();
        Ok(8.0 * bytes as f64 / memory::elements(&spec, tokens).max(1) as f64)
    }

    /// Bits per element of quantized tokens alone: what a long sequence approaches. Uncompressed
    /// layers count with their full size.
    pub(super) fn bits_in_the_limit(&self) -> Result<f64> {
        // Enough for the parts that do not grow to vanish, few enough for every product to fit.
        self.bits_per_element(1 << 22)
    }

    /// The formats, `KEYS:VALUES`, of every layer.
    pub(super) fn formats(&self) -> Vec<String> {
        let name = |layer: &LayerSpec| format!("{}:{}", layer.format.keys, layer.format.values);
        self.layers.iter().map(name).collect()
    }

    /// The configuration in words, for the start-up line.
    pub(super) fn describe(&self) -> String {
        let mut formats: Vec<(KeyValue<Format>, usize)> = Vec::new();
        for layer in &self.layers {
            match formats.iter_mut().find(|(known, _)| *known == layer.format) {
                Some((_, count)) => *count += 1,
                None => formats.push((layer.format, 1)),
            }
        }
        let several = formats.len() > 1;
        let parts = formats.iter().map(|(format, count)| {
            let layers = if several { format!("{count} layers ") } else { String::new() };
            format!("{layers}keys {}, values {}", format.keys, format.values)
        });
        let mut text = parts.collect::<Vec<_>>().join("; ");
        let config = &self.config;
        if formats.iter().any(|(f, _)| f.keys.bits.is_some() || f.values.bits.is_some()) {
            text += &format!(", G = {}, R = {}", config.group_size(), config.residual_length());
        }
        if config.sink_length() > 0 {
            text += &format!(", {} sink tokens", config.sink_length());
        }
        if config.value_residual() == ValueResidual::Block {
            text += ", values in blocks";
        }
        text + &self.source
    }
}
