//! The Hub, as a server on this machine with just enough of its interface.

use super::*;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Files by `org/model/FILE`, with their entity tags; keeps the requests.
struct Server {
    files: HashMap<String, (String, Vec<u8>)>,
    log: Mutex<Vec<String>>,
}

impl Server {
    /// Serves until the process ends; returns the endpoint.
    fn start(files: &[(&str, &str, &[u8])]) -> (Arc<Self>, String) {
        let files = files.iter().map(|(path, etag, content)| {
            ((*path).to_owned(), ((*etag).to_owned(), content.to_vec()))
        });
        let server = Arc::new(Self { files: files.collect(), log: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = shared.clone();
                std::thread::spawn(move || server.answer(&stream));
            }
        });
        (server, endpoint)
    }

    fn answer(&self, mut stream: &TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        // Nothing comes from a connection that only tries whether somebody listens.
        reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        let (mut header, mut range, mut token) = (String::new(), None, String::new());
        while reader.read_line(&mut header).ok()? > 2 {
            let lower = header.trim().to_ascii_lowercase();
            range = lower.strip_prefix("range: bytes=").map(str::to_owned).or(range);
            token = lower.strip_prefix("authorization: ").map(str::to_owned).unwrap_or(token);
            header.clear();
        }
        self.log.lock().unwrap().push(format!("{path} {token}"));
        let (status, headers, body) = self.respond(&path, range.as_deref());
        let length = body.len();
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}\r\n"
        );
        stream.write_all(&[head.as_bytes(), &body].concat()).ok()
    }

    fn respond(&self, path: &str, range: Option<&str>) -> (&str, String, Vec<u8>) {
        let missing = ("404 Not Found", String::new(), b"no".to_vec());
        if let Some(rest) = path.strip_prefix("/api/models/") {
            let repository = rest.split("/revision/").next().unwrap();
            let prefix = format!("{repository}/");
            let siblings: Vec<_> = self
                .files
                .keys()
                .filter_map(|path| path.strip_prefix(&prefix))
                .map(|file| serde_json::json!({"rfilename": file}))
                .collect();
            let info = serde_json::json!({"siblings": siblings, "sha": COMMIT});
            return (
                "200 OK",
                "Content-Type: application/json\r\n".into(),
                info.to_string().into(),
            );
        }
        // /org/model/resolve/REVISION/FILE
        let mut parts = path[1..].splitn(5, '/');
        let (org, model) = (parts.next().unwrap(), parts.next().unwrap_or_default());
        let Some(file) = parts.nth(2) else { return missing };
        let Some((etag, content)) = self.files.get(&format!("{org}/{model}/{file}")) else {
            return missing;
        };
        let body = if range == Some("0-0") { &content[..1] } else { &content[..] };
        let headers = format!(
            "ETag: \"{etag}\"\r\nX-Repo-Commit: {COMMIT}\r\nContent-Range: bytes 0-{}/{}\r\n",
            body.len() - 1,
            content.len()
        );
        ("206 Partial Content", headers, body.to_vec())
    }
}

/// A context with the server for a Hub; `None`, and a line, where a proxy would get in between.
fn context_with(dir: &TempDir, files: &[(&str, &str, &[u8])]) -> Option<(Arc<Server>, Context)> {
    let proxy = ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY"].into_iter().find(|name| {
        [name.to_string(), name.to_ascii_lowercase()].iter().any(|n| std::env::var_os(n).is_some())
    });
    if let Some(name) = proxy {
        println!("skipped: {name} is set");
        return None;
    }
    let (server, endpoint) = Server::start(files);
    let mut context = context(dir);
    context.hub.endpoint = endpoint;
    Some((server, context))
}

#[test]
fn a_repository_with_another_file_is_passed_over_without_a_download() {
    let dir = tempfile::tempdir().unwrap();
    let other = "00".repeat(32);
    let files: [(&str, &str, &[u8]); 2] = [
        ("org/other/tiny.gguf", &other, b"kivi TEST model"),
        ("org/tiny/tiny.gguf", MODEL.sha256, CONTENT),
    ];
    let Some((server, mut context)) = context_with(&dir, &files) else { return };
    context.hub.token = Some("secret".to_owned());
    let path = known_model(&MODEL, &context).unwrap();
    assert!(path.starts_with(&context.hub.cache_dir), "{}", path.display());
    assert_eq!(fs::read(&path).unwrap(), CONTENT);
    let log = server.log.lock().unwrap();
    let other: Vec<_> = log.iter().filter(|line| line.contains("org/other")).collect();
    assert_eq!(other, ["/org/other/resolve/main/tiny.gguf bearer secret"], "metadata only");
    // It is found there again without a network.
    let offline = Context { offline: true, ..context.clone() };
    assert_eq!(known_model(&MODEL, &offline).unwrap(), path);
    // And not used once it is damaged.
    fs::write(&path, "damaged").unwrap();
    assert!(matches!(known_model(&MODEL, &offline), Err(Error::Offline { .. })));
}

