//! The GPU kernels on Mesa's software Vulkan driver.

use crate::debian;
use crate::report::{Check, Problem};
use crate::shell::{command, output, target};
use std::path::Path;

/// Where Vulkan drivers say that they are there.
const DRIVERS: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];
/// Of Debian: the driver, and the library that finds it.
const PACKAGES: [&str; 2] = ["mesa-vulkan-drivers", "libvulkan1"];

/// A Vulkan driver, installed if there is none: without one the tests of `kivi-wgpu` skip themselves.
pub(crate) fn driver() -> Check {
    if !cfg!(target_os = "linux") {
        return Ok("that of this system".into());
    }
    if !found() {
        println!("no Vulkan driver");
        debian::install(&PACKAGES);
    }
    if found() {
        Ok(String::new())
    } else {
        let packages = PACKAGES.join(" ");
        Err(Problem::skipped(format!("no Vulkan driver (Debian: apt-get install {packages})")))
    }
}

fn found() -> bool {
    let any = |folder| Path::new(folder).read_dir().is_ok_and(|mut files| files.next().is_some());
    DRIVERS.into_iter().any(any)
}

/// The library example: a cache of 4,096 tokens, truncated, forked, exported, imported.
pub(crate) fn example() -> Check {
    if !found() {
        return Err(Problem::skipped("no Vulkan driver"));
    }
    let example = target()?.join("release/examples/cache");
    let text = output(command(&example, &[""; 0]))?;
    print!("{text}");
    match text.lines().last() {
        Some(line) if line.starts_with("the next token on both") => Ok(line.into()),
        _ => Err(Problem::failed("the example did not come to its end")),
    }
}
