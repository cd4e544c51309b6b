//! Formats of each layer's cache, as a file.

use crate::{Error, ModelConfig, Result};
use kivi_core::{CacheConfig, CacheConfigBuilder, Format, LayerSpec, NamedCache, PoolSpec};
use serde::{Deserialize, Serialize};

/// A cache plan: which cache, and the layers that differ from it.
///
/// As JSON:
///
/// ```
/// let plan = kivi_models::CachePlan::from_json(r#"{
///     "cache": "kivi2+",
///     "layers": [
///         {"layers": [0, -1], "keys": "kivi4", "values": "kivi4"},
///         {"layers": [7], "keys": "kivi2"}
///     ]
/// }"#)?;
/// assert_eq!(plan.layers.len(), 2);
/// # Ok::<(), kivi_models::Error>(())
/// ```
///
/// Fields that are left out are those of the named cache, or of [`CacheConfig::builder`]. Unknown
/// fields are errors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct CachePlan {
    /// Name of a [`NamedCache`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<String>,
    /// `G`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group_size: Option<usize>,
    /// `R`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub residual_length: Option<usize>,
    /// `S`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sink_length: Option<usize>,
    /// Layers with formats of their own; of two entries that name a layer, the later one counts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerFormats>,
    /// What the plan was made from, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comment: Option<String>,
}

/// Formats of some layers of a [`CachePlan`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerFormats {
    /// Numbers of the layers from 0, or from the end: −1 is the last one.
    pub layers: Vec<i64>,
    /// Format of the keys, if it is not the cache's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
    /// Format of the values, if it is not the cache's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub values: Option<String>,
}

impl CachePlan {
    /// Reads a plan.
    ///
    /// # Errors
    /// [`Error::InvalidJson`] with line and column; [`Error::Core`] when a cache or format has no
    /// such name.
    pub fn from_json(text: &str) -> Result<Self> {
        let plan: Self = serde_json::from_str(text).map_err(|error| Error::json(&error))?;
        plan.named()?;
        for entry in &plan.layers {
            for format in entry.keys.iter().chain(&entry.values) {
                format.parse::<Format>()?;
            }
        }
        Ok(plan)
    }

    /// The plan as JSON, one entry per line.
    pub fn to_json(&self) -> String {
        // Strings, numbers and lists of them always serialize.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    fn named(&self) -> Result<Option<NamedCache>> {
        Ok(self.cache.as_deref().map(str::parse).transpose()?)
    }

    /// A configuration builder with everything of the plan that is not per layer.
    ///
    /// # Errors
    /// [`Error::Core`] when the cache has no such name.
    pub fn builder(&self) -> Result<CacheConfigBuilder> {
        let mut builder = CacheConfig::builder();
        if let Some(cache) = self.named()? {
            builder = builder.named(cache);
        }
        if let Some(tokens) = self.group_size {
            builder = builder.group_size(tokens);
        }
        if let Some(tokens) = self.residual_length {
            builder = builder.residual_length(tokens);
        }
        if let Some(tokens) = self.sink_length {
            builder = builder.sink_length(tokens);
        }
        Ok(builder)
    }

    /// The cache layers of a model: those of `config`, with the plan's formats.
    ///
    /// # Errors
    /// [`Error::Core`] when the plan names a layer the model does not have, or a format that is not
    /// one for keys or values.
    pub fn layers(&self, model: &ModelConfig, config: &CacheConfig) -> Result<Vec<LayerSpec>> {
        let mut layers = model.cache_layers(config);
        let count = layers.len();
        for entry in &self.layers {
            let keys: Option<Format> = entry.keys.as_deref().map(str::parse).transpose()?;
            let values: Option<Format> = entry.values.as_deref().map(str::parse).transpose()?;
            for &number in &entry.layers {
                let index = if number < 0 {
                    number.checked_add_unsigned(count as u64)
                } else {
                    Some(number)
                };
                let layer = index.and_then(|index| usize::try_from(index).ok());
                let Some(layer) = layer.and_then(|index| layers.get_mut(index)) else {
                    let allowed = format!("the model has layers 0 to {}", count - 1);
                    return Err(kivi_core::Error::config("layer", number, allowed).into());
                };
                layer.format.keys = keys.unwrap_or(layer.format.keys);
                layer.format.values = values.unwrap_or(layer.format.values);
            }
        }
        // Finds formats that cannot be the keys' or the values'.
        PoolSpec::new(config.clone(), layers.clone(), 1, 1)?;
        Ok(layers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model of so many layers.
    fn tiny(layers: usize) -> ModelConfig {
        let json = format!(
            r#"{{"model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
                "num_attention_heads": 2, "num_hidden_layers": {layers}, "vocab_size": 8,
                "rms_norm_eps": 1e-5, "max_position_embeddings": 64}}"#
        );
        ModelConfig::from_hf_json(json.as_bytes()).unwrap()
    }

    fn layers(json: &str) -> Result<Vec<String>> {
        let plan = CachePlan::from_json(json)?;
        let config = plan.builder()?.build()?;
        let name = |layer: &LayerSpec| format!("{}:{}", layer.format.keys, layer.format.values);
        Ok(plan.layers(&tiny(4), &config)?.iter().map(name).collect())
    }

    #[test]
    fn layers_differ_from_the_cache_where_the_plan_says_so() {
        let json = r#"{"cache": "kivi2+", "layers": [
            {"layers": [0, -1], "keys": "kivi4", "values": "kivi8"},
            {"layers": [1, 3], "values": "f16"}]}"#;
        let expected = ["kivi4:kivi8", "kivi2+0.25:f16", "kivi2+0.25:kivi2", "kivi4:f16"];
        assert_eq!(layers(json).unwrap(), expected);
        assert_eq!(layers("{}").unwrap(), ["kivi2:kivi2"; 4]);
    }

    #[test]
    fn numbers_override_the_named_cache() {
        let plan =
            CachePlan::from_json(r#"{"cache": "kivi2+", "sink_length": 4, "group_size": 64}"#);
        let config = plan.unwrap().builder().unwrap().build().unwrap();
        assert_eq!((config.sink_length(), config.group_size()), (4, 64));
        assert_eq!(config.key().to_string(), "kivi2+0.25");
    }

    #[test]
    fn plans_round_trip() {
        let entry = LayerFormats { layers: vec![0, -2], keys: Some("kivi4".into()), values: None };
        let plan = CachePlan {
            cache: Some("kivi2".into()),
            residual_length: Some(64),
            layers: vec![entry],
            ..CachePlan::default()
        };
        assert_eq!(CachePlan::from_json(&plan.to_json()).unwrap(), plan);
    }

    #[test]
    fn wrong_plans_are_refused_with_the_place() {
        for (json, expected) in [
            ("{\n\"store\": 1}", "line 2"),
            (r#"{"cache": "kivi9"}"#, "kivi9"),
            (r#"{"layers": [{"layers": [0], "keys": "q4_0"}]}"#, "q4_0"),
            (r#"{"layers": [{"layers": [4], "keys": "f16"}]}"#, "layers 0 to 3"),
            (r#"{"layers": [{"layers": [-5]}]}"#, "-5"),
            (r#"{"layers": [{"layers": [-9223372036854775808]}]}"#, "layers 0 to 3"),
            (r#"{"layers": [{"layers": [0], "values": "kivi2+0.25"}]}"#, "only keys"),
        ] {
            let message = layers(json).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
