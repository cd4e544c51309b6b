//! Compiles the kernels for NVIDIA devices and reports what they became: `cargo xtask codegen` runs
//! this with the tools that it installs.
//!
//! `codegen TOOLS FOLDER [--arch sm_80,sm_90] [--write PAGE DATA | --check PAGE DATA]`

use kivi_cuda::offline::{Architecture, Report, Toolchain, problems};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    let (tools, folder, mut options) = match arguments {
        [tools, folder, options @ ..] => (Path::new(tools), Path::new(folder), options),
        _ => return Err("codegen TOOLS FOLDER [--arch …] [--write PAGE DATA | --check …]".into()),
    };
    let mut architectures = Architecture::ALL.to_vec();
    if let ["--arch", names, rest @ ..] = options {
        architectures = names.split(',').map(str::parse).collect::<Result<_, _>>()?;
        options = rest;
    }
    let report = Report::make(&problems(), &architectures, &Toolchain::open(tools)?, folder)?;
    for kernel in &report.kernels {
        print!(
            "{:<52} {:>6}: {:>3} registers",
            kernel.problem, kernel.architecture, kernel.registers
        );
        for l in &kernel.loops {
            print!(", {} {:.3}", l.name, l.per_code());
        }
        println!();
    }
    println!("sources, PTX and machine code are in {}", folder.display());
    let complaints = report.complaints();
    if !complaints.is_empty() {
        return Err(complaints.join("; ").into());
    }
    match options {
        [] => Ok(()),
        ["--write", page, data] => {
            std::fs::write(page, report.page())?;
            std::fs::write(data, report.data()?)?;
            Ok(())
        }
        ["--check", page, data] => {
            check(page, &report.page())?;
            check(data, &report.data()?)
        }
        _ => Err(format!("unknown arguments: {}", options.join(" ")).into()),
    }
}

/// An error that shows the first line that differs.
fn check(file: &str, text: &str) -> Result<(), Box<dyn Error>> {
    let committed = std::fs::read_to_string(file)?;
    if committed == text {
        return Ok(());
    }
    let differ = committed.lines().zip(text.lines()).find(|(old, new)| old != new);
    let (old, new) = differ.unwrap_or(("(another number of lines)", ""));
    Err(format!("{file} is stale; run `cargo xtask codegen --write`\n- {old}\n+ {new}").into())
}
