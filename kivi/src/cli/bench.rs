//! `kivi bench`: speeds, each with the bytes that were read and a check of the answer.

mod attention;
mod engine;
mod generate;
mod layers;
mod lookup;
mod options;
mod oracle;
mod prefix;
mod reading;
mod report;
mod shape;
mod throughput;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Measure speed.
#[derive(Args, Debug)]
pub(super) struct Bench {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// Attention over a filled cache, beside the speed of reading as many bytes.
    Attention(Box<attention::BenchAttention>),
    /// Prompt processing and generation of a model.
    Generate(Box<generate::BenchGenerate>),
    /// Many requests at once, with as many sequences as fit a number of bytes.
    Throughput(Box<throughput::BenchThroughput>),
    /// Time to the first token of a prompt whose beginning is kept, beside one that is not.
    Prefix(Box<prefix::BenchPrefix>),
    /// Generation with drafts by prompt lookup, beside generation without.
    Lookup(Box<lookup::BenchLookup>),
}

impl Bench {
    pub(super) fn execute(self) -> Result<()> {
        match self.what {
            What::Attention(attention) => attention.execute(),
            What::Generate(generate) => generate.execute(),
            What::Throughput(throughput) => throughput.execute(),
            What::Prefix(prefix) => prefix.execute(),
            What::Lookup(lookup) => lookup.execute(),
        }
    }
}
