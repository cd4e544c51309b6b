//! What the benchmarks of the engine have in common.

use super::{options::ReportOptions, report::Report};
use crate::cli::{
    cache::{Cache, LengthOptions, default_cache},
    device::{self, DeviceOptions},
    model::ModelOptions,
};
use anyhow::Result;
use clap::Args;
use kivi::{
    CacheConfig, DecoderBackend, NamedCache,
    engine::{Engine, EngineBuilder, SEGMENT_TOKENS},
    models::{Checkpoint, Llama},
};
use serde_json::{Value, json};

/// More than one sequence ever needs: these benchmarks are not about memory.
const KV_MEMORY: usize = 8 << 30;

/// Options of the benchmarks that look at one cache.
#[derive(Args, Clone, Debug)]
pub(super) struct EngineOptions {
    #[command(flatten)]
    pub(super) model: ModelOptions,
    /// Cache by name, as kivi run takes it [default: the model's].
    #[arg(long, env = "KIVI_CACHE", value_name = "NAME")]
    cache: Option<NamedCache>,
    #[command(flatten)]
    layout: LengthOptions,
    #[command(flatten)]
    pub(super) device: DeviceOptions,
    #[command(flatten)]
    pub(super) report: ReportOptions,
}

/// The configuration of a cache for an engine: with prompt segments of [`SEGMENT_TOKENS`], or the next
/// multiple of the residual length.
pub(super) fn engine_config(
    named: NamedCache,
    layout: &LengthOptions,
    rollback: usize,
) -> Result<CacheConfig> {
    let builder = layout.apply(CacheConfig::builder().named(named));
    let residual = builder.clone().build()?.residual_length();
    let segment = SEGMENT_TOKENS.checked_next_multiple_of(residual);
    Ok(builder.segment_tokens(segment).rollback_length(rollback).build()?)
}

/// A model, a cache, and where the results go.
pub(super) struct Ready<B: DecoderBackend> {
    pub(super) llama: Llama<B>,
    cache: Cache,
    pub(super) report: Report,
}

impl EngineOptions {
    /// Loads the model, and says on standard error and in the report what is going to be measured.
    /// `details` are fields of the report.
    pub(super) fn prepare<B: DecoderBackend>(
        &self,
        backend: B,
        checkpoint: &Checkpoint,
        rollback: usize,
        details: Value,
    ) -> Result<Ready<B>> {
        let named = self.cache.unwrap_or_else(|| default_cache(checkpoint.config()));
        let config = engine_config(named, &self.layout, rollback)?;
        let cache = Cache::uniform(config, checkpoint.config());
        let llama = self.model.load(backend, checkpoint)?;
        let mut header = json!({
            "backend": llama.backend().capabilities().name,
            "threads": rayon::current_num_threads(),
            "model": self.model.model,
            "cache": cache.describe(),
        });
        if let (Some(header), Value::Object(details)) = (header.as_object_mut(), details) {
            header.extend(details);
        }
        let report = Report::new(self.report.json.clone(), header)?;
        if !self.report.quiet() {
            eprintln!(
                "{}; {}; cache: {}",
                self.model.model,
                device::describe(&llama, checkpoint),
                cache.describe()
            );
        }
        Ok(Ready { llama, cache, report })
    }
}

impl<B: DecoderBackend> Ready<B> {
    /// A builder of an engine over the cache.
    pub(super) fn engine(&self) -> EngineBuilder<B> {
        let Cache { config, layers, .. } = &self.cache;
        Engine::builder(&self.llama).cache(config.clone(), layers.clone()).kv_memory(KV_MEMORY)
    }
}
