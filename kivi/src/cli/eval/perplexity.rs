//! `kivi eval perplexity`.

use crate::cli::{
    cache::CacheOptions,
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
    CacheConfig, DecoderBackend, Format, SequenceId, memory,
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
    /// Also compare with the same model over an f16 cache (KL divergence); twice the work.
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
        let text = std::fs::read_to_string(&self.file)
            .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", self.file.display()))?;
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

/// Sums over the scored tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Score {
    tokens: usize,
    /// Of `−ln p(token)`.
    negative_log_likelihood: f64,
    /// Of `KL(f16 ‖ this)`, in nats.
    divergence: f64,
    /// How often both have the same most likely token.
    same_top: usize,
}

impl Score {
    fn add(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            negative_log_likelihood: self.negative_log_likelihood + other.negative_log_likelihood,
            divergence: self.divergence + other.divergence,
            same_top: self.same_top + other.same_top,
        }
    }

    /// Scores one token. `reference` are the logits over the f16 cache.
    fn of(logits: &[f32], reference: Option<&[f32]>, token: u32) -> Self {
        let total = log_sum_exp(logits);
        let mut score = Self { tokens: 1, ..Self::default() };
        score.negative_log_likelihood = total - f64::from(logits[token as usize]);
        if let Some(reference) = reference {
            let reference_total = log_sum_exp(reference);
            let term = |(&p, &q): (&f32, &f32)| {
                let (p, q) = (f64::from(p) - reference_total, f64::from(q) - total);
                p.exp() * (p - q)
            };
            score.divergence = reference.iter().zip(logits).map(term).sum();
            score.same_top = usize::from(argmax(reference) == argmax(logits));
        }
        score
    }
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - largest).exp())).sum();
    f64::from(largest) + sum.ln()
}

fn argmax(logits: &[f32]) -> Option<usize> {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map(|(index, _)| index)
}

impl Task for Evaluation {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint, text } = self;
        let config = options.cache.config(checkpoint.config())?;
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
        let llama = Llama::load(backend, &checkpoint)?;
        if !options.json {
            eprintln!(
                "{}; {}; cache: {}; {chunks} chunks of {ctx} tokens",
                options.model.model,
                device::describe(llama.backend(), &checkpoint),
                options.cache.describe(&config, checkpoint.config()),
            );
        }
        if options.mode == Mode::Prefill {
            eprintln!(
                "prefill mode: every token sees its chunk in full precision, no code is ever read"
            );
        }
        let bar = progress(options.json, chunks * ctx);
        let mut score = Score::default();
        let mut in_use = 0;
        let chunks: Vec<&[u32]> = tokens.chunks_exact(ctx).take(chunks).collect();
        for batch in chunks.chunks(options.batch) {
            let mut run = Run::new(&llama, &options, &config, batch.len())?;
            let part = match options.mode {
                Mode::Decode => run.decode(batch, &bar)?,
                Mode::Prefill => run.prefill(batch, &bar)?,
            };
            score = score.add(part);
            in_use = run.session.measure().in_use() / batch.len();
        }
        bar.finish_and_clear();
        report(&options, &llama, &config, chunks.len(), score, in_use)
    }
}

/// A batch of chunks, over the cache in question and perhaps over an f16 cache.
struct Run<'m, B: DecoderBackend> {
    llama: &'m Llama<B>,
    session: Session<'m, B>,
    sequences: Vec<SequenceId>,
    reference: Option<Session<'m, B>>,
    ctx: usize,
}

