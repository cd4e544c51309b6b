//! `kivi eval perplexity`.

use super::{
    score::{RelativeError, Score},
    text::read_text,
};
use crate::cli::{
    cache::{Cache, CacheOptions},
    device::{self, DeviceOptions, Task},
    model::{self, ModelOptions},
    output,
    summary::bytes,
};
use anyhow::{Result, bail};
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use kivi::{
    DecoderBackend, SequenceId, memory,
    models::{Checkpoint, Llama, Session},
};
use rayon::prelude::*;
use serde_json::json;
use std::path::PathBuf;

/// Perplexity of a text.
///
/// The text is cut into chunks of --ctx tokens, without a token for the beginning of a text; each is
/// a sequence of its own, and the second half of its tokens is scored (llama.cpp's convention).
#[derive(Args, Debug)]
pub(in crate::cli) struct Perplexity {
    /// The text, UTF-8.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Tokens of a chunk.
    #[arg(long, env = "KIVI_CTX", default_value_t = 2048, value_name = "TOKENS")]
    ctx: usize,
    /// Use only the first chunks.
    #[arg(long, env = "KIVI_CHUNKS", value_name = "N")]
    chunks: Option<usize>,
    /// How the chunks are fed.
    #[arg(long, env = "KIVI_MODE", value_enum, default_value = "decode")]
    mode: Mode,
    /// Also compare with the same model over an f16 cache: KL divergence, most likely tokens and the
    /// attention output of every layer; twice the work.
    #[arg(long, env = "KIVI_KLD", value_parser = FalseyValueParser::new())]
    kld: bool,
    /// Chunks that are run as one batch.
    #[arg(long, env = "KIVI_BATCH", default_value_t = 16, value_name = "N")]
    batch: usize,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    cache: CacheOptions,
    /// Print one JSON object.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Mode {
    /// Token by token, so that the quantized cache is really read.
    Decode,
    /// Each chunk as one prompt: everything is seen in full precision and no code is read.
    Prefill,
}

impl Perplexity {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        if self.ctx < 4 {
            bail!("chunks of {} tokens are too short to score; give --ctx 4 or more", self.ctx);
        }
        if self.batch == 0 || self.chunks == Some(0) {
            bail!("there is nothing to do with 0 chunks");
        }
        let text = read_text(&self.file)?;
        let checkpoint = self.model.open(!self.json)?;
        let device = self.device.clone();
        device.run(Evaluation { options: self, checkpoint, text })
    }
}

struct Evaluation {
    options: Perplexity,
    checkpoint: Checkpoint,
    text: String,
}

impl Task for Evaluation {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint, text } = self;
        let cache = options.cache.cache(checkpoint.config())?;
        let tokens = model::tokenizer(&checkpoint)?.encode(&text, false, false)?;
        let ctx = options.ctx;
        if ctx > checkpoint.config().context_length {
            bail!(
                "chunks of {ctx} tokens exceed the context of {}",
                checkpoint.config().context_length
            );
        }
        let available = tokens.len() / ctx;
        if available == 0 {
            bail!("the text has {} tokens, fewer than one chunk of {ctx}", tokens.len());
        }
        let chunks = options.chunks.unwrap_or(available).min(available);
        let llama = options.model.load(backend, &checkpoint)?;
        if !options.json {
            eprintln!(
                "{}; {}; cache: {}; {chunks} chunks of {ctx} tokens",
                options.model.model,
                device::describe(&llama, &checkpoint),
                cache.describe(),
            );
        }
        if options.mode == Mode::Prefill {
            eprintln!(
                "prefill mode: every token sees its chunk in full precision, no code is ever read"
            );
        }
        let bar = progress(options.json, chunks * ctx);
        let mut totals = Totals::default();
        let mut in_use = 0;
        let chunks: Vec<&[u32]> = tokens.chunks_exact(ctx).take(chunks).collect();
        for batch in chunks.chunks(options.batch) {
            let mut run = Run::new(&llama, &options, &cache, batch.len())?;
            match options.mode {
                Mode::Decode => run.decode(batch, &bar, &mut totals)?,
                Mode::Prefill => run.prefill(batch, &bar, &mut totals)?,
            }
            in_use = run.session.measure().in_use() / batch.len();
        }
        bar.finish_and_clear();
        report(&options, &cache, chunks.len(), &totals, in_use)
    }
}

