//! `kivi tune`.

mod search;

use super::{
    cache::Cache,
    device::{self, DeviceOptions, Task},
    eval::{score::Score, text::read_tokens},
    model::{self, ModelOptions},
    output,
    plot::{Curve, Curves},
};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use kivi::{
    CacheConfig, DecoderBackend, Format, KeyValue, LayerSpec, NamedCache,
    models::{CachePlan, Checkpoint, LayerFormats, Llama, Session},
};
use rayon::prelude::*;
use search::{Choice, Sensitivity};
use serde_json::json;
use std::path::PathBuf;

/// Find key and value formats for each layer.
///
/// Every layer in turn gets every format of --levels while all others stay uncompressed, and the KL
/// divergence to the uncompressed cache is measured on chunks of a text. Divergences of layers are
/// taken to add up; the formats that cost least of it per bit are chosen until the plan has the size,
/// or the divergence, that was asked for. The plan is then measured as a whole, beside the same cache
/// in every layer, and written as a file for --cache-plan.
#[derive(Args, Debug)]
pub(super) struct Tune {
    /// The text, UTF-8.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk.
    #[arg(long, env = "KIVI_CTX", default_value_t = 512, value_name = "TOKENS")]
    ctx: usize,
    /// Chunks to measure each format on.
    #[arg(long, env = "KIVI_CHUNKS", default_value_t = 2, value_name = "N")]
    chunks: usize,
    /// Formats to choose from, KEYS:VALUES.
    #[arg(
        long,
        env = "KIVI_LEVELS",
        value_delimiter = ',',
        default_value = "kivi2:kivi2,kivi2+0.125:kivi2,kivi2+0.25:kivi2,kivi2+0.5:kivi2,kivi4:kivi2,kivi4:kivi4",
        value_name = "TYPE,…"
    )]
    levels: Vec<Level>,
    /// Bits per element in the limit that the plan may take [default: 3.5].
    #[arg(long, env = "KIVI_TARGET_BITS", value_name = "BITS", conflicts_with = "target_kld")]
    target_bits: Option<f64>,
    /// Take the smallest plan whose KL divergence, in nats per token, is expected to be at most this.
    #[arg(long, env = "KIVI_TARGET_KLD", value_name = "NATS")]
    target_kld: Option<f64>,
    /// Elements that share a scale and a zero: 16, 32, 64 or 128.
    #[arg(long, env = "KIVI_GROUP_SIZE", default_value_t = 32, value_name = "G")]
    group_size: usize,
    /// Newest tokens in full precision, a multiple of the group size.
    #[arg(long, env = "KIVI_RESIDUAL_LENGTH", default_value_t = 128, value_name = "R")]
    residual_length: usize,
    /// First tokens in full precision.
    #[arg(long, env = "KIVI_SINK_LENGTH", default_value_t = 32, value_name = "S")]
    sink_length: usize,
    /// Where the plan goes.
    #[arg(long, short, env = "KIVI_OUT", default_value = "cache-plan.json", value_name = "FILE")]
    out: PathBuf,
    /// Draw the divergence over the size, as .svg or .png.
    #[arg(long, env = "KIVI_PLOT", value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Print one JSON object.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// Formats of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Level(KeyValue<Format>);

impl std::str::FromStr for Level {
    type Err = kivi::Error;

    fn from_str(text: &str) -> kivi::Result<Self> {
        let (keys, values) = text.split_once(':').unwrap_or((text, text));
        Ok(Self(KeyValue::new(keys.parse()?, values.parse()?)))
    }
}

impl std::fmt::Display for Level {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.0.keys, self.0.values)
    }
}

