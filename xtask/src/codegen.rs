//! The kernels on NVIDIA devices, without one: compiled by NVIDIA's tools, counted, and run by an
//! emulator.

use crate::cargo;
use crate::report::{Check, Problem, Report};
use crate::shell::{command, root, run, succeeds, target};
use clap::Args;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Python packages that hold the tools.
const REQUIREMENTS: &str = "tools/cuda/requirements.txt";
/// The committed report.
const PAGE: &str = "docs/src/reference/gpu-code.md";
const DATA: &str = "kivi-cuda/codegen.json";
/// Where the tools are installed, in the target directory.
const FOLDER: &str = "cuda-tools";
/// Written last, so that an interrupted installation is done again.
const INSTALLED: &str = "installed.txt";

#[derive(Args)]
pub(crate) struct Codegen {
    /// Only these, for a look at one; the report needs all
    #[arg(long, value_name = "sm_80,sm_90,sm_120", conflicts_with = "write")]
    arch: Option<String>,
    /// Write the report instead of comparing it
    #[arg(long)]
    write: bool,
}

impl Codegen {
    pub(crate) fn run(self, report: &mut Report) {
        report.step("build", || cargo::build_example("codegen"));
        let arch = self.arch.as_deref();
        report.step("NVIDIA machine code", || machine_code(arch, self.write));
        report.step("NVIDIA kernels, emulated", || cargo::test_only("emulated"));
    }
}

/// Installs the tools, for the tests that need them; without them these skip themselves.
pub(crate) fn fetch() -> Check {
    tools().map(|_| String::new())
}

/// Tells tests where the tools are, if they are installed.
pub(crate) fn tell(test: &mut Command) {
    if let Ok(folder) = target().map(|target| target.join(FOLDER))
        && folder.join(INSTALLED).is_file()
    {
        test.env("KIVI_CUDA_TOOLS", folder);
    }
}

/// Compares the committed report with what the kernels compile to now.
pub(crate) fn check() -> Check {
    machine_code(None, false)
}

fn machine_code(arch: Option<&str>, write: bool) -> Check {
    let tools = tools()?;
    let folder = target()?.join("codegen");
    let program = target()?.join("release/examples/codegen");
    let (tools, folder) = (tools.to_string_lossy(), folder.to_string_lossy());
    let options = match arch {
        Some(arch) => vec!["--arch", arch],
        None => vec![if write { "--write" } else { "--check" }, PAGE, DATA],
    };
    run(command(program, &[&[&*tools, &*folder], &options[..]].concat())).map(|()| String::new())
}

/// The folder of the tools, installed if they are missing and the network allows.
fn tools() -> Result<PathBuf, Problem> {
    if !cfg!(target_os = "linux") {
        return Err(Problem::skipped("the packages of NVIDIA's tools are for Linux"));
    }
    let folder = target()?.join(FOLDER);
    let requirements = fs::read_to_string(root().join(REQUIREMENTS))
        .map_err(|error| Problem::failed(format!("cannot read {REQUIREMENTS}: {error}")))?;
    let installed = folder.join(INSTALLED);
    if fs::read_to_string(&installed).is_ok_and(|text| text == requirements) {
        return Ok(folder);
    }
    println!("NVIDIA's tools are missing");
    if !succeeds("python3", &["-m", "pip", "--version"]) {
        return Err(Problem::skipped("no python3 with pip; needed to fetch NVIDIA's tools"));
    }
    if folder.exists() {
        let removed = fs::remove_dir_all(&folder);
        removed.map_err(|error| Problem::failed(format!("{}: {error}", folder.display())))?;
    }
    let target = folder.to_string_lossy();
    let pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"];
    let arguments = [&pip[..], &["--target", &target, "--requirement", REQUIREMENTS]].concat();
    run(command("python3", &arguments))
        .map_err(|_| Problem::skipped("NVIDIA's tools cannot be fetched from PyPI"))?;
    fs::write(&installed, requirements)
        .map_err(|error| Problem::failed(format!("{}: {error}", installed.display())))?;
    Ok(folder)
}
