//! `kivi eval`.

mod choice;
mod errors;
mod gsm8k;
mod longbench;
mod metrics;
mod needle;
mod perplexity;
mod qa;
pub(super) mod score;
mod suite;
pub(super) mod text;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure quality.
#[derive(Args, Debug)]
pub(super) struct Eval {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Perplexity of a text.
    Perplexity(Box<perplexity::Perplexity>),
    /// Errors of keys, values and attention, per token and per channel.
    Errors(Box<errors::Errors>),
    /// Repeat a number hidden in a monotonous text.
    Passkey(Box<needle::Passkey>),
    /// Find a fact at every depth of texts of several lengths.
    Needle(Box<needle::Needle>),
    /// Multiple choice by log-likelihood.
    Choice(Box<choice::Choice>),
    /// Grade-school mathematics with worked examples.
    Gsm8k(Box<gsm8k::Gsm8k>),
    /// Questions about stories, by exact match and F1.
    Qa(Box<qa::Qa>),
    /// Questions about long documents, in LongBench's format.
    #[command(name = "longbench")]
    LongBench(Box<longbench::LongBench>),
}

impl Eval {
    pub(super) fn execute(self) -> Result<()> {
        match self.what {
            What::Perplexity(perplexity) => perplexity.execute(),
            What::Errors(errors) => errors.execute(),
            What::Passkey(passkey) => passkey.execute(),
            What::Needle(needle) => needle.execute(),
            What::Choice(choice) => choice.execute(),
            What::Gsm8k(gsm8k) => gsm8k.execute(),
            What::Qa(qa) => qa.execute(),
            What::LongBench(longbench) => longbench.execute(),
        }
    }
}
