//! The checks that are cargo commands, all in the release profile so that they share one build.

use crate::codegen;
use crate::report::{Check, Problem};
use crate::shell::{command, run, succeeds};

/// A component of the tool chain, installed if it is missing and the network allows.
fn component(name: &'static str, subcommand: &'static str) -> Result<(), Problem> {
    if succeeds("cargo", &[subcommand, "--version"]) {
        return Ok(());
    }
    println!("{name} is missing");
    if run(command("rustup", &["component", "add", name])).is_ok() {
        Ok(())
    } else {
        Err(Problem::skipped(format!("{name} is not installed and cannot be fetched")))
    }
}

/// Everything, with SPIR-V beside WGSL and NVIDIA code without a device: the same in every check, so that they share one build.
const EVERYTHING: [&str; 4] =
    ["--workspace", "--release", "--features", "kivi-wgpu/vulkan,kivi-cuda/offline"];

fn cargo(arguments: &[&str]) -> Check {
    run(command("cargo", arguments)).map(|()| String::new())
}

pub(crate) fn fmt() -> Check {
    component("rustfmt", "fmt")?;
    cargo(&["fmt", "--all", "--check"])
}

pub(crate) fn clippy() -> Check {
    component("clippy", "clippy")?;
    cargo(&[&["clippy", "--all-targets"], &EVERYTHING[..], &["--", "-D", "warnings"]].concat())
}

pub(crate) fn rustdoc() -> Check {
    let mut doc = command("cargo", &[&["doc", "--no-deps"], &EVERYTHING[..]].concat());
    doc.env("RUSTDOCFLAGS", "-D warnings");
    run(doc).map(|()| String::new())
}

pub(crate) fn test() -> Check {
    let mut test = command("cargo", &[&["test"], &EVERYTHING[..]].concat());
    codegen::tell(&mut test);
    run(test).map(|()| String::new())
}

/// The tests of one name.
pub(crate) fn test_only(name: &str) -> Check {
    let mut test = command("cargo", &[&["test", "--test", name], &EVERYTHING[..]].concat());
    codegen::tell(&mut test);
    run(test).map(|()| String::new())
}

pub(crate) fn build_example(name: &str) -> Check {
    cargo(&[&["build", "--example", name], &EVERYTHING[..]].concat())
}

pub(crate) fn build_kivi() -> Check {
    cargo(&["build", "--release", "--package", "kivi"])
}
