//! `kivi run --session`: conversations that go on from a file, on either backend.

use kivi::Snapshot;
use kivi::models::{Checkpoint, tokenizer::Tokenizer};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

const MODELS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../kivi-models/tests/golden/models");

fn model(name: &str) -> String {
    format!("{MODELS}/{name}")
}

fn kivi(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kivi"));
    command.args(["run", "--temp", "0", "--threads", "1"]).args(arguments).stdin(Stdio::null());
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("KIVI_") {
            command.env_remove(name);
        }
    }
    command.output().unwrap()
}

/// Standard output and standard error of a run that succeeds.
fn text(arguments: &[&str]) -> (String, String) {
    let Output { status, stdout, stderr } = kivi(arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(status.success(), "kivi {}\n{stderr}", arguments.join(" "));
    (String::from_utf8(stdout).unwrap(), stderr)
}

fn refused(arguments: &[&str], words: &[&str]) {
    let Output { status, stdout, stderr } = kivi(arguments);
    let stderr = String::from_utf8(stderr).unwrap();
    assert!(!status.success() && stdout.is_empty(), "kivi {}", arguments.join(" "));
    let line = stderr.lines().last().unwrap();
    for word in words {
        assert!(line.starts_with("error: ") && line.contains(word), "{word:?}: {stderr}");
    }
}

fn session_in(folder: &TempDir) -> String {
    folder.path().join("conversation.kivi").to_str().unwrap().to_owned()
}

#[test]
fn a_text_goes_on_where_it_was_saved() {
    let folder = tempfile::tempdir().unwrap();
    let (file, llama) = (session_in(&folder), model("llama3-tiny"));
    let run = |more: &[&str]| {
        let cache = ["--raw", "--residual-length", "32"];
        text(&[&["--model", &llama, "--session", &file][..], &cache, more].concat())
    };
    let (_, summary) = run(&["-n", "60", "Once upon a time"]);
    let first = Snapshot::load(&file).unwrap();
    let bytes = fs::metadata(&file).unwrap().len();
    let line = format!("session: {} tokens in {file}, {bytes} bytes", first.tokens().len());
    assert!(summary.lines().any(|found| found == line), "{summary}");

    // The same from there on both backends; only the first prompt starts a text.
    let copy = folder.path().join("copy");
    fs::copy(&file, &copy).unwrap();
    let (on_cpu, _) = run(&["-n", "30", " and then"]);
    let second = Snapshot::load(&file).unwrap();
    let tokenizer =
        Tokenizer::from_source(Checkpoint::open(&llama).unwrap().tokenizer_source().unwrap())
            .unwrap();
    let appended = tokenizer.encode(" and then", false, false).unwrap();
    let expected = [first.tokens(), &appended].concat();
    assert_eq!(second.tokens()[..expected.len()], expected);
    assert_eq!(second.tokens().len(), expected.len() + 30);
    fs::copy(&copy, &file).unwrap();
    let json = ["--device", "cpu-ref", "-n", "30", "--json", " and then"];
    let (on_reference, _) = run(&json);
    let object: serde_json::Value = serde_json::from_str(&on_reference).unwrap();
    assert_eq!(object["text"].as_str().unwrap(), on_cpu.trim_end_matches('\n'));
    assert_eq!(object["session"]["tokens"], second.tokens().len());
    assert_eq!(object["session"]["bytes"], fs::metadata(&file).unwrap().len());
    assert_eq!(Snapshot::load(&file).unwrap().tokens(), second.tokens());
}

/// A model with a chat template.
fn chat_model() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model("llama3-tiny")).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}\
                    {% if add_generation_prompt %}[assistant]{% endif %}";
    let path = folder.path().join("tokenizer_config.json");
    let mut config: serde_json::Value = match fs::read(&path) {
        Ok(bytes) => serde_json::from_slice(&bytes).unwrap(),
        Err(_) => serde_json::json!({}),
    };
    config["chat_template"] = template.into();
    fs::write(path, config.to_string()).unwrap();
    folder
}

