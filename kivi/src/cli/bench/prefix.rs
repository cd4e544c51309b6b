//! `kivi bench prefix`: what a shared prefix saves.

use super::{
    engine::{EngineOptions, Ready},
    options::count,
};
use crate::cli::{device::Task, eval::text::read_tokens, model, output};
use anyhow::{Result, bail};
use clap::Args;
use kivi::{
    DecoderBackend,
    engine::{Engine, Event, Request},
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
    engine: EngineOptions,
    /// A text to cut the prompts from.
    #[arg(long, env = "KIVI_FILE")]
    file: PathBuf,
    /// Tokens that the prompts have in common.
    #[arg(long, env = "KIVI_SHARED_PREFIX", value_parser = count::<0, 16_777_216>, default_value_t = 4096, value_name = "TOKENS")]
    shared_prefix: usize,
    /// Tokens that each has of its own.
    #[arg(long, env = "KIVI_OWN", value_parser = count::<1, 16_777_216>, default_value_t = 16, value_name = "TOKENS")]
    own: usize,
    /// Tokens of an answer.
    #[arg(long, env = "KIVI_GENERATE", value_parser = count::<1, 16_777_216>, default_value_t = 32, value_name = "TOKENS")]
    generate: usize,
}

impl BenchPrefix {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let checkpoint = self.engine.model.open(!self.engine.report.quiet())?;
        let device = self.engine.device.clone();
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
        let tokenizer = model::tokenizer(&checkpoint)?;
        let tokens = read_tokens(&options.file, &tokenizer)?;
        let (shared, own, generate) = (options.shared_prefix, options.own, options.generate);
        if tokens.len() < shared + 2 * own {
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

        let details = json!({ "shared_prefix": shared, "own": own });
        let mut ready = options.engine.prepare(backend, &checkpoint, 0, details)?;
        let engine = |ready: &Ready<B>, share| ready.engine().prefix_sharing(share).build();
        let mut keeping = engine(&ready, true)?;
        let first = answer(&mut keeping, request(0))?;
        let hit = answer(&mut keeping, request(1))?;
        let cold = answer(&mut engine(&ready, false)?, request(1))?;
        if hit.tokens != cold.tokens {
            bail!("wrong answer: with a shared prefix the tokens differ from those without");
        }
        let ratio = cold.first_token / hit.first_token;
        for (what, measured) in [("first", &first), ("hit", &hit), ("cold", &cold)] {
            ready.report.push(json!({
                "prompt": what,
                "reused_tokens": measured.reused,
                "time_to_first_token_ms": 1e3 * measured.first_token,
            }))?;
        }
        ready.report.note("ratio", json!(ratio))?;
        if !options.engine.report.quiet() {
            output::print(&format!(
                "cold: {:.0} ms to the first token; with {} of {} tokens kept: {:.0} ms, {ratio:.1} \
                 times faster; {generate} equal tokens\n",
                1e3 * cold.first_token,
                hit.reused,
                shared + own,
                1e3 * hit.first_token,
            ))?;
        }
        ready.report.finish()
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