/// What all batches add to.
#[derive(Debug, Default)]
struct Totals {
    score: Score,
    /// Of the attention output of each layer.
    layers: Vec<RelativeError>,
}

/// A batch of chunks, over the cache in question and perhaps over an f16 cache.
struct Run<'m, B: DecoderBackend> {
    llama: &'m Llama<B>,
    session: Session<B>,
    sequences: Vec<SequenceId>,
    reference: Option<Session<B>>,
    ctx: usize,
}

impl<'m, B: DecoderBackend> Run<'m, B> {
    fn new(llama: &'m Llama<B>, options: &Perplexity, cache: &Cache, batch: usize) -> Result<Self> {
        let ctx = options.ctx;
        let mut session = cache.session(llama, batch, ctx)?;
        let mut reference = None;
        if options.kld {
            reference = Some(cache.uncompressed()?.session(llama, batch, ctx)?);
        }
        let mut sequences = Vec::new();
        for _ in 0..batch {
            sequences.push(session.create_sequence()?);
            // The same ids, since both pools are new.
            reference.as_mut().map(Session::create_sequence).transpose()?;
        }
        Ok(Self { llama, session, sequences, reference, ctx })
    }

    /// All chunks in step, one token at a time.
    fn decode(&mut self, chunks: &[&[u32]], bar: &ProgressBar, totals: &mut Totals) -> Result<()> {
        let rows: Vec<usize> = (0..chunks.len()).collect();
        for position in 0..self.ctx - 1 {
            let steps: Vec<_> = self
                .sequences
                .iter()
                .zip(chunks)
                .map(|(&sequence, chunk)| (sequence, &chunk[position..=position]))
                .collect();
            let scored = position >= self.ctx / 2;
            let layers = scored.then_some(&mut totals.layers);
            let (hidden, reference) = self.step(&steps, layers)?;
            if scored {
                let targets: Vec<u32> = chunks.iter().map(|chunk| chunk[position + 1]).collect();
                let part = self.score(&hidden, reference.as_ref(), &rows, &targets)?;
                totals.score = totals.score.add(part);
            }
            bar.inc(chunks.len() as u64);
        }
        Ok(())
    }

    /// One chunk after the other, each as one prompt.
    fn prefill(&mut self, chunks: &[&[u32]], bar: &ProgressBar, totals: &mut Totals) -> Result<()> {
        for (&sequence, chunk) in self.sequences.clone().iter().zip(chunks) {
            self.session.state_mut().begin_prompt(sequence, chunk.len())?;
            if let Some(session) = &mut self.reference {
                session.state_mut().begin_prompt(sequence, chunk.len())?;
            }
            let (hidden, reference) = self.step(&[(sequence, *chunk)], Some(&mut totals.layers))?;
            // Logits of some rows at a time: all of them would be the largest buffer by far.
            let rows: Vec<usize> = (self.ctx / 2..self.ctx - 1).collect();
            for rows in rows.chunks(128) {
                let targets: Vec<u32> = rows.iter().map(|row| chunk[row + 1]).collect();
                let part = self.score(&hidden, reference.as_ref(), rows, &targets)?;
                totals.score = totals.score.add(part);
            }
            bar.inc(chunk.len() as u64);
        }
        Ok(())
    }

    /// One step over both caches; compares the attention outputs if there is somewhere to add to.
    fn step(
        &mut self,
        steps: &[(SequenceId, &[u32])],
        layers: Option<&mut Vec<RelativeError>>,
    ) -> Result<(B::Buffer, Option<B::Buffer>)> {
        let Some(reference) = &mut self.reference else {
            return Ok((self.session.step(steps)?, None));
        };
        let Some(layers) = layers else {
            return Ok((self.session.step(steps)?, Some(reference.step(steps)?)));
        };
        layers.resize_with(self.llama.config().layers, RelativeError::default);
        let mut outputs: Vec<Vec<f32>> = Vec::new();
        let expected = reference.step_observed(steps, &mut |seen| {
            outputs.push(read(seen.backend, seen.attended)?);
            Ok(())
        })?;
        let hidden = self.session.step_observed(steps, &mut |seen| {
            let found = read(seen.backend, seen.attended)?;
            layers[seen.layer].add(&found, &outputs[seen.layer]);
            Ok(())
        })?;
        Ok((hidden, Some(expected)))
    }

