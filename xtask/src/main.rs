//! Development tasks of the workspace: `cargo xtask <command>`.

mod cargo;
mod cli_page;
mod codegen;
mod debian;
mod docs;
mod emulated;
mod peers;
mod report;
mod repro;
mod shell;
mod smoke;
mod software_gpu;

use clap::{Parser, Subcommand};
use report::Report;
use std::process::ExitCode;

#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about, disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run every check, cheapest first: what CI runs and what a change must pass
    #[command(alias = "validate")]
    Test {
        /// Leave out the checks that fetch and run a real model
        #[arg(long)]
        no_model: bool,
    },
    /// Run only the checks that fetch and run a real model
    Smoke,
    /// Check the documentation: links, table of contents, generated pages
    Docs {
        /// Write the generated pages instead of comparing them
        #[arg(long)]
        write: bool,
    },
    /// Run the CPU backend's tests on an emulated Arm processor
    Emulated,
    /// Compile the GPU kernels for NVIDIA devices, report their machine code and emulate it
    Codegen(codegen::Codegen),
    /// Fetch the default model into the cache folder
    FetchModel,
    /// Measure kivi beside llama.cpp, which is fetched and compiled for it
    BenchPeers(peers::BenchPeers),
    /// Reproduce a table or figure of the paper on a model at hand
    Repro(repro::Repro),
}

fn main() -> ExitCode {
    let mut report = Report::default();
    match Arguments::parse().command {
        Command::Test { no_model } => test(&mut report, no_model),
        Command::Smoke => {
            report.step("build", cargo::build_kivi);
            smoke_test(&mut report);
        }
        Command::Docs { write } => {
            report.step("documentation links", docs::check);
            report.step("build", cargo::build_kivi);
            report.step("command-line page", || cli_page::run(write));
        }
        Command::Emulated => {
            report.step("emulated Arm processor", emulated::arm);
        }
        Command::Codegen(codegen) => codegen.run(&mut report),
        Command::FetchModel => {
            report.step("build", cargo::build_kivi);
            report.step("default model", smoke::fetch);
        }
        Command::BenchPeers(bench) => bench.run(&mut report),
        Command::Repro(repro) => repro.run(&mut report),
    }
    report.finish()
}

fn test(report: &mut Report, no_model: bool) {
    report.step("formatting", cargo::fmt);
    report.step("documentation links", docs::check);
    report.step("clippy", cargo::clippy);
    report.step("rustdoc", cargo::rustdoc);
    report.step("Vulkan driver", software_gpu::driver);
    report.step("NVIDIA's compiler", codegen::fetch);
    // The tests of the command line need the program, so this builds it for the steps below, too;
    // `cargo build` would compile some crates again, without the features of the tests.
    report.step("tests and doctests", cargo::test);
    report.step("command-line page", || cli_page::run(false));
    report.step("a cache on the GPU", software_gpu::example);
    report.step("NVIDIA machine code", codegen::check);
    report.step("emulated Arm processor", emulated::arm);
    if !no_model {
        smoke_test(report);
    }
}

/// The checks that need the default model.
fn smoke_test(report: &mut Report) {
    let model = report.step("default model", smoke::fetch);
    report.step("full disk while fetching", smoke::full_disk);
    // Without the model the rest has nothing to run on; the steps still show, as skipped.
    let with_model = |check: fn() -> report::Check| {
        move || {
            if model { check() } else { Err(report::Problem::skipped("no model")) }
        }
    };
    report.step("kivi run: a sentence", with_model(smoke::sentence));
    report.step("kivi run: 600 tokens", with_model(smoke::long_answer));
    report.step("kivi run: a cache of 4,096", with_model(smoke::long_context));
    report.step("kivi eval perplexity: prefill", with_model(smoke::perplexity_prefill));
    report.step("kivi eval perplexity: decode", with_model(smoke::perplexity_decode));
}
