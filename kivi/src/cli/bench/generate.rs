//! `kivi bench generate`.

use super::{
    options::{CommonOptions, Formats, count},
    report::{Percentiles, Report, progress},
};
use crate::cli::{
    cache::{self, Cache},
    device::{self, DeviceOptions, Task},
    machine,
    model::{self, ModelOptions},
    output,
    summary::bytes,
};
use anyhow::{Result, bail};
use clap::Args;
use indicatif::ProgressBar;
use kivi::{
    DecoderBackend, KeyValue, SequenceId,
    memory::MeasuredBytes,
    models::{Checkpoint, Llama, Session, tokenizer::Tokenizer},
};
use serde_json::json;
use std::{path::PathBuf, time::Instant};

/// Prompt processing and generation of a model.
///
/// Prompts are timed on an empty cache; generation at each depth, that is, with so many tokens in
/// the cache when the first step begins. Formats take turns, so that a disturbance hits all of them.
#[derive(Args, Debug)]
pub(in crate::cli) struct BenchGenerate {
    #[command(flatten)]
    model: ModelOptions,
    /// Tokens of the prompt.
    #[arg(long, env = "KIVI_PROMPT", value_parser = count::<1, 16_777_216>, default_value_t = 512, value_name = "N")]
    prompt: usize,
    /// Tokens in the cache before the generation.
    #[arg(long, env = "KIVI_DEPTH", value_delimiter = ',', value_parser = count::<0, 16_777_216>, default_value = "0,1024,4096", value_name = "N,…")]
    depth: Vec<usize>,
    /// Sequences that are generated together.
    #[arg(long, env = "KIVI_BATCH", value_parser = count::<1, 4096>, default_value_t = 1, value_name = "N")]
    batch: usize,
    /// Cache formats, KEYS:VALUES where they differ [default: f16 and the formats kivi run takes].
    #[arg(long, env = "KIVI_FORMAT", value_delimiter = ',', value_name = "TYPE,…")]
    format: Vec<Formats>,
    /// Cache plans to time as well, as kivi tune writes them, each with its own lengths and sinks.
    #[arg(long, env = "KIVI_CACHE_PLAN", value_delimiter = ',', value_name = "FILE,…")]
    cache_plan: Vec<PathBuf>,
    /// Tokens to generate for each sequence.
    #[arg(long, env = "KIVI_GENERATE", value_parser = count::<1, 1_000_000>, default_value_t = 32, value_name = "N")]
    generate: usize,
    /// How often everything is timed; the median counts.
    #[arg(long, env = "KIVI_REPEATS", value_parser = count::<1, 1_000_000>, default_value_t = 3, value_name = "N")]
    repeats: usize,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    common: CommonOptions,
}

/// What the caches are filled with, over and over.
const TEXT: &str = "The harbour lies where the river widens before it meets the sea. In the morning \
    the boats come back with herring and mackerel, and the market on the quay is over by nine. \
    People here say that the lighthouse was built twice: once by the men who paid for it, and once \
    by those who had to climb it in the first winter. ";

/// Tokens of the comparison of a prompt with a generated token: below the smallest residual, so that
/// nothing is quantized and every format must give the same logits.
const CHECKED_TOKENS: usize = 16;

/// Largest difference of two logits, relative to the largest logit.
const TOLERANCE: f32 = 1e-4;

impl BenchGenerate {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        for &formats in &self.format {
            self.common.config(formats)?;
        }
        let checkpoint = self.model.open(!self.common.quiet())?;
        let context = checkpoint.config().context_length;
        if self.prompt > context {
            bail!("a prompt of {} tokens is beyond the model's context of {context}", self.prompt);
        }
        let deepest = self.depth.iter().copied().max().unwrap_or_default();
        if self.generate > context || deepest > context - self.generate {
            bail!(
                "a depth of {deepest} and {} generated tokens are beyond the model's context of \
                 {context}",
                self.generate
            );
        }
        let device = self.device.clone();
        device.run(Benchmark { options: self, checkpoint })
    }
}

struct Benchmark {
    options: BenchGenerate,
    checkpoint: Checkpoint,
}

impl Task for Benchmark {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let mut formats = options.format.clone();
        if formats.is_empty() {
            let named = cache::default_cache(checkpoint.config());
            formats = vec![Formats::F16, Formats(KeyValue::new(named.key, named.value))];
        }
        let model = checkpoint.config();
        let configs = formats.iter().map(|&formats| {
            Ok((formats.to_string(), Cache::uniform(options.common.config(formats)?, model)))
        });
        let mut configs = configs.collect::<Result<Vec<_>>>()?;
        for path in &options.cache_plan {
            configs.push((path.display().to_string(), Cache::of_plan(path, model)?));
        }
        let text = Text::new(&model::tokenizer(&checkpoint)?)?;
        let (name, isa) = (backend.capabilities().name, options.device.isa()?);
        let llama = options.model.load(backend, &checkpoint)?;
        let report = Report::new(
            options.common.report.json.clone(),
            json!({
                "backend": name,
                "isa": isa,
                "threads": rayon::current_num_threads(),
                "model": options.model.model,
                "architecture": checkpoint.config().architecture.name(),
                "layers": checkpoint.config().layers,
                "query_heads": checkpoint.config().query_heads,
                "kv_heads": checkpoint.config().kv_heads,
                "head_dim": checkpoint.config().head_dim,
                "tolerance": TOLERANCE,
            }),
        )?;
        let (n, depths) = (configs.len(), options.depth.len());
        let steps = options.repeats * n + depths * n * (options.batch + options.repeats);
        let bar = progress(options.common.quiet(), steps);
        if !options.common.quiet() {
            bar.suspend(|| {
                eprintln!(
                    "{}; {}; {} of {} tokens, {} generated",
                    options.model.model,
                    device::describe(&llama, &checkpoint),
                    if options.repeats == 1 { "a prompt" } else { "prompts" },
                    options.prompt,
                    options.generate,
                );
            });
        }
        Run { llama: &llama, options: &options, configs, text, isa, bar, report }.execute()
    }
}

