//! `kivi bench lookup`: what prompt lookup brings.

use super::{
    engine::{EngineOptions, Ready},
    options::count,
};
use crate::cli::{device::Task, eval::text::read_text, model, output};
use anyhow::{Result, bail};
use clap::Args;
use kivi::{
    DecoderBackend,
    engine::{EngineStats, Lookup, Request},
    models::Checkpoint,
};
use serde_json::json;
use std::{path::PathBuf, time::Instant};

/// Generation with drafts by prompt lookup, beside generation without.
///
/// Greedy; both must answer the same, token by token, so that taking drafts back is checked across
/// every boundary of the cache. The prompt is a file, or a text that repeats itself.
#[derive(Args, Debug)]
pub(in crate::cli) struct BenchLookup {
    #[command(flatten)]
    engine: EngineOptions,
    /// The prompt; without it a short text, three times over.
    #[arg(long, env = "KIVI_FILE")]
    file: Option<PathBuf>,
    /// Tokens to generate.
    #[arg(long, env = "KIVI_GENERATE", value_parser = count::<2, 16_777_216>, default_value_t = 2000, value_name = "TOKENS")]
    generate: usize,
    /// Tokens to propose at once.
    #[arg(
        long,
        env = "KIVI_DRAFT",
        value_delimiter = ',',
        value_parser = count::<1, 4_096>,
        default_value = "4,8,16",
        value_name = "TOKENS,…"
    )]
    draft: Vec<usize>,
}

const REPEATING: &str = "The kettle is on the stove, and the cat sleeps in the window. At nine the \
    baker opens his shop; at noon the bell rings twice. The boats come back before the rain. ";

impl BenchLookup {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let checkpoint = self.engine.model.open(!self.engine.report.quiet())?;
        let device = self.engine.device.clone();
        device.run(Benchmark { options: self, checkpoint })
    }
}

struct Benchmark {
    options: BenchLookup,
    checkpoint: Checkpoint,
}

impl Task for Benchmark {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, checkpoint } = self;
        let tokenizer = model::tokenizer(&checkpoint)?;
        let text = match &options.file {
            None => REPEATING.repeat(3),
            Some(path) => read_text(path)?,
        };
        let mut request = Request::new(tokenizer.encode(&text, true, false)?, options.generate);
        request.forbidden = model::stop_tokens(&checkpoint, &tokenizer);
        let most = options.draft.iter().copied().max().unwrap_or_default();
        let (prompt_tokens, generated_tokens) = (request.prompt.len(), options.generate);
        let details =
            json!({ "prompt_tokens": prompt_tokens, "generated_tokens": generated_tokens });
        let mut ready = options.engine.prepare(backend, &checkpoint, most, details)?;
        let plain = generate(&ready, None, &request)?;
        for draft in std::iter::once(0).chain(options.draft.iter().copied()) {
            let measured = match draft {
                0 => plain.clone(),
                _ => {
                    let lookup = Lookup { draft_tokens: draft, ..Lookup::default() };
                    generate(&ready, Some(lookup), &request)?
                }
            };
            if measured.tokens != plain.tokens {
                bail!("wrong answer: with drafts of {draft} the tokens differ from those without");
            }
            let stats = &measured.stats;
            let (rate, ratio) = (measured.rate(), measured.rate() / plain.rate());
            ready.report.push(json!({
                "draft": draft,
                "tokens_per_second": rate,
                "ratio": ratio,
                "steps": stats.steps,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
            }))?;
            if !options.engine.report.quiet() {
                output::print(&format!(
                    "drafts of {draft:2}: {rate:6.1} tokens/s, {ratio:.2} times; {} steps, {} of {} \
                     drafted tokens accepted\n",
                    stats.steps, stats.accepted_tokens, stats.drafted_tokens,
                ))?;
            }
        }
        ready.report.finish()
    }
}

/// One answer and how long it took after its first token.
#[derive(Clone)]
struct Measured {
    tokens: Vec<u32>,
    seconds: f64,
    stats: EngineStats,
}

impl Measured {
    fn rate(&self) -> f64 {
        (self.tokens.len() - 1) as f64 / self.seconds
    }
}

fn generate<B: DecoderBackend>(
    ready: &Ready<B>,
    lookup: Option<Lookup>,
    request: &Request,
) -> Result<Measured> {
    let builder = ready.engine();
    let mut engine = match lookup {
        Some(lookup) => builder.lookup(lookup).build()?,
        None => builder.build()?,
    };
    let events = engine.submit(request.clone())?;
    while engine.stats().generated_tokens == 0 && engine.step()? {}
    let start = Instant::now();
    engine.run()?;
    let seconds = start.elapsed().as_secs_f64();
    let answers = events.collect_now().map_err(|error| anyhow::anyhow!("{error}"))?;
    let tokens = answers.into_iter().next().map(|answer| answer.tokens).unwrap_or_default();
    if tokens.len() != request.max_tokens {
        bail!("{} tokens instead of {}", tokens.len(), request.max_tokens);
    }
    Ok(Measured { tokens, seconds, stats: engine.stats() })
}
