//! `kivi eval`.

mod perplexity;

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
}

impl Eval {
    pub(super) fn execute(self) -> Result<()> {
        match self.what {
            What::Perplexity(perplexity) => perplexity.execute(),
        }
    }
}