impl Tune {
    pub(super) fn execute(self) -> Result<()> {
        if self.ctx < 4 || self.chunks == 0 {
            bail!("there is nothing to measure in {} chunks of {} tokens", self.chunks, self.ctx);
        }
        let in_residual = self.residual_length.saturating_add(self.sink_length);
        if self.ctx / 2 <= in_residual {
            bail!(
                "chunks of {} tokens hardly read a code: sinks and residual hold {in_residual}, and \
                 the second half is scored; give --ctx {} or more",
                self.ctx,
                in_residual.saturating_add(1).saturating_mul(2)
            );
        }
        if self.target_bits.is_some_and(|bits| bits.is_nan() || bits <= 0.0)
            || self.target_kld.is_some_and(|kld| kld.is_nan() || kld < 0.0)
        {
            bail!("a target is a positive number");
        }
        for level in &self.levels {
            self.config(level.0)?;
        }
        let checkpoint = self.model.open(!self.json)?;
        let device = self.device.clone();
        device.run(Tuning { options: self, checkpoint })
    }

    fn config(&self, format: KeyValue<Format>) -> Result<CacheConfig> {
        let builder = CacheConfig::builder()
            .key(format.keys)
            .value(format.values)
            .group_size(self.group_size)
            .residual_length(self.residual_length)
            .sink_length(self.sink_length);
        Ok(builder.build()?)
    }
}

struct Tuning {
    options: Tune,
    checkpoint: Checkpoint,
}

impl Task for Tuning {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let tokenizer = model::tokenizer(&checkpoint)?;
        let tokens = read_tokens(&options.file, &tokenizer)?;
        let (ctx, model) = (options.ctx, checkpoint.config());
        if ctx > model.context_length {
            bail!("chunks of {ctx} tokens exceed the context of {}", model.context_length);
        }
        let chunks: Vec<&[u32]> = tokens.chunks_exact(ctx).take(options.chunks).collect();
        if chunks.len() < options.chunks {
            bail!("the text has {} chunks of {ctx} tokens, not {}", chunks.len(), options.chunks);
        }
        let llama = options.model.load(backend, &checkpoint)?;
        let (layers, levels) = (model.layers, options.levels.len());
        if !options.json {
            eprintln!(
                "{}; {}; {} runs of {} chunks of {ctx} tokens",
                options.model.model,
                device::describe(&llama, &checkpoint),
                layers * levels,
                chunks.len(),
            );
        }
        let bar = progress(options.json, layers * levels);
        let bench = Bench::new(&llama, &options, &chunks)?;
        let mut sensitivity = Sensitivity::default();
        for level in &options.levels {
            let one = LayerSpec::new(&options.config(level.0)?, model.kv_heads, model.head_dim);
            sensitivity.bits.push(bench.layer_bits(&one)?);
        }
        for layer in 0..layers {
            let mut row = Vec::new();
            for level in &options.levels {
                let mut cache = bench.uncompressed()?;
                cache.layers[layer].format = level.0;
                row.push(bench.measure(&cache)?.0);
                bar.inc(1);
            }
            sensitivity.divergence.push(row);
        }
        bar.finish_and_clear();
        let frontier = sensitivity.frontier();
        let target = match (options.target_kld, options.target_bits) {
            (Some(kld), _) => frontier.iter().find(|choice| choice.divergence <= kld),
            (None, bits) => {
                let bits = bits.unwrap_or(3.5);
                frontier.iter().rev().find(|choice| choice.bits <= bits)
            }
        };
        let Some(target) = target else {
            bail!(
                "no plan of these levels has what was asked for: sizes are {:.2} to {:.2} bits, \
                 expected divergences {:.4} down to {:.4}",
                frontier.first().map_or(0.0, |choice| choice.bits),
                frontier.last().map_or(0.0, |choice| choice.bits),
                frontier.first().map_or(0.0, |choice| choice.divergence),
                frontier.last().map_or(0.0, |choice| choice.divergence),
            );
        };
        let plan = plan(&options, &target.levels);
        std::fs::write(&options.out, plan.to_json())
            .map_err(|error| anyhow!("cannot write {}: {error}", options.out.display()))?;
        let tuned = bench.measure(&bench.cache_of(&target.levels)?)?;
        let mut uniform = Vec::new();
        for level in 0..levels {
            uniform.push(bench.measure(&bench.cache_of(&vec![level; layers])?)?);
        }
        draw(&options, &sensitivity, &frontier, target, (tuned.0, &uniform))?;
        report(&options, &sensitivity, target, tuned, &uniform)
    }
}