/// Tokens of the text, and those that every text begins with.
struct Text {
    start: Vec<u32>,
    tokens: Vec<u32>,
}

impl Text {
    fn new(tokenizer: &Tokenizer) -> Result<Self> {
        let tokens = tokenizer.encode(TEXT, false, false)?;
        let mut start = tokenizer.encode(TEXT, true, false)?;
        start.truncate(start.len().saturating_sub(tokens.len()));
        if tokens.is_empty() {
            bail!("the tokenizer makes no tokens of a text of {} bytes", TEXT.len());
        }
        Ok(Self { start, tokens })
    }

    /// The first `length` tokens for a sequence of the batch; each begins elsewhere.
    fn of(&self, sequence: usize, length: usize) -> Vec<u32> {
        let text = self.tokens.iter().cycle().skip(sequence % self.tokens.len());
        self.start.iter().chain(text).copied().take(length).collect()
    }
}

/// A cache of one format that is filled to some depth.
struct Filled<B: DecoderBackend> {
    session: Session<B>,
    sequences: Vec<SequenceId>,
    /// The token each sequence continues with.
    next: Vec<u32>,
    /// The cache at this depth.
    bytes: MeasuredBytes,
    /// Seconds of each repeat.
    times: Vec<f64>,
}

struct Run<'m, B: DecoderBackend> {
    llama: &'m Llama<B>,
    options: &'m BenchGenerate,
    configs: Vec<(String, Cache)>,
    text: Text,
    isa: &'static str,
    bar: ProgressBar,
    report: Report,
}

impl<'m, B: DecoderBackend> Run<'m, B> {
    fn execute(mut self) -> Result<()> {
        for (formats, cache) in &self.configs {
            self.check(formats, cache)?;
        }
        let prompts = self.prompts()?;
        self.print(HEADING)?;
        for &depth in &self.options.depth {
            self.bar.set_message(format!("depth {depth}"));
            let fill = |(_, cache): &(_, Cache)| self.fill(cache, depth);
            let mut filled = self.configs.iter().map(fill).collect::<Result<Vec<_>>>()?;
            for _ in 0..self.options.repeats {
                for filled in &mut filled {
                    let time = self.generate(filled, self.options.generate)?;
                    filled.times.push(time);
                    self.bar.inc(1);
                }
            }
            for (index, filled) in filled.into_iter().enumerate() {
                self.record(&self.configs[index].0.clone(), depth, prompts[index], filled)?;
            }
        }
        self.bar.finish_and_clear();
        self.report.finish()
    }

    /// A generated token has the logits it would have at the end of a prompt.
    fn check(&self, formats: &str, cache: &Cache) -> Result<()> {
        let length = CHECKED_TOKENS.min(self.llama.config().context_length);
        let tokens = self.text.of(0, length);
        let Some((last, before)) = tokens.split_last().filter(|(_, before)| !before.is_empty())
        else {
            return Ok(());
        };
        let mut session = cache.session(self.llama, 2, length)?;
        let sequence = session.create_sequence()?;
        let whole = session.prompt(sequence, &tokens)?;
        let sequence = session.create_sequence()?;
        session.prompt(sequence, before)?;
        let step = session.generate_step(&[(sequence, &[*last])])?;
        let largest = whole.iter().fold(0f32, |largest, logit| largest.max(logit.abs()));
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE * largest;
        if !whole.iter().zip(&step).all(close) {
            let difference = whole.iter().zip(&step).map(|(a, b)| (a - b).abs());
            bail!(
                "wrong answer for {formats}: logits of token {length} differ by {:.1e} between a \
                 prompt and a step, and the largest is {largest:.1e}",
                difference.fold(0.0, f32::max)
            );
        }
        Ok(())
    }

