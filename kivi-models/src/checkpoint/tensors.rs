//! From the tensors of a file to the weights of a model.

use super::names::{Naming, WeightName};
use super::tensor_type::weight_formats;
use crate::config::ModelConfig;
use crate::error::quoted;
use crate::{Error, Result};
use bytes::Bytes;
use kivi_core::{WeightData, WeightFormat};
use std::collections::HashMap;

/// One line of a checkpoint's inventory.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Name in the checkpoint.
    pub name: String,
    /// Shape, slowest dimension first; empty for a scalar.
    pub shape: Vec<usize>,
    /// Name of the element type.
    pub format: String,
    /// Bytes in the file.
    pub bytes: usize,
}

/// A tensor of either kind of file.
pub(super) struct RawTensor {
    pub(super) name: String,
    /// Slowest first.
    pub(super) shape: Vec<usize>,
    /// The element type if weights can have it, else its name.
    pub(super) format: Result<WeightFormat, String>,
    pub(super) bytes: Bytes,
}

impl RawTensor {
    pub(super) fn info(&self) -> TensorInfo {
        TensorInfo {
            name: self.name.clone(),
            shape: self.shape.clone(),
            format: match &self.format {
                Ok(format) => format.name().to_owned(),
                Err(name) => name.clone(),
            },
            bytes: self.bytes.len(),
        }
    }

    /// The tensor as a weight of shape `expected`.
    fn weight(self, expected: [usize; 2]) -> Result<WeightData> {
        let format = self.format.map_err(|format| {
            Error::unsupported(
                format!("tensor {} of type {format}", quoted(&self.name)),
                weight_formats(),
            )
        })?;
        let shape = match *self.shape.as_slice() {
            [columns] => Some([1, columns]),
            [rows, columns] => Some([rows, columns]),
            _ => None,
        };
        if shape != Some(expected) {
            return Err(Error::WrongShape { name: self.name, found: self.shape, expected });
        }
        Ok(WeightData::new(format, expected, self.bytes)?)
    }
}

/// Assigns every tensor to a weight and every weight a tensor.
///
/// A tensor without a place is an error: a model that needs it is not the one described by `config`.
pub(super) fn assign(
    tensors: Vec<RawTensor>,
    config: &ModelConfig,
    naming: Naming,
) -> Result<HashMap<WeightName, WeightData>> {
    let mut weights = HashMap::with_capacity(tensors.len());
    for tensor in tensors {
        let name = naming.parse(&tensor.name);
        match name.and_then(|name| Some((name, config.weight_shape(name)?))) {
            Some((name, shape)) => {
                weights.insert(name, tensor.weight(shape)?);
            }
            // Some exporters write the shared matrix twice; transformers ignores the second, too.
            None if name == Some(WeightName::Output) && config.tied_embeddings => {}
            None if naming.is_derived(&tensor.name) => {}
            None => {
                return Err(Error::unsupported(
                    format!(
                        "tensor {}, which a {} model of {} layers with this configuration does not \
                         have",
                        quoted(&tensor.name),
                        config.architecture,
                        config.layers
                    ),
                    "the weights the configuration calls for",
                ));
            }
        }
    }
    match config.weight_names().find(|name| !weights.contains_key(name)) {
        Some(name) => Err(Error::MissingTensor { name: naming.spell(name) }),
        None => Ok(weights),
    }
}
