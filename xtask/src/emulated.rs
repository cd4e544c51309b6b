//! The CPU backend's tests on an emulated 64-bit Arm processor.
//!
//! qemu translates one program and passes its system calls on, so that the tests need no other
//! machine. Of x86-64 it has AVX2 at most; see `docs/src/developer/testing.md` on AVX-512.

use crate::debian;
use crate::report::{Check, Problem};
use crate::shell::{command, output, run, succeeds};
use std::process::Command;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Of Debian: the linker, what it links with, and the emulator.
const PACKAGES: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];
/// Where Debian's packages put the libraries of the target.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

/// Of how many cases of the parity suite one is run.
const PARITY_STEP: &str = "3";

/// Runs the tests on a processor with the dot product extension, on `neon` and `portable`, and what
/// chooses between them on one without.
pub(crate) fn arm() -> Check {
    if cfg!(target_arch = "aarch64") {
        return Err(Problem::skipped("this processor is one: the tests above ran on it"));
    }
    if !cfg!(target_os = "linux") {
        return Err(Problem::skipped("qemu emulates Linux programs on Linux only"));
    }
    programs()?;
    target()?;

    println!("the processor has the dot product extension:");
    run(on("max", &["--lib"]))?;
    let mut parity = on("max", &["--test", "parity", "--", "--nocapture"]);
    parity.env("KIVI_CPU_ISA", "neon").env("KIVI_PARITY_STEP", PARITY_STEP);
    run(parity)?;
    run(on("max", &["--test", "linear"]))?;
    println!("it has not:");
    run(on("cortex-a53", &["--lib", "isa"]))?;
    Ok(format!("neon; one in {PARITY_STEP} parity cases"))
}

/// `cargo test` of the CPU backend with test programs on an emulated processor.
fn on(processor: &str, arguments: &[&str]) -> Command {
    let cargo = ["test", "--release", "--package", "kivi-cpu", "--target", TARGET];
    let mut test = command("cargo", &[&cargo[..], arguments].concat());
    let runner = format!("{EMULATOR} -cpu {processor} -L {LIBRARIES}");
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner)
        .env_remove("KIVI_CPU_ISA");
    test
}

/// The linker and the emulator, installed if they are missing and this is root on Debian.
fn programs() -> Result<(), Problem> {
    let missing = || [LINKER, EMULATOR].into_iter().find(|name| !succeeds(name, &["--version"]));
    let Some(name) = missing() else { return Ok(()) };
    println!("{name} is missing");
    debian::install(&PACKAGES);
    match missing() {
        None => Ok(()),
        Some(name) => {
            let packages = PACKAGES.join(" ");
            Err(Problem::skipped(format!("no {name} (Debian: apt-get install {packages})")))
        }
    }
}

/// The standard library of the target, installed if it is missing and the network allows.
fn target() -> Result<(), Problem> {
    let folder = output(command("rustc", &["--print", "target-libdir", "--target", TARGET]))?;
    if std::path::Path::new(folder.trim()).is_dir()
        || run(command("rustup", &["target", "add", TARGET])).is_ok()
    {
        Ok(())
    } else {
        Err(Problem::skipped(format!("the standard library of {TARGET} cannot be fetched")))
    }
}
