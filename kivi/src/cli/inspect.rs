//! `kivi inspect`.

use super::{
    model::{self, OfflineOption},
    output,
    summary::bytes,
};
use anyhow::Result;
use clap::Args;
use clap::builder::FalseyValueParser;
use kivi::{
    CacheConfig, KiviPolicy, NamedCache, PoolSpec, memory,
    models::{Checkpoint, fetch},
};
use serde::Serialize;
use serde_json::json;
use std::collections::BTreeMap;

/// Show what a model is and how large its cache gets.
#[derive(Args, Debug)]
pub(super) struct Inspect {
    /// A directory, a GGUF file, a known name, or org/model[@revision][:FILE.gguf] on the Hub.
    #[arg(env = "KIVI_MODEL", default_value = fetch::DEFAULT_MODEL)]
    model: String,
    #[command(flatten)]
    offline: OfflineOption,
    /// Print one JSON object.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// Caches in the table.
const CACHES: [NamedCache; 5] = [
    NamedCache::F16,
    NamedCache::KIVI8,
    NamedCache::KIVI4,
    NamedCache::KIVI2_PLUS,
    NamedCache::KIVI2,
];

/// One cell of the table.
#[derive(Serialize)]
struct Row {
    tokens: usize,
    format: &'static str,
    total_bytes: usize,
    allocated_bytes: usize,
    ratio: f64,
    bits_per_element: f64,
}

impl Inspect {
    pub(super) fn execute(self) -> Result<()> {
        let checkpoint = model::open(&self.model, &self.offline, !self.json)?;
        let rows = cache_table(&checkpoint)?;
        let weights = weights(&checkpoint);
        let config = checkpoint.config();
        if self.json {
            return output::print_json(json!({
                "name": config.name,
                "path": checkpoint.path(),
                "architecture": config.architecture.name(),
                "vocabulary": config.vocab_size,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "layers": config.layers,
                "query_heads": config.query_heads,
                "kv_heads": config.kv_heads,
                "head_dim": config.head_dim,
                "context": config.context_length,
                "rope_theta": config.rope.theta,
                "weights": weights
                    .iter()
                    .map(|(format, (tensors, bytes))| {
                        json!({ "format": format, "tensors": tensors, "bytes": bytes })
                    })
                    .collect::<Vec<_>>(),
                "cache": rows,
            }));
        }
        let mut text = format!(
            "{} ({})\n{} layers, hidden size {}, {} query heads, {} kv heads, head_dim {}, \
             MLP {}, vocabulary {}, context {}, rope theta {}\n\nweights\n",
            config.name,
            config.architecture,
            config.layers,
            config.hidden_size,
            config.query_heads,
            config.kv_heads,
            config.head_dim,
            config.intermediate_size,
            config.vocab_size,
            config.context_length,
            config.rope.theta,
        );
        for (format, (tensors, size)) in &weights {
            text += &format!("  {format:<6} {tensors:>5} tensors {:>12}\n", bytes(*size));
        }
        text += "\ncache of one sequence, in use (G = 32, R = 128)\n  tokens  ";
        for NamedCache { name, .. } in CACHES {
            text += &format!("{name:>22}");
        }
        for line in rows.chunks(CACHES.len()) {
            text += &format!("\n{:>8}  ", line[0].tokens);
            for row in line {
                let cell = format!("{} ({:.2}x)", bytes(row.total_bytes), row.ratio);
                text += &format!("{cell:>22}");
            }
        }
        output::print(&(text + "\n"))?;
        Ok(())
    }
}

/// Tensors and bytes by weight format.
fn weights(checkpoint: &Checkpoint) -> BTreeMap<String, (usize, usize)> {
    let mut weights = BTreeMap::new();
    for tensor in checkpoint.inventory() {
        let entry: &mut (usize, usize) = weights.entry(tensor.format.clone()).or_default();
        entry.0 += 1;
        entry.1 += tensor.bytes;
    }
    weights
}

/// The memory model's prediction for lengths up to the context.
fn cache_table(checkpoint: &Checkpoint) -> Result<Vec<Row>> {
    let model = checkpoint.config();
    let context = model.context_length;
    let mut lengths: Vec<usize> =
        (7..).step_by(2).map(|power| 1 << power).take_while(|&n| n < context).collect();
    lengths.push(context);
    let mut rows = Vec::new();
    for tokens in lengths {
        for cache in CACHES {
            let config = CacheConfig::builder().named(cache).build()?;
            let policy = KiviPolicy::new(&config);
            let layers = model.cache_layers(&config);
            let spec = PoolSpec::for_context(config, layers, 1, tokens)?;
            let usage = memory::predict(&spec, &policy, tokens);
            let total_bytes = usage.in_use();
            rows.push(Row {
                tokens,
                format: cache.name,
                total_bytes,
                allocated_bytes: usage.allocated(),
                ratio: memory::f16_bytes(&spec, tokens) as f64 / total_bytes as f64,
                bits_per_element: 8.0 * total_bytes as f64 / memory::elements(&spec, tokens) as f64,
            });
        }
    }
    Ok(rows)
}