#[test]
fn a_conversation_goes_on_with_the_turns_of_the_template() {
    let (folder, chat) = (tempfile::tempdir().unwrap(), chat_model());
    let (file, path) = (session_in(&folder), chat.path().to_str().unwrap());
    let run = |more: &[&str]| {
        text(&[&["--model", path, "--session", &file, "-n", "20"], more].concat());
        Snapshot::load(&file).unwrap().tokens().to_vec()
    };
    let first = run(&["--system", "brief", "hello"]);
    let second = run(&["and now"]);
    let source = Checkpoint::open(chat.path()).unwrap().tokenizer_source().unwrap();
    let tokenizer = Tokenizer::from_source(source).unwrap();
    let encode = |text: &str| tokenizer.encode(text, false, true).unwrap();
    let opening = encode("[system]brief;[user]hello;[assistant]");
    assert_eq!(first[..opening.len()], opening);
    assert_eq!(first.len(), opening.len() + 20);
    let expected = [&first[..], &encode(";[user]and now;[assistant]")].concat();
    assert_eq!(second[..expected.len()], expected);
    assert_eq!(second.len(), expected.len() + 20);

    let begun = "a system message is for a new session";
    let arguments = ["--model", path, "--session", &file, "--system", "long", "hello"];
    refused(&arguments, &[begun]);
}

#[test]
fn files_that_do_not_fit_are_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (file, llama) = (session_in(&folder), model("llama3-tiny"));
    let session = ["--session", &file, "-n", "4"];
    let with = |more: &[&'static str]| -> Vec<String> {
        session.iter().chain(more).map(|&argument| argument.to_owned()).collect()
    };
    let refuse = |model: &str, more: &[&'static str], words: &[&str]| {
        let before = fs::read(&file).unwrap();
        let arguments = [vec!["--model".to_owned(), model.to_owned()], with(more)].concat();
        refused(&arguments.iter().map(String::as_str).collect::<Vec<_>>(), words);
        assert!(fs::read(&file).unwrap() == before, "the file was touched");
    };
    text(&["--model", &llama, "--session", &file, "-n", "4", "hello"]);
    let name = "conversation.kivi: snapshot of another";
    refuse(&model("llama2-tiny"), &["hello"], &[name, "model: fingerprint"]);
    refuse(&llama, &["--cache", "kivi4", "hello"], &[name, "cache: a sink length of 32"]);
    let four =
        ["--cache-type-k", "kivi4", "--cache-type-v", "kivi2", "--sink-length", "32", "hello"];
    refuse(&llama, &four, &[name, "cache: layer 0: ", "keys kivi2+0.25", "keys kivi4"]);
    refuse(&llama, &["--residual-length", "64", "hello"], &[name, "a residual length of"]);
    refuse(&llama, &["--context", "8", "hello"], &["of the session does not fit the context of 8"]);

    let good = fs::read(&file).unwrap();
    let damage = |change: fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        fs::write(&file, bytes).unwrap();
    };
    damage(|bytes| bytes.truncate(700));
    refuse(&llama, &["hello"], &["conversation.kivi: truncated snapshot"]);
    damage(|bytes| *bytes.last_mut().unwrap() ^= 1);
    refuse(&llama, &["hello"], &["conversation.kivi: damaged snapshot"]);
    damage(|bytes| bytes[8] = 2);
    refuse(&llama, &["hello"], &["version 2 of the snapshot format, and this program reads 1"]);
    damage(|bytes| bytes.clear());
    refuse(&llama, &["hello"], &["conversation.kivi: not a snapshot: there are no bytes"]);

    let nowhere = folder.path().join("none").join("x.kivi");
    let nowhere = nowhere.to_str().unwrap();
    refused(&["--model", &llama, "--session", nowhere, "hello"], &["cannot write", "none"]);
    assert!(!Path::new(nowhere).exists());
}
