//! An opened model: its configuration, its weights and what its tokenizer is built from.
//!
//! Two layouts are read: a Hugging Face directory (`config.json`, `model.safetensors` or shards with
//! an index, `tokenizer.json`) and a single GGUF file. Weights stay views into the mapped files.
//! Every check happens in [`Checkpoint::open`]: a checkpoint that opened has all of its weights, each
//! with the shape its configuration demands and a format the backends know.

mod cursor;
mod files;
mod fingerprint;
mod gguf;
mod names;
mod safetensors;
mod shard_index;
mod tensor_type;
mod tensors;
#[cfg(test)]
mod tests;
mod tokenizer_config;
mod tokenizer_source;
mod value;

pub(crate) use files::read_optional;
pub use gguf::{Gguf, GgufTensor};
pub use names::{LayerWeight, WeightName};
pub use shard_index::ShardIndex;
pub use tensor_type::TensorType;
pub use tensors::TensorInfo;
pub use tokenizer_config::TokenizerConfig;
pub use tokenizer_source::{GgufVocabulary, TokenizerSource};
pub use value::{Array, Value, ValueType};

use crate::config::{GenerationDefaults, ModelConfig};
use crate::error::quoted;
use crate::{Error, Result};
use kivi_core::WeightData;
use names::Naming;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tensors::RawTensor;

/// A model on disk, checked and ready to be loaded into a backend.
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    generation: GenerationDefaults,
    inventory: Vec<TensorInfo>,
    weights: HashMap<WeightName, WeightData>,
    naming: Naming,
    text: TokenizerConfig,
    /// The parsed file, for its vocabulary; `None` for a directory.
    gguf: Option<Gguf>,
}

