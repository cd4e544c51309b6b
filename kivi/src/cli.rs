//! Commands, and what they have in common: results go to standard output, everything else to
//! standard error; errors are one line and end with exit code 1 (2 for wrong options).

mod bench;
mod cache;
mod chat;
mod device;
mod eval;
mod inspect;
mod machine;
mod model;
mod output;
mod plot;
mod run;
mod sampling;
mod session_file;
mod summary;
mod tune;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// The 2-bit KV cache for language-model inference (KIVI, arXiv 2402.02750).
///
/// Every option can also be set in the environment, as KIVI_ followed by its name.
#[derive(Debug, Parser)]
#[command(name = "kivi", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Generate text, or chat.
    Run(Box<run::Run>),
    /// Measure quality.
    Eval(Box<eval::Eval>),
    /// Find key and value formats for each layer.
    Tune(Box<tune::Tune>),
    /// Measure speed.
    Bench(Box<bench::Bench>),
    /// Show what a model is and how large its cache gets.
    Inspect(inspect::Inspect),
}

pub(crate) fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::builder()
        .with_default_directive(tracing_subscriber::filter::LevelFilter::WARN.into())
        .from_env_lossy();
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .without_time()
        .with_target(false)
        .init();
    match execute(Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        // The reader went away: nothing is wrong, and nobody listens.
        Err(error) if output::is_closed(&error) => ExitCode::SUCCESS,
        Err(error) => {
            // Its causes are part of its text.
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn execute(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Run(run) => run.execute(),
        Command::Eval(eval) => eval.execute(),
        Command::Tune(tune) => tune.execute(),
        Command::Bench(bench) => bench.execute(),
        Command::Inspect(inspect) => inspect.execute(),
    }
}
