//! `kivi bench lookup`: what prompt lookup brings.

use super::{options::ReportOptions, prefix::engine_cache, report::Report};
use crate::cli::{
    cache::LengthOptions,
    device::{self, DeviceOptions, Task},
    model::{self, ModelOptions},
    output,
};
use anyhow::{Result, bail};
use clap::Args;
use kivi::{
    DecoderBackend, NamedCache,
    engine::{Engine, EngineStats, Lookup, Request},
    models::{Checkpoint, Llama},
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
    model: ModelOptions,
    /// Cache by name, as kivi run takes it [default: the model's].
    #[arg(long, env = "KIVI_CACHE", value_name = "NAME")]
    cache: Option<NamedCache>,
    #[command(flatten)]
    layout: LengthOptions,
    /// The prompt; without it a short text, three times over.
    #[arg(long, env = "KIVI_FILE")]
    file: Option<PathBuf>,
    /// Tokens to generate.
    #[arg(long, env = "KIVI_GENERATE", default_value_t = 2000, value_name = "TOKENS")]
    generate: usize,
    /// Tokens to propose at once.
    #[arg(
        long,
        env = "KIVI_DRAFT",
        value_delimiter = ',',
        default_value = "4,8,16",
        value_name = "TOKENS,…"
    )]
    draft: Vec<usize>,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    report: ReportOptions,
}

const REPEATING: &str = "The kettle is on the stove, and the cat sleeps in the window. At nine the \
    baker opens his shop; at noon the bell rings twice. The boats come back before the rain. ";

impl BenchLookup {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let checkpoint = self.model.open(!self.report.quiet())?;
        let device = self.device.clone();
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
            Some(path) => std::fs::read_to_string(path)
                .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", path.display()))?,
        };
        let mut request = Request::new(tokenizer.encode(&text, true, false)?, options.generate);
        request.forbidden = model::stop_tokens(&checkpoint, &tokenizer);
        let most = options.draft.iter().copied().max().unwrap_or_default();
        let cache = engine_cache(options.cache, &options.layout, &checkpoint, most)?;
        let llama = options.model.load(backend, &checkpoint)?;
        let name = llama.backend().capabilities().name;
        let mut report = Report::new(
            options.report.json.clone(),
            json!({
                "backend": name,
                "threads": rayon::current_num_threads(),
                "model": options.model.model,
                "cache": cache.describe(),
                "prompt_tokens": request.prompt.len(),
                "generated_tokens": options.generate,
            }),
        )?;
        if !options.report.quiet() {
            eprintln!(
                "{}; {}; cache: {}; {} tokens of prompt",
                options.model.model,
                device::describe(&llama, &checkpoint),
                cache.describe(),
                request.prompt.len(),
            );
        }
        let run = |lookup| {
            let builder = Engine::builder(&llama).cache(cache.config.clone(), cache.layers.clone());
            generate(&llama, builder.kv_memory(8 << 30), lookup, &request)
        };
        let plain = run(None)?;
        for draft in std::iter::once(0).chain(options.draft.iter().copied()) {
            let measured = match draft {
                0 => plain.clone(),
                _ => run(Some(Lookup { draft_tokens: draft, ..Lookup::default() }))?,
            };
            if measured.tokens != plain.tokens {
                bail!("wrong answer: with drafts of {draft} the tokens differ from those without");
            }
            let stats = &measured.stats;
            let (rate, ratio) = (measured.rate(), measured.rate() / plain.rate());
            report.push(json!({
                "draft": draft,
                "tokens_per_second": rate,
                "ratio": ratio,
                "steps": stats.steps,
                "drafted_tokens": stats.drafted_tokens,
                "accepted_tokens": stats.accepted_tokens,
            }))?;
            if !options.report.quiet() {
                output::print(&format!(
                    "drafts of {draft:2}: {rate:6.1} tokens/s, {ratio:.2} times; {} steps, {} of {} \
                     drafted tokens accepted\n",
                    stats.steps, stats.accepted_tokens, stats.drafted_tokens,
                ))?;
            }
        }
        report.finish()
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
    llama: &Llama<B>,
    builder: kivi::engine::EngineBuilder<B>,
    lookup: Option<Lookup>,
    request: &Request,
) -> Result<Measured> {
    let builder = builder.context(llama.config().context_length);
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