/// The text and the logits of the uncompressed cache.
struct Bench<'m, B: DecoderBackend> {
    llama: &'m Llama<B>,
    options: &'m Tune,
    chunks: &'m [&'m [u32]],
    /// `[scored positions][chunks · vocabulary]`, in half precision.
    reference: Vec<Vec<half::f16>>,
}

impl<'m, B: DecoderBackend> Bench<'m, B> {
    fn new(llama: &'m Llama<B>, options: &'m Tune, chunks: &'m [&'m [u32]]) -> Result<Self> {
        let mut bench = Self { llama, options, chunks, reference: Vec::new() };
        let mut reference = Vec::new();
        bench.decode(&bench.uncompressed()?, |logits, _| {
            reference.push(logits.iter().map(|&x| half::f16::from_f32(x)).collect());
        })?;
        bench.reference = reference;
        Ok(bench)
    }

    fn uncompressed(&self) -> Result<Cache> {
        let config = self.options.config(KeyValue::both(Format::F16))?;
        Ok(Cache::uniform(config, self.llama.config()))
    }

    fn cache_of(&self, levels: &[usize]) -> Result<Cache> {
        let mut cache = self.uncompressed()?;
        for (layer, &level) in cache.layers.iter_mut().zip(levels) {
            layer.format = self.options.levels[level].0;
        }
        Ok(cache)
    }

    /// Bits per element of one layer in the limit.
    fn layer_bits(&self, layer: &LayerSpec) -> Result<f64> {
        let mut cache = self.uncompressed()?;
        cache.layers = vec![layer.clone()];
        cache.bits_in_the_limit()
    }

    /// Feeds all chunks token by token, showing the logits of the second half and what comes next.
    fn decode(&self, cache: &Cache, mut see: impl FnMut(&[f32], &[u32])) -> Result<()> {
        let ctx = self.options.ctx;
        let mut session: Session<B> = cache.session(self.llama, self.chunks.len(), ctx)?;
        let mut sequences = Vec::new();
        let first = ctx / 2;
        for chunk in self.chunks {
            let sequence = session.create_sequence()?;
            // Codes are read from the middle on; before it nothing is scored, so that part may be a
            // prompt, several times faster.
            session.prompt(sequence, &chunk[..first])?;
            sequences.push(sequence);
        }
        for position in first..ctx - 1 {
            let steps: Vec<_> = sequences
                .iter()
                .zip(self.chunks)
                .map(|(&sequence, chunk)| (sequence, &chunk[position..=position]))
                .collect();
            let logits = session.generate_step(&steps)?;
            let next: Vec<u32> = self.chunks.iter().map(|chunk| chunk[position + 1]).collect();
            see(&logits, &next);
        }
        Ok(())
    }

    /// Mean KL divergence to the uncompressed cache, and perplexity.
    fn measure(&self, cache: &Cache) -> Result<(f64, f64)> {
        let vocabulary = self.llama.config().vocab_size;
        let (mut score, mut position) = (Score::default(), 0);
        self.decode(cache, |logits, next| {
            let reference = &self.reference[position];
            position += 1;
            let scores: Vec<Score> = next
                .par_iter()
                .enumerate()
                .map(|(index, &token)| {
                    let row = index * vocabulary..(index + 1) * vocabulary;
                    let reference: Vec<f32> =
                        reference[row.clone()].iter().map(|x| x.to_f32()).collect();
                    Score::of(&logits[row], Some(&reference), token)
                })
                .collect();
            score = scores.into_iter().fold(score, Score::add);
        })?;
        let tokens = score.tokens as f64;
        let (kld, perplexity) =
            (score.divergence / tokens, (score.negative_log_likelihood / tokens).exp());
        if !kld.is_finite() {
            bail!("the divergence is {kld}: the model's logits are not numbers");
        }
        // Rounding of the reference can leave a little less than nothing.
        Ok((kld.max(0.0), perplexity))
    }
}

