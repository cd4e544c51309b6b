//! llama.cpp, from the source distribution of its Python package to two programs.

use crate::report::Problem;
use crate::shell::{command, kivi, output, root, run};
use std::fs;
use std::path::{Path, PathBuf};

/// Version of the Python package `llama-cpp-python`, whose source distribution holds llama.cpp.
pub(super) const PACKAGE_VERSION: &str = "0.3.36";
/// What CMake and the package's build need, and the CMake project.
const REQUIREMENTS: &str = "tools/peers/requirements.txt";
const PROJECT: &str = "tools/peers";

/// The programs that are measured, and how they were compiled.
pub(super) struct LlamaCpp {
    /// `tools/peers/attention.cpp`.
    pub(super) attention: PathBuf,
    /// llama.cpp's own benchmark of whole models.
    pub(super) bench: PathBuf,
    /// First line of the compiler's `--version`.
    pub(super) compiler: String,
}

/// The folder everything goes to, under the target directory.
pub(super) fn folder() -> Result<PathBuf, Problem> {
    let kivi = kivi()?;
    let target = kivi.parent().and_then(Path::parent).unwrap_or(root());
    let folder = target.join("peers");
    fs::create_dir_all(&folder)
        .map_err(|error| Problem::failed(format!("cannot create {}: {error}", folder.display())))?;
    Ok(folder)
}

/// Builds llama.cpp, fetching it first; what is there already is not done again.
pub(super) fn llama_cpp() -> Result<LlamaCpp, Problem> {
    let folder = folder()?;
    let tools = tools(&folder)?;
    let source = source(&folder, &tools)?;
    let build = folder.join("build");

    let mut path = vec![tools.clone()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    let path = std::env::join_paths(path)
        .map_err(|error| Problem::failed(format!("cannot extend PATH: {error}")))?;
    let cmake = |arguments: &[&str]| {
        let mut cmake = command(tools.join(executable("cmake")), arguments);
        cmake.env("PATH", &path); // where CMake looks for ninja
        run(cmake)
    };
    let (build, source) = (build.to_string_lossy(), source.to_string_lossy());
    let source = format!("-DLLAMA_CPP={source}/vendor/llama.cpp");
    cmake(&["-S", PROJECT, "-B", &build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", &source])?;
    cmake(&["--build", &build, "--parallel", "2", "--target", "peer-attention", "llama-bench"])?;

    let build = Path::new(build.as_ref());
    let binaries = build.join("bin");
    Ok(LlamaCpp {
        attention: binaries.join(executable("peer-attention")),
        bench: binaries.join(executable("llama-bench")),
        compiler: compiler(build)?,
    })
}

/// A private virtual environment with the tools of the build; returns the folder of its programs.
fn tools(folder: &Path) -> Result<PathBuf, Problem> {
    let environment = folder.join("venv");
    let programs = environment.join(if cfg!(windows) { "Scripts" } else { "bin" });
    let python = programs.join(executable("python"));
    let requirements = fs::read_to_string(root().join(REQUIREMENTS))
        .map_err(|error| Problem::failed(format!("cannot read {REQUIREMENTS}: {error}")))?;
    // Written last, so that an interrupted installation is done again.
    let installed = environment.join("installed.txt");
    if fs::read_to_string(&installed).is_ok_and(|text| text == requirements) {
        return Ok(programs);
    }
    let unavailable = |what: &str| {
        let what = what.to_owned();
        move |_| Problem::skipped(format!("{what}; needed to fetch llama.cpp"))
    };
    let at = environment.to_string_lossy();
    run(command("python3", &["-m", "venv", &at]))
        .map_err(unavailable("python3 makes no virtual environment here"))?;
    run(command(&python, &["-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]))
        .map_err(unavailable("CMake and ninja cannot be installed from here"))?;
    fs::write(&installed, requirements)
        .map_err(|error| Problem::failed(format!("cannot write {installed:?}: {error}")))?;
    Ok(programs)
}

/// The unpacked source distribution.
fn source(folder: &Path, tools: &Path) -> Result<PathBuf, Problem> {
    let name = format!("llama_cpp_python-{PACKAGE_VERSION}");
    let source = folder.join(&name);
    if source.is_dir() {
        return Ok(source);
    }
    let python = tools.join(executable("python"));
    let destination = folder.to_string_lossy();
    let package = format!("llama-cpp-python=={PACKAGE_VERSION}");
    // pip asks a source distribution for its metadata; the environment has what answers.
    let flags = ["--no-deps", "--no-build-isolation", "--no-binary", "llama-cpp-python"];
    let download = ["-m", "pip", "download", "--quiet", "--dest", &destination, &package];
    run(command(&python, &[&download[..], &flags].concat()))
        .map_err(|_| Problem::skipped(format!("{package} cannot be fetched from here")))?;

    // Unpacked aside, so that an interrupted run leaves no half of it.
    let archive = folder.join(format!("{name}.tar.gz"));
    let aside = folder.join("unpacking");
    let (from, to) = (archive.to_string_lossy(), aside.to_string_lossy());
    run(command(&python, &["-m", "tarfile", "--extract", &from, &to]))?;
    fs::rename(aside.join(&name), &source)
        .map_err(|error| Problem::failed(format!("cannot move {name}: {error}")))?;
    Ok(source)
}

/// The compiler CMake chose.
fn compiler(build: &Path) -> Result<String, Problem> {
    let cache = fs::read_to_string(build.join("CMakeCache.txt"))
        .map_err(|error| Problem::failed(format!("cannot read CMake's cache: {error}")))?;
    let compiler = cache
        .lines()
        .filter(|line| line.starts_with("CMAKE_CXX_COMPILER:"))
        .find_map(|line| line.split_once('=').map(|(_, path)| path))
        .ok_or_else(|| Problem::failed("CMake's cache names no compiler"))?;
    let version = output(command(compiler, &["--version"]))?;
    Ok(version.lines().next().unwrap_or_default().to_owned())
}

fn executable(name: &str) -> String {
    format!("{name}{}", std::env::consts::EXE_SUFFIX)
}
