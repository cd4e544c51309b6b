//! Weights of a Hugging Face model directory: one safetensors file, or several and an index.
//!
//! The format itself is read by the `safetensors` crate, which checks that the tensors tile the file.

use super::files;
use super::shard_index::ShardIndex;
use super::tensors::RawTensor;
use crate::error::{one_line, quoted};
use crate::{Error, Result};
use bytes::Bytes;
use kivi_core::WeightFormat;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::path::Path;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// All tensors of the checkpoint in `directory`, sorted by file and name.
pub(super) fn read_directory(directory: &Path) -> Result<Vec<RawTensor>> {
    let single = directory.join(SINGLE);
    if single.exists() {
        return read_file(&single);
    }
    let path = directory.join(INDEX);
    let Some(json) = files::read_optional(&path)? else {
        if directory.join("pytorch_model.bin").exists()
            || directory.join("pytorch_model.bin.index.json").exists()
        {
            return Err(Error::unsupported("weights in pytorch_model.bin", "safetensors")
                .in_file(directory));
        }
        return Err(Error::MissingFile {
            path: single,
            reason: format!("the directory holds neither it nor {INDEX}"),
        });
    };
    let index = ShardIndex::parse(&json).map_err(|error| error.in_file(&path))?;
    read_shards(directory, &index).map_err(|error| error.in_file(&path))
}

fn read_shards(directory: &Path, index: &ShardIndex) -> Result<Vec<RawTensor>> {
    let mut tensors = Vec::new();
    let mut listed: HashMap<&str, &str> =
        index.weight_map().iter().map(|(name, file)| (name.as_str(), file.as_str())).collect();
    for file in index.files() {
        let path = directory.join(file);
        if !path.exists() {
            let reason = format!("{INDEX} names it");
            return Err(Error::MissingFile { path, reason });
        }
        for tensor in read_file(&path)? {
            // Taking the entry out makes a second tensor of the same name an error as well.
            if listed.remove(tensor.name.as_str()) != Some(file) {
                let name = quoted(&tensor.name);
                return Err(Error::safetensors(format!(
                    "{file} holds tensor {name}, the index does not list it there"
                )));
            }
            tensors.push(tensor);
        }
    }
    match listed.iter().min() {
        Some((name, file)) => Err(Error::safetensors(format!(
            "the index lists tensor {} in {file}, which does not hold it",
            quoted(name)
        ))),
        None => Ok(tensors),
    }
}

fn read_file(path: &Path) -> Result<Vec<RawTensor>> {
    files::map(path).and_then(|file| read_bytes(&file)).map_err(|error| error.in_file(path))
}

/// The tensors of one file, sorted by name, as views into it.
fn read_bytes(file: &Bytes) -> Result<Vec<RawTensor>> {
    let parsed = SafeTensors::deserialize(file)
        .map_err(|error| Error::safetensors(one_line(&error.to_string())))?;
    let mut tensors: Vec<RawTensor> = parsed
        .iter()
        .map(|(name, view)| RawTensor {
            name: name.to_owned(),
            shape: view.shape().to_vec(),
            format: match view.dtype() {
                Dtype::F32 => Ok(WeightFormat::F32),
                Dtype::F16 => Ok(WeightFormat::F16),
                Dtype::BF16 => Ok(WeightFormat::Bf16),
                other => Err(format!("{other:?}")),
            },
            bytes: file.slice_ref(view.data()),
        })
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(tensors)
}