    fn score(
        &self,
        hidden: &B::Buffer,
        reference: Option<&B::Buffer>,
        rows: &[usize],
        targets: &[u32],
    ) -> Result<Score> {
        let vocabulary = self.llama.config().vocab_size;
        let logits = self.llama.logits(hidden, rows)?;
        let reference = reference.map(|hidden| self.llama.logits(hidden, rows)).transpose()?;
        let scores: Vec<Score> = targets
            .par_iter()
            .enumerate()
            .map(|(i, &target)| {
                let row = i * vocabulary..(i + 1) * vocabulary;
                let reference = reference.as_ref().map(|logits| &logits[row.clone()]);
                Score::of(&logits[row], reference, target)
            })
            .collect();
        // In order, so that the sum does not depend on the threads.
        Ok(scores.into_iter().fold(Score::default(), Score::add))
    }
}

fn progress(json: bool, tokens: usize) -> ProgressBar {
    let bar = if json { ProgressBar::hidden() } else { ProgressBar::new(tokens as u64) };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} tokens, {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// All elements of a buffer.
fn read<B: DecoderBackend>(backend: &B, buffer: &B::Buffer) -> kivi::models::Result<Vec<f32>> {
    let [rows, width] = backend.shape(buffer);
    let mut out = vec![0.0; rows * width];
    backend.read(buffer, &mut out)?;
    Ok(out)
}

fn report(
    options: &Perplexity,
    cache: &Cache,
    chunks: usize,
    totals: &Totals,
    in_use: usize,
) -> Result<()> {
    let (score, config) = (totals.score, &cache.config);
    let tokens = score.tokens as f64;
    let perplexity = (score.negative_log_likelihood / tokens).exp();
    if !perplexity.is_finite() {
        bail!("the perplexity is {perplexity}: the model's logits are not numbers");
    }
    let kld = options.kld.then_some(score.divergence / tokens);
    let same_top = options.kld.then_some(score.same_top as f64 / tokens);
    let layers: Vec<f64> = totals.layers.iter().map(|layer| layer.get()).collect();
    let cached = options.ctx - usize::from(options.mode == Mode::Decode);
    let spec = cache.pool(options.ctx)?;
    let bits = 8.0 * in_use as f64 / memory::elements(&spec, cached) as f64;
    let limit = cache.bits_in_the_limit()?;
    if options.json {
        return output::print_json(json!({
            "perplexity": perplexity,
            "tokens": score.tokens,
            "chunks": chunks,
            "ctx": options.ctx,
            "mode": match options.mode { Mode::Decode => "decode", Mode::Prefill => "prefill" },
            "cache_type_k": config.key().to_string(),
            "cache_type_v": config.value().to_string(),
            "kld_mean": kld,
            "same_top_share": same_top,
            "cache_bytes_per_sequence": in_use,
            "bits_per_element": bits,
            "bits_per_element_limit": limit,
            "group_size": config.group_size(),
            "residual_length": config.residual_length(),
            "sink_length": config.sink_length(),
            "layer_formats": cache.formats(),
            "attention_output_error_per_layer": options.kld.then_some(layers),
        }));
    }
    output::print(&format!("perplexity {perplexity:.4} over {} tokens\n", score.tokens))?;
    if let (Some(kld), Some(same)) = (kld, same_top) {
        output::print(&format!(
            "KL divergence to the f16 cache {kld:.5} nats per token, same most likely token {:.2} %\n",
            100.0 * same
        ))?;
    }
    if options.kld {
        let list: Vec<String> =
            layers.iter().map(|error| format!("{:.1}", 100.0 * error)).collect();
        output::print(&format!("attention output error by layer, %: {}\n", list.join(" ")))?;
    }
    eprintln!(
        "cache of one chunk: {}, {bits:.2} bits per element, {limit:.2} in the limit",
        bytes(in_use)
    );
    Ok(())
}
