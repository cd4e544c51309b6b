//! `kivi eval errors`.

mod measure;
mod plots;

use crate::cli::{
    device::{self, DeviceOptions, Task},
    eval::text::read_tokens,
    model::{self, ModelOptions},
    output,
};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use indicatif::ProgressBar;
use kivi::{
    CacheConfig, DecoderBackend, Format,
    models::{Checkpoint, Session},
};
use measure::{Layer, Table, Variant};
use serde_json::json;
use std::path::PathBuf;

/// What quantizing does to the keys and values of a text.
///
/// The text is run as one prompt over an uncompressed cache. Of every layer the keys and values are
/// quantized as a whole, per token and per channel, and the attention of some of the queries of the
/// second half is computed with them: the error of keys or values, of the attention weights and of
/// the attention output, each relative to the exact one (Tables 1 and 2 of the paper).
#[derive(Args, Debug)]
pub(in crate::cli) struct Errors {
    /// The text, UTF-8.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Tokens of the text to take, a multiple of the group size.
    #[arg(long, env = "KIVI_CTX", default_value_t = 2048, value_name = "TOKENS")]
    ctx: usize,
    /// Queries of each layer to measure, spread over the second half.
    #[arg(long, env = "KIVI_QUERIES", default_value_t = 64, value_name = "N")]
    queries: usize,
    /// Elements that share a scale and a zero: 16, 32, 64 or 128.
    #[arg(long, env = "KIVI_GROUP_SIZE", default_value_t = 32, value_name = "G")]
    group_size: usize,
    /// A folder for plots of the magnitude of keys and values, token by channel (SVG).
    #[arg(long, env = "KIVI_PLOTS", value_name = "FOLDER")]
    plots: Option<PathBuf>,
    /// Layers to plot [default: the first, the middle and the last one].
    #[arg(long, env = "KIVI_PLOT_LAYERS", value_delimiter = ',', value_name = "N,…")]
    plot_layers: Vec<usize>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print one JSON object, with the figures of every layer.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

impl Errors {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        CacheConfig::builder()
            .group_size(self.group_size)
            .residual_length(self.group_size)
            .build()?;
        if self.ctx < 2 * self.group_size || !self.ctx.is_multiple_of(self.group_size) {
            bail!(
                "--ctx {} is not a multiple of the group size {}, two groups or more",
                self.ctx,
                self.group_size
            );
        }
        if self.queries == 0 {
            bail!("there is nothing to measure with 0 queries");
        }
        let checkpoint = self.model.open(!self.json)?;
        let layers = checkpoint.config().layers;
        if let Some(layer) = self.plot_layers.iter().find(|&&layer| layer >= layers) {
            bail!("there is no layer {layer} to plot, the model has 0 to {}", layers - 1);
        }
        let device = self.device.clone();
        device.run(Measurement { options: self, checkpoint })
    }

    fn plotted(&self, layers: usize) -> Vec<usize> {
        match self.plot_layers.is_empty() {
            true => vec![0, layers / 2, layers - 1],
            false => self.plot_layers.clone(),
        }
    }
}

struct Measurement {
    options: Errors,
    checkpoint: Checkpoint,
}

impl Task for Measurement {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let model_config = checkpoint.config();
        let tokenizer = model::tokenizer(&checkpoint)?;
        let mut tokens = read_tokens(&options.file, &tokenizer)?;
        let ctx = options.ctx;
        if ctx > model_config.context_length {
            bail!("{ctx} tokens exceed the context of {}", model_config.context_length);
        }
        if tokens.len() < ctx {
            bail!("the text has {} tokens, fewer than --ctx {ctx}", tokens.len());
        }
        tokens.truncate(ctx);
        if let Some(folder) = &options.plots {
            std::fs::create_dir_all(folder)
                .map_err(|error| anyhow!("cannot create {}: {error}", folder.display()))?;
        }
        let llama = options.model.load(backend, &checkpoint)?;
        if !options.json {
            eprintln!(
                "{}; {}; {ctx} tokens, {} queries per layer, G = {}",
                options.model.model,
                device::describe(&llama, &checkpoint),
                options.queries.min(ctx - ctx / 2),
                options.group_size,
            );
        }
        let config = CacheConfig::builder().key(Format::F16).value(Format::F16).build()?;
        let mut session = Session::new(&llama, config, 1, ctx)?;
        let sequence = session.create_sequence()?;
        session.state_mut().begin_prompt(sequence, ctx)?;
        let bar = if options.json { ProgressBar::hidden() } else { ProgressBar::new(0) };
        bar.set_length(model_config.layers as u64);
        let mut table = Table::new(Variant::all());
        let mut failed = None;
        let plotted = options.plotted(model_config.layers);
        session.step_observed(&[(sequence, &tokens)], &mut |seen| {
            if failed.is_some() {
                return Ok(());
            }
            let layer = Layer::read(&seen, llama.rope(), model_config)?;
            if let Err(error) = table.measure(&layer, options.group_size, options.queries) {
                failed = Some(error);
            }
            if let Some(folder) = &options.plots
                && plotted.contains(&seen.layer)
                && let Err(error) = plots::magnitudes(&layer, folder, seen.layer)
            {
                failed = Some(error);
            }
            bar.inc(1);
            Ok(())
        })?;
        if let Some(error) = failed {
            return Err(error);
        }
        bar.finish_and_clear();
        if options.json {
            return output::print_json(json!({
                "model": options.model.model,
                "tokens": ctx,
                "queries_per_layer": options.queries.min(ctx - ctx / 2),
                "group_size": options.group_size,
                "rows": table.json(),
            }));
        }
        output::print(&table.text())?;
        Ok(())
    }
}