#[test]
fn a_server_that_lies_about_its_file_is_found_out() {
    let dir = tempfile::tempdir().unwrap();
    let files: [(&str, &str, &[u8]); 1] =
        [("org/tiny/tiny.gguf", MODEL.sha256, b"kivi TEST model")];
    let Some((_server, context)) = context_with(&dir, &files) else { return };
    let error = known_model(&MODEL, &context).unwrap_err().to_string();
    assert!(
        error.contains("Hub repository org/other: ") && error.contains("404 (not there)"),
        "{error}"
    );
    assert!(error.contains("Hub repository org/tiny: tiny.gguf has SHA-256 "), "{error}");
}

#[test]
fn a_whole_model_is_fetched_at_one_commit() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: [(&str, &str, &[u8]); 7] = [
        ("o/m/config.json", "e1", b"{}"),
        ("o/m/tokenizer.json", "e2", b"{ }"),
        ("o/m/generation_config.json", "e3", b"{  }"),
        ("o/m/model.safetensors.index.json", "e4", index),
        ("o/m/model-1.safetensors", "e5", b"11"),
        ("o/m/model-2.safetensors", "e6", b"22"),
        ("o/m/README.md", "e7", b"not wanted"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let Some((server, context)) = context_with(&dir, &files) else { return };
    let path = super::super::hub::repository("o/m", "main", None, &context).unwrap();
    assert!(path.ends_with(COMMIT), "{}", path.display());
    let expected = [
        "config.json",
        "generation_config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names(&path), expected);
    let requests = server.log.lock().unwrap().len();
    let offline = Context { offline: true, ..context.clone() };
    assert_eq!(super::super::hub::repository("o/m", "main", None, &offline).unwrap(), path);
    assert_eq!(super::super::hub::repository("o/m", "main", None, &context).unwrap(), path);
    assert_eq!(server.log.lock().unwrap().len(), requests);
    // Without one of its shards it is not complete.
    fs::remove_file(path.join("model-2.safetensors")).unwrap();
    assert!(super::super::hub::repository("o/m", "main", None, &offline).is_err());
}

#[test]
fn repositories_that_cannot_be_used_say_why() {
    let escape = br#"{"weight_map": {"a": "../model.safetensors"}}"#;
    let files: [(&str, &str, &[u8]); 8] = [
        ("o/gguf/config.json", "e", b"{}"),
        ("o/gguf/x.Q4_0.gguf", "e", b"x"),
        ("o/bare/model.safetensors", "e", b"x"),
        ("o/empty/README.md", "e", b"x"),
        ("o/evil/config.json", "e1", b"{}"),
        ("o/evil/tokenizer.json", "e2", b"{}"),
        ("o/evil/model.safetensors.index.json", "e3", escape),
        ("o/tag/x.gguf", "../../e", b"x"),
    ];
    let dir = tempfile::tempdir().unwrap();
    let Some((_server, context)) = context_with(&dir, &files) else { return };
    let reason = |repository: &str, file: Option<&str>| match super::super::hub::repository(
        repository, "main", file, &context,
    )
    .unwrap_err()
    {
        Error::Unavailable { mut attempts, .. } => attempts.pop().unwrap().reason,
        other => panic!("{other}"),
    };
    assert_eq!(
        reason("o/gguf", None),
        "the repository has GGUF files only; add one of them as :FILE.gguf (x.Q4_0.gguf)"
    );
    assert_eq!(reason("o/bare", None), "the repository has no config.json");
    assert_eq!(
        reason("o/empty", None),
        "the repository has neither model.safetensors nor model.safetensors.index.json nor a GGUF file"
    );
    assert_eq!(
        reason("o/evil", None),
        "model.safetensors.index.json names the file \"../model.safetensors\""
    );
    assert_eq!(reason("o/tag", Some("x.gguf")), "odd entity tag or commit for x.gguf");
    assert!(reason("o/gguf", Some("y.gguf")).ends_with("404 (not there)"));
    let path =
        super::super::hub::repository("o/gguf", "main", Some("x.Q4_0.gguf"), &context).unwrap();
    assert_eq!(fs::read(path).unwrap(), b"x");
}