/// The plan of a choice, layers of the same formats in one entry.
fn plan(options: &Tune, levels: &[usize]) -> CachePlan {
    let mut plan = CachePlan::default();
    plan.cache = Some(NamedCache::KIVI2.name.into());
    plan.group_size = Some(options.group_size);
    plan.residual_length = Some(options.residual_length);
    plan.sink_length = Some(options.sink_length);
    for (index, level) in options.levels.iter().enumerate() {
        let of_level = levels.iter().enumerate().filter(|(_, level)| **level == index);
        let layers: Vec<i64> = of_level.map(|(layer, _)| layer as i64).collect();
        if !layers.is_empty() {
            let (keys, values) = (level.0.keys.to_string(), level.0.values.to_string());
            plan.layers.push(LayerFormats { layers, keys: Some(keys), values: Some(values) });
        }
    }
    plan.comment = Some(format!("kivi tune: {}", options.model.model));
    plan
}

fn progress(hidden: bool, runs: usize) -> ProgressBar {
    let bar = if hidden { ProgressBar::hidden() } else { ProgressBar::new(runs as u64) };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn draw(
    options: &Tune,
    sensitivity: &Sensitivity,
    frontier: &[Choice],
    target: &Choice,
    (tuned, uniform): (f64, &[(f64, f64)]),
) -> Result<()> {
    let Some(path) = &options.plot else { return Ok(()) };
    let curve = |name: &str, points, joined| Curve { name: name.into(), points, joined };
    let expected = frontier.iter().map(|choice| (choice.bits, choice.divergence)).collect();
    let uniform = sensitivity.bits.iter().zip(uniform).map(|(&bits, run)| (bits, run.0)).collect();
    let curves = Curves {
        title: "KL divergence to the f16 cache",
        x: "bits per element in the limit",
        y: "nats per token",
        series: vec![
            curve("plans, expected", expected, true),
            curve("the same format in every layer", uniform, false),
            curve("this plan, measured", vec![(target.bits, tuned)], false),
        ],
    };
    curves.save(path)
}

fn report(
    options: &Tune,
    sensitivity: &Sensitivity,
    target: &Choice,
    (kld, perplexity): (f64, f64),
    uniform: &[(f64, f64)],
) -> Result<()> {
    if options.json {
        let rows = options.levels.iter().zip(&sensitivity.bits).zip(uniform);
        return output::print_json(json!({
            "model": options.model.model,
            "ctx": options.ctx,
            "chunks": options.chunks,
            "plan": options.out,
            "bits_per_element_limit": target.bits,
            "expected_kld": target.divergence,
            "kld": kld,
            "perplexity": perplexity,
            "layer_formats":
                target.levels.iter().map(|&i| options.levels[i].to_string()).collect::<Vec<_>>(),
            "sensitivity": sensitivity.divergence,
            "uniform": rows
                .map(|((level, bits), (kld, perplexity))| json!({
                    "format": level.to_string(),
                    "bits_per_element_limit": bits,
                    "kld": kld,
                    "perplexity": perplexity,
                }))
                .collect::<Vec<_>>(),
        }));
    }
    let mut text = format!(
        "plan {}: {:.3} bits per element in the limit, KL divergence {kld:.5} (expected {:.5}), \
         perplexity {perplexity:.3}\n",
        options.out.display(),
        target.bits,
        target.divergence,
    );
    for (index, level) in options.levels.iter().enumerate() {
        let layers = target.levels.iter().enumerate().filter(|(_, level)| **level == index);
        let layers: Vec<String> = layers.map(|(layer, _)| layer.to_string()).collect();
        let (kld, perplexity) = uniform[index];
        text += &format!(
            "{:<20} {:.3} bits, in every layer {kld:.5}, perplexity {perplexity:.3}; in the plan: \
             layers {}\n",
            level.to_string(),
            sensitivity.bits[index],
            if layers.is_empty() { "none".into() } else { layers.join(" ") },
        );
    }
    output::print(&text)?;
    Ok(())
}