/// Path, configuration and number of tensors: the weights would fill the terminal.
impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("path", &self.path)
            .field("config", &self.config)
            .field("tensors", &self.inventory.len())
            .finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens the model at `path`: a Hugging Face directory or a GGUF file, told apart by looking.
    ///
    /// # Errors
    /// [`Error::NotAModel`] when it is neither, and whatever is wrong with its files, with the file
    /// named.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let kind = std::fs::metadata(path)
            .map_err(|source| Error::Io { path: path.to_owned(), source })?;
        if kind.is_dir() {
            return Self::open_directory(path);
        }
        let not_a_model =
            |reason: &str| Error::NotAModel { path: path.to_owned(), reason: reason.to_owned() };
        match files::magic::<4>(path)? {
            Some(magic) if magic == *gguf::MAGIC => {
                Self::open_gguf(path).map_err(|error| error.in_file(path))
            }
            _ if kind.len() == 0 => Err(not_a_model("the file is empty")),
            _ if path.extension().is_some_and(|extension| extension == "safetensors") => {
                Err(not_a_model("a safetensors file has no configuration; give its directory"))
            }
            _ => Err(not_a_model("neither a directory nor a GGUF file")),
        }
    }

    fn open_directory(path: &Path) -> Result<Self> {
        let config_path = path.join("config.json");
        let Some(config_json) = files::read_optional(&config_path)? else {
            return Err(Error::NotAModel {
                path: path.to_owned(),
                reason: match gguf_file_in(path) {
                    Some(file) => {
                        format!("no config.json; it holds {}, give that file", quoted(&file))
                    }
                    None => "no config.json".to_owned(),
                },
            });
        };
        let config =
            ModelConfig::from_hf_json(&config_json).map_err(|error| error.in_file(&config_path))?;
        let mut generation = GenerationDefaults::from_json(&config_json)
            .map_err(|error| error.in_file(&config_path))?;
        let generation_path = path.join("generation_config.json");
        if let Some(json) = files::read_optional(&generation_path)? {
            generation = GenerationDefaults::from_json(&json)
                .map_err(|error| error.in_file(&generation_path))?
                .with_tokens_of(generation);
        }
        let text = TokenizerConfig::from_directory(path)?;
        let tensors = safetensors::read_directory(path)?;
        Self::assemble(path, config, generation, tensors, Naming::HuggingFace, text, None)
            .map_err(|error| error.in_file(path))
    }

    fn open_gguf(path: &Path) -> Result<Self> {
        let gguf = Gguf::parse(files::map(path)?)?;
        let config = ModelConfig::from_gguf(&gguf)?;
        let generation = GenerationDefaults::from_gguf(&gguf)?;
        let text = TokenizerConfig::from_gguf(&gguf)?;
        let tensors = gguf
            .tensors()
            .iter()
            .map(|tensor| RawTensor {
                name: tensor.name.clone(),
                shape: tensor.shape.clone(),
                format: match tensor.kind {
                    TensorType::Weight(format) => Ok(format),
                    TensorType::Other { name, .. } => Err(name.to_owned()),
                },
                bytes: tensor.bytes.clone(),
            })
            .collect();
        Self::assemble(path, config, generation, tensors, Naming::Gguf, text, Some(gguf))
    }

    fn assemble(
        path: &Path,
        mut config: ModelConfig,
        generation: GenerationDefaults,
        tensors: Vec<RawTensor>,
        naming: Naming,
        text: TokenizerConfig,
        gguf: Option<Gguf>,
    ) -> Result<Self> {
        if config.name.is_empty() {
            let name = if path.is_dir() { path.file_name() } else { path.file_stem() };
            config.name = name.unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        }
        let special = generation.eos_token_ids.iter().chain(&generation.bos_token_id);
        if let Some(id) = special.copied().find(|&id| id as usize >= config.vocab_size) {
            return Err(Error::config(format!(
                "the special token {id} is outside the vocabulary of {}",
                config.vocab_size
            )));
        }
        let inventory = tensors.iter().map(RawTensor::info).collect();
        let weights = tensors::assign(tensors, &config, naming)?;
        let path = path.to_owned();
        Ok(Self { path, config, generation, inventory, weights, naming, text, gguf })
    }

    /// The file or directory this was opened from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What the model suggests for generating.
    pub fn generation_defaults(&self) -> &GenerationDefaults {
        &self.generation
    }

    /// Every tensor in the files, weights of the model or not, in file order.
    pub fn inventory(&self) -> &[TensorInfo] {
        &self.inventory
    }

    /// The weight called `name`, of the shape [`ModelConfig::weight_shape`]; `None` if this model
    /// has no such weight. The bytes are a view into the mapped file, of any alignment.
    pub fn weight(&self, name: WeightName) -> Option<WeightData> {
        self.weights.get(&name).cloned()
    }

    /// [`weight`](Self::weight), where the caller knows that the model has it.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] when it does not.
    pub fn required_weight(&self, name: WeightName) -> Result<WeightData> {
        self.weight(name).ok_or_else(|| {
            Error::MissingTensor { name: self.naming.spell(name) }.in_file(&self.path)
        })
    }

    /// What the tokenizer is built from.
    ///
    /// # Errors
    /// [`Error::MissingTokenizer`] when there is nothing, [`Error::InvalidGguf`] when the vocabulary
    /// of a GGUF file is damaged.
    pub fn tokenizer_source(&self) -> Result<TokenizerSource> {
        let missing = |reason: &str| Error::MissingTokenizer {
            path: self.path.clone(),
            reason: reason.to_owned(),
        };
        if let Some(gguf) = &self.gguf {
            return GgufVocabulary::from_gguf(gguf)
                .map_err(|error| error.in_file(&self.path))?
                .map(|vocabulary| TokenizerSource::Gguf(Box::new(vocabulary)))
                .ok_or_else(|| missing("no key tokenizer.ggml.model"));
        }
        let path = self.path.join("tokenizer.json");
        if path.exists() {
            Ok(TokenizerSource::HuggingFace { path, config: self.text.clone() })
        } else if self.path.join("tokenizer.model").exists() {
            Err(missing("tokenizer.model alone is not enough, tokenizer.json is needed"))
        } else {
            Err(missing("no tokenizer.json"))
        }
    }

    /// The chat template, Jinja source; `None` for a base model.
    pub fn chat_template(&self) -> Option<&str> {
        self.text.chat_template.as_deref()
    }

    /// Text of the token that starts a text, as chat templates want it.
    pub fn bos_token(&self) -> Option<&str> {
        self.text.bos_token.as_deref()
    }

    /// Text of the token that ends a text, as chat templates want it.
    pub fn eos_token(&self) -> Option<&str> {
        self.text.eos_token.as_deref()
    }
}

/// The name of a GGUF file in `directory`, the first by name.
fn gguf_file_in(directory: &Path) -> Option<String> {
    let entries = std::fs::read_dir(directory).ok()?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".gguf")).min()
}
