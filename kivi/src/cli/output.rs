//! Writing to standard output.

use anyhow::Result;
use serde_json::{Map, Value};
use std::io::{ErrorKind, Write};

/// Writes text and flushes, so that it is seen as soon as it is generated.
pub(super) fn print(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Writes the one JSON object of a command.
pub(super) fn print_json(fields: Value) -> Result<()> {
    print(&json_text(fields)?)?;
    Ok(())
}

/// The one JSON object of a command: `fields`, with `version` and `machine` first.
pub(super) fn json_text(fields: Value) -> Result<String> {
    let mut object = Map::new();
    object.insert("version".into(), env!("CARGO_PKG_VERSION").into());
    object.insert("machine".into(), super::machine::describe());
    if let Value::Object(fields) = fields {
        object.extend(fields);
    }
    Ok(format!("{}\n", serde_json::to_string_pretty(&object)?))
}

/// Whether an error says that the reader of standard output has gone.
pub(super) fn is_closed(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<std::io::Error>();
    io.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe)
}
