//! `model.safetensors.index.json`: which file holds which tensor.

use crate::error::quoted;
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};

/// The index of a checkpoint that is split over several safetensors files.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl ShardIndex {
    /// Parses the index and checks that every file name stays inside the model directory.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] when it does not parse, [`Error::InvalidSafetensors`] when it names no
    /// tensor, or a file that is not a plain name.
    pub fn parse(json: &[u8]) -> Result<Self> {
        let index: Self = serde_json::from_slice(json).map_err(|error| Error::json(&error))?;
        if index.weight_map.is_empty() {
            return Err(Error::safetensors("the index lists no tensor"));
        }
        match index.weight_map.values().find(|file| !is_plain_name(file)) {
            Some(file) => Err(Error::safetensors(format!(
                "the index names {}, which is not a file in its directory",
                quoted(file)
            ))),
            None => Ok(index),
        }
    }

    /// Tensor name to file name, in the order of the tensor names.
    pub fn weight_map(&self) -> &BTreeMap<String, String> {
        &self.weight_map
    }

    /// The distinct files, sorted.
    pub fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// Whether `file` is one ordinary path component, on every operating system.
fn is_plain_name(file: &str) -> bool {
    let mut components = Path::new(file).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(name)), None) if name == file)
        && !file.contains(['/', '\\', ':', '\0'])
}
