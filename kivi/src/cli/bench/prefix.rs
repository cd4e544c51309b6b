//! `kivi bench prefix`: what a shared prefix saves.

use super::{options::ReportOptions, report::Report};
use crate::cli::{
    cache::{Cache, LengthOptions, default_cache},
    device::{self, DeviceOptions, Task},
    model::{self, ModelOptions},
    output,
};
use anyhow::{Result, bail};
use clap::Args;
use kivi::{
    CacheConfig, DecoderBackend, NamedCache,
    engine::{Engine, Event, Request, SEGMENT_TOKENS},
    models::Checkpoint,
};
use serde_json::json;
use std::{path::PathBuf, time::Instant};

/// Time to the first token of a prompt whose beginning is kept, beside a prompt that is not.
///
/// Two requests of the same prefix and other endings, one after the other, through an engine; then the
/// second one alone through an engine that keeps nothing. Both must answer the same, token by token.
#[derive(Args, Debug)]
pub(in crate::cli) struct BenchPrefix {
    #[command(flatten)]
    model: ModelOptions,
    /// Cache by name, as kivi run takes it [default: the model's].
    #[arg(long, env = "KIVI_CACHE", value_name = "NAME")]
    cache: Option<NamedCache>,
    #[command(flatten)]
    layout: LengthOptions,
    /// A text to cut the prompts from.
    #[arg(long, env = "KIVI_FILE")]
    file: PathBuf,
    /// Tokens that the prompts have in common.
    #[arg(long, env = "KIVI_SHARED_PREFIX", default_value_t = 4096, value_name = "TOKENS")]
    shared_prefix: usize,
    /// Tokens that each has of its own.
    #[arg(long, env = "KIVI_OWN", default_value_t = 16, value_name = "TOKENS")]
    own: usize,
    /// Tokens of an answer.
    #[arg(long, env = "KIVI_GENERATE", default_value_t = 32, value_name = "TOKENS")]
    generate: usize,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    report: ReportOptions,
}

/// The cache of an engine: by name, or the model's.
pub(super) fn engine_cache(
    named: Option<NamedCache>,
    layout: &LengthOptions,
    checkpoint: &Checkpoint,
    rollback: usize,
) -> Result<Cache> {
    let named = named.unwrap_or_else(|| default_cache(checkpoint.config()));
    let builder = layout.apply(CacheConfig::builder().named(named)).rollback_length(rollback);
    let residual = builder.clone().build()?.residual_length();
    let segment = SEGMENT_TOKENS.checked_next_multiple_of(residual);
    Ok(Cache::uniform(builder.segment_tokens(segment).build()?, checkpoint.config()))
}

impl BenchPrefix {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let checkpoint = self.model.open(!self.report.quiet())?;
        let device = self.device.clone();
        device.run(Benchmark { options: self, checkpoint })
    }
}

struct Benchmark {
    options: BenchPrefix,
    checkpoint: Checkpoint,
}

impl Task for Benchmark {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let cache = engine_cache(options.cache, &options.layout, &checkpoint, 0)?;
        let tokenizer = model::tokenizer(&checkpoint)?;
        let text = std::fs::read_to_string(&options.file)
            .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", options.file.display()))?;
        let tokens = tokenizer.encode(&text, true, false)?;
        let (shared, own, generate) = (options.shared_prefix, options.own, options.generate);
        if tokens.len() < shared + 2 * own || own == 0 || generate == 0 {
            bail!(
                "{} has {} tokens, and a prefix of {shared} and two endings of {own} are needed",
                options.file.display(),
                tokens.len()
            );
        }
        let prompt = |ending: usize| {
            let start = shared + ending * own;
            [&tokens[..shared], &tokens[start..start + own]].concat()
        };
        let forbidden = model::stop_tokens(&checkpoint, &tokenizer);
        let request = |ending: usize| {
            let mut request = Request::new(prompt(ending), generate);
            request.forbidden = forbidden.clone();
            request
        };

        let llama = options.model.load(backend, &checkpoint)?;
        let name = llama.backend().capabilities().name;
        let mut report = Report::new(
            options.report.json.clone(),
            json!({
                "backend": name,
                "threads": rayon::current_num_threads(),
                "model": options.model.model,
                "cache": cache.describe(),
                "shared_prefix": shared,
                "own": own,
            }),
        )?;
        if !options.report.quiet() {
            eprintln!(
                "{}; {}; cache: {}",
                options.model.model,
                device::describe(&llama, &checkpoint),
                cache.describe()
            );
        }
        let engine = |share| {
            let builder = Engine::builder(&llama).cache(cache.config.clone(), cache.layers.clone());
            builder.kv_memory(8 << 30).prefix_sharing(share).build()
        };
        let mut keeping = engine(true)?;
        let first = answer(&mut keeping, request(0))?;
        let hit = answer(&mut keeping, request(1))?;
        let cold = answer(&mut engine(false)?, request(1))?;
        if hit.tokens != cold.tokens {
            bail!("wrong answer: with a shared prefix the tokens differ from those without");
        }
        let ratio = cold.first_token / hit.first_token;
        for (what, measured) in [("first", &first), ("hit", &hit), ("cold", &cold)] {
            report.push(json!({
                "prompt": what,
                "reused_tokens": measured.reused,
                "time_to_first_token_ms": 1e3 * measured.first_token,
            }))?;
        }
        report.note("ratio", json!(ratio))?;
        if !options.report.quiet() {
            output::print(&format!(
                "cold: {:.0} ms to the first token; with {} of {} tokens kept: {:.0} ms, {ratio:.1} \
                 times faster; {generate} equal tokens\n",
                1e3 * cold.first_token,
                hit.reused,
                shared + own,
                1e3 * hit.first_token,
            ))?;
        }
        report.finish()
    }
}

/// One answer and when it began.
struct Answer {
    tokens: Vec<u32>,
    reused: usize,
    /// In seconds.
    first_token: f64,
}

fn answer<B: DecoderBackend>(engine: &mut Engine<B>, request: Request) -> Result<Answer> {
    let (start, mut events) = (Instant::now(), engine.submit(request)?);
    let mut answer = Answer { tokens: Vec::new(), reused: 0, first_token: 0.0 };
    loop {
        let more = engine.step()?;
        while let Some(event) = events.try_next() {
            match event {
                Event::Started { reused } => answer.reused = reused,
                Event::Token { token, .. } => {
                    if answer.tokens.is_empty() {
                        answer.first_token = start.elapsed().as_secs_f64();
                    }
                    answer.tokens.push(token);
                }
                Event::Failed(error) => bail!("{error}"),
                _ => {}
            }
        }
        if !more {
            return Ok(answer);
        }
    }
}