    /// Prompt speed of each format, in tokens per second.
    fn prompts(&self) -> Result<Vec<f64>> {
        let length = self.options.prompt;
        let (tokens, mut times) = (self.text.of(0, length), vec![Vec::new(); self.configs.len()]);
        let session = |(_, cache): &(_, Cache)| cache.session(self.llama, 1, length);
        let mut sessions = self.configs.iter().map(session).collect::<Result<Vec<_>>>()?;
        self.bar.set_message("prompts");
        for _ in 0..self.options.repeats {
            for (session, times) in sessions.iter_mut().zip(&mut times) {
                let sequence = session.create_sequence()?;
                let start = Instant::now();
                let logits = session.prompt(sequence, &tokens)?;
                times.push(start.elapsed().as_secs_f64());
                most_likely(&logits)?;
                session.state_mut().remove(sequence)?;
                self.bar.inc(1);
            }
        }
        Ok(times.into_iter().map(|times| length as f64 / Percentiles::of(times).median).collect())
    }

    /// Every sequence of the batch gets its own prompt: forks of one would read the same pages.
    fn fill(&self, cache: &Cache, depth: usize) -> Result<Filled<B>> {
        let batch = self.options.batch;
        let context = depth + self.options.generate;
        let mut session = cache.session(self.llama, 2 * batch, context)?;
        let (mut sequences, mut next) = (Vec::new(), Vec::new());
        for index in 0..batch {
            let sequence = session.create_sequence()?;
            let prompt = self.text.of(index, depth + 1);
            next.push(match depth {
                0 => prompt[0],
                _ => most_likely(&session.prompt(sequence, &prompt[..depth])?)?,
            });
            sequences.push(sequence);
            self.bar.inc(1);
        }
        let bytes = session.measure();
        let mut filled = Filled { session, sequences, next, bytes, times: Vec::new() };
        // Warms up, and finds logits that are not numbers before anything is timed.
        self.generate(&mut filled, 1)?;
        Ok(filled)
    }

    /// Generates on a copy of every sequence and returns the seconds it took.
    fn generate(&self, filled: &mut Filled<B>, steps: usize) -> Result<f64> {
        let session = &mut filled.session;
        let mut forks = Vec::new();
        for &sequence in &filled.sequences {
            forks.push(session.fork(sequence)?);
        }
        let mut tokens = filled.next.clone();
        let vocabulary = self.llama.config().vocab_size;
        let start = Instant::now();
        for _ in 0..steps {
            let step: Vec<_> =
                forks.iter().copied().zip(tokens.iter().map(std::slice::from_ref)).collect();
            let logits = session.generate_step(&step)?;
            tokens = logits.chunks_exact(vocabulary).map(most_likely).collect::<Result<_>>()?;
        }
        let time = start.elapsed().as_secs_f64();
        for fork in forks {
            session.state_mut().remove(fork)?;
        }
        Ok(time)
    }

    fn record(
        &mut self,
        formats: &str,
        depth: usize,
        prompt_rate: f64,
        filled: Filled<B>,
    ) -> Result<()> {
        let (batch, steps) = (self.options.batch, self.options.generate);
        let time = Percentiles::of(filled.times).median;
        let (rate, step) = ((batch * steps) as f64 / time, 1e3 * time / steps as f64);
        let MeasuredBytes { allocated, .. } = filled.bytes;
        let in_use = filled.bytes.in_use();
        let config = filled.session.state().spec().config();
        self.report.push(json!({
            "prompt_tokens": self.options.prompt,
            "depth": depth,
            "batch": batch,
            "format": formats,
            "group_size": config.group_size(),
            "residual_length": config.residual_length(),
            "sink_length": config.sink_length(),
            "generated_tokens": steps,
            "prompt_tokens_per_second": prompt_rate,
            "generation_tokens_per_second": rate,
            "milliseconds_per_step": step,
            "cache_bytes": { "in_use": in_use, "allocated": allocated },
            "peak_resident_bytes": machine::resident_bytes().map(|(_, peak)| peak),
            "isa": self.isa,
            "threads": rayon::current_num_threads(),
        }))?;
        self.print(&format!(
            "{formats:<11} {batch:>5} {depth:>7}  {prompt_rate:>9.1}  {rate:>13.2} {step:>9.2}  \
             {:>10} {:>10}",
            bytes(in_use),
            bytes(allocated),
        ))
    }

    fn print(&self, line: &str) -> Result<()> {
        if !self.options.common.quiet() {
            self.bar.suspend(|| output::print(&format!("{line}\n")))?;
        }
        Ok(())
    }
}

const HEADING: &str =
    "format      batch   depth   prompt/s    generated/s   ms/step       cache  allocated";

/// The token with the largest logit.
fn most_likely(logits: &[f32]) -> Result<u32> {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if !logit.is_finite() {
            bail!("the logit of token {token} is {logit}: the model's logits are not numbers");
        }
        if *logit > logits[best] {
            best = token;
        }
    }
    Ok(best as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_begin_alike_and_go_round() {
        let text = Text { start: vec![1], tokens: vec![5, 6, 7] };
        assert_eq!(text.of(0, 6), [1, 5, 6, 7, 5, 6]);
        assert_eq!(text.of(4, 3), [1, 6, 7]);
        assert_eq!(text.of(0, 1), [1]);
    }

    #[test]
    fn the_first_of_equal_logits_is_taken_and_nan_is_refused() {
        assert_eq!(most_likely(&[-2.0, -1.0, -1.0]).unwrap(), 1);
        assert!(most_likely(&[0.0, f32::NAN]).is_err());
    }
}
