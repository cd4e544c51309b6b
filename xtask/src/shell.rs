//! Running programs, and where things are.

use crate::report::Problem;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The root of the workspace.
pub(crate) fn root() -> &'static Path {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR"));
    manifest.parent().unwrap_or(manifest)
}

/// The `kivi` binary of the release profile: it lies beside this one.
pub(crate) fn kivi() -> Result<PathBuf, Problem> {
    let kivi = kivi_path()?;
    if kivi.is_file() {
        Ok(kivi)
    } else {
        Err(Problem::failed("the kivi binary has not been built"))
    }
}

fn kivi_path() -> Result<PathBuf, Problem> {
    let own = std::env::current_exe()
        .map_err(|error| Problem::failed(format!("cannot find the target directory: {error}")))?;
    Ok(own.with_file_name(format!("kivi{}", std::env::consts::EXE_SUFFIX)))
}

/// The target directory, where this program was built to.
pub(crate) fn target() -> Result<PathBuf, Problem> {
    let kivi = kivi_path()?;
    Ok(kivi.parent().and_then(Path::parent).unwrap_or(root()).to_owned())
}

/// A program started in the root of the workspace, with its command line printed.
pub(crate) fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, arguments: &[S]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root()).stdin(Stdio::null());
    let shown = Path::new(command.get_program()).file_name().unwrap_or_default();
    let mut line = format!("$ {}", shown.to_string_lossy());
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        let quote = if argument.contains(char::is_whitespace) { "\"" } else { "" };
        line += &format!(" {quote}{argument}{quote}");
    }
    println!("{line}");
    command
}

/// Runs a command whose output goes to the terminal.
pub(crate) fn run(mut command: Command) -> Result<(), Problem> {
    let name = command.get_program().to_string_lossy().into_owned();
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(Problem::failed(status.to_string())),
        Err(error) => Err(Problem::failed(format!("cannot run {name}: {error}"))),
    }
}

/// Runs a command and returns its standard output; standard error goes to the terminal.
pub(crate) fn output(mut command: Command) -> Result<String, Problem> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| Problem::failed(format!("cannot run {name}: {error}")))?;
    let text = String::from_utf8(output.stdout)
        .map_err(|_| Problem::failed(format!("{name} printed text that is not UTF-8")))?;
    if output.status.success() {
        Ok(text)
    } else {
        print!("{text}");
        Err(Problem::failed(output.status.to_string()))
    }
}

/// Whether a command can be started and succeeds, silently.
pub(crate) fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let status = Command::new(program)
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.is_ok_and(|status| status.success())
}