impl<'m, B: DecoderBackend> Run<'m, B> {
    fn new(
        llama: &'m Llama<B>,
        options: &Perplexity,
        config: &CacheConfig,
        batch: usize,
    ) -> Result<Self> {
        let ctx = options.ctx;
        let mut session = Session::new(llama, config.clone(), batch, ctx)?;
        let mut reference = None;
        if options.kld {
            let config = options.cache.with_formats(Format::F16, Format::F16)?;
            reference = Some(Session::new(llama, config, batch, ctx)?);
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
    fn decode(&mut self, chunks: &[&[u32]], bar: &ProgressBar) -> Result<Score> {
        let mut score = Score::default();
        let rows: Vec<usize> = (0..chunks.len()).collect();
        for position in 0..self.ctx - 1 {
            let steps: Vec<_> = self
                .sequences
                .iter()
                .zip(chunks)
                .map(|(&sequence, chunk)| (sequence, &chunk[position..=position]))
                .collect();
            let hidden = self.session.step(&steps)?;
            let reference =
                self.reference.as_mut().map(|session| session.step(&steps)).transpose()?;
            if position >= self.ctx / 2 {
                let targets: Vec<u32> = chunks.iter().map(|chunk| chunk[position + 1]).collect();
                score = score.add(self.score(&hidden, reference.as_ref(), &rows, &targets)?);
            }
            bar.inc(chunks.len() as u64);
        }
        Ok(score)
    }

    /// One chunk after the other, each as one prompt.
    fn prefill(&mut self, chunks: &[&[u32]], bar: &ProgressBar) -> Result<Score> {
        let mut score = Score::default();
        for (&sequence, chunk) in self.sequences.clone().iter().zip(chunks) {
            let step = [(sequence, *chunk)];
            self.session.state_mut().begin_prompt(sequence, chunk.len())?;
            let hidden = self.session.step(&step)?;
            let mut reference = None;
            if let Some(session) = &mut self.reference {
                session.state_mut().begin_prompt(sequence, chunk.len())?;
                reference = Some(session.step(&step)?);
            }
            // Logits of some rows at a time: all of them would be the largest buffer by far.
            let rows: Vec<usize> = (self.ctx / 2..self.ctx - 1).collect();
            for rows in rows.chunks(128) {
                let targets: Vec<u32> = rows.iter().map(|row| chunk[row + 1]).collect();
                score = score.add(self.score(&hidden, reference.as_ref(), rows, &targets)?);
            }
            bar.inc(chunk.len() as u64);
        }
        Ok(score)
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

fn report<B: DecoderBackend>(
    options: &Perplexity,
    llama: &Llama<B>,
    config: &CacheConfig,
    chunks: usize,
    score: Score,
    in_use: usize,
) -> Result<()> {
    let tokens = score.tokens as f64;
    let perplexity = (score.negative_log_likelihood / tokens).exp();
    if !perplexity.is_finite() {
        bail!("the perplexity is {perplexity}: the model's logits are not numbers");
    }
    let kld = options.kld.then_some(score.divergence / tokens);
    let same_top = options.kld.then_some(score.same_top as f64 / tokens);
    let layers = llama.cache_layers(config);
    let spec = kivi::PoolSpec::for_context(config.clone(), layers, 1, options.ctx)?;
    let cached = options.ctx - usize::from(options.mode == Mode::Decode);
    let bits = 8.0 * in_use as f64 / memory::elements(&spec, cached) as f64;
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
        }));
    }
    output::print(&format!("perplexity {perplexity:.4} over {} tokens\n", score.tokens))?;
    if let (Some(kld), Some(same)) = (kld, same_top) {
        output::print(&format!(
            "KL divergence to the f16 cache {kld:.5} nats per token, same most likely token {:.2} %\n",
            100.0 * same
        ))?;
    }
    eprintln!("cache of one chunk: {}, {bits:.2} bits per element", bytes(in_use));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_known_distributions() {
        // Uniform over four tokens: −ln ¼. Logits ln 3 and 0 are probabilities ¾ and ¼.
        let uniform = Score::of(&[1.0; 4], Some(&[1.0; 4]), 2);
        assert!((uniform.negative_log_likelihood - 4f64.ln()).abs() < 1e-7);
        assert!(uniform.divergence.abs() < 1e-9 && uniform.same_top == 1);
        let skewed = [3f32.ln(), 0.0];
        let score = Score::of(&[0.0, 0.0], Some(&skewed), 1);
        // KL(¾, ¼ ‖ ½, ½) = ¾ ln 1.5 + ¼ ln 0.5
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((score.divergence - expected).abs() < 1e-7);
    }
}
