//! Files of one JSON object per line.

use anyhow::{Result, anyhow, bail};
use serde::de::DeserializeOwned;
use std::path::Path;

/// A line and what it says.
#[derive(Clone, Debug)]
pub(in crate::cli::eval) struct Line<T> {
    /// From 1.
    pub(in crate::cli::eval) number: usize,
    pub(in crate::cli::eval) value: T,
}

/// Reads every line of a file; blank ones are left out.
///
/// # Errors
/// With file and number of the first line that is not such an object, and for a file without any.
pub(in crate::cli::eval) fn read_lines<T: DeserializeOwned>(path: &Path) -> Result<Vec<Line<T>>> {
    let bytes =
        std::fs::read(path).map_err(|error| anyhow!("cannot read {}: {error}", path.display()))?;
    parse_lines(&path.display().to_string(), &bytes)
}

fn parse_lines<T: DeserializeOwned>(name: &str, bytes: &[u8]) -> Result<Vec<Line<T>>> {
    let mut lines = Vec::new();
    for (index, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let number = index + 1;
        let value = serde_json::from_slice(line).map_err(|error| {
            // The parser sees one line, so only its column means something.
            let reason = error.to_string();
            let reason = reason.split(" at line ").next().unwrap_or_default();
            anyhow!("{name}, line {number}, column {}: {reason}", error.column())
        })?;
        lines.push(Line { number, value });
    }
    if lines.is_empty() {
        bail!("{name} is empty: there is no JSON object at line 1");
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Row {
        question: String,
    }

    fn error(text: &[u8]) -> String {
        parse_lines::<Row>("f.jsonl", text).unwrap_err().to_string()
    }

    #[test]
    fn errors_name_file_and_line() {
        let rows =
            parse_lines::<Row>("f", b"{\"question\": \"a\"}\r\n\n{\"question\": \"b\"}").unwrap();
        assert_eq!((rows[1].number, rows[1].value.question.as_str()), (3, "b"));
        let message = error(b"{\"question\": \"a\"}\n{\"question\": \n");
        assert!(message.starts_with("f.jsonl, line 2, column "), "{message}");
        let message = error(b"{\"query\": \"a\"}");
        assert!(message.contains("line 1") && message.contains("`question`"), "{message}");
        assert!(error(b"\n \n").contains("f.jsonl is empty"));
        assert!(error(b"{\"question\": \"\xff\"}").contains("line 1"));
    }
}
