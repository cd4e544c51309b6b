//! The Llama family: Llama (arXiv 2302.13971, 2307.09288, 2407.21783), Mistral without a window
//! (arXiv 2310.06825), SmolLM2, TinyLlama.
//!
//! Each layer is, in this order,
//!
//! ```text
//! h  = rms_norm(x)
//! x += attention(rotate(h·Wq), rotate(h·Wk), h·Wv) · Wo
//! h  = rms_norm(x)
//! x += (silu(h·Wgate) ∘ (h·Wup)) · Wdown
//! ```
//!
//! and the logits are `rms_norm(x) · Woutput`. After `modeling_llama.py` of Hugging Face
//! transformers.

use crate::{
    Checkpoint, Error, ModelConfig, Result,
    checkpoint::{LayerWeight, WeightName},
};
use kivi_core::{
    Attention, CacheConfig, DecoderBackend, KeyBias, LayerSpec, ModelIdentity, Rope, StepPlan,
};
use std::sync::Arc;

/// A model of the Llama family on a backend. A clone is the same model.
pub struct Llama<B: DecoderBackend> {
    parts: Arc<Parts<B>>,
}

impl<B: DecoderBackend> Clone for Llama<B> {
    fn clone(&self) -> Self {
        Self { parts: Arc::clone(&self.parts) }
    }
}

struct Parts<B: DecoderBackend> {
    backend: B,
    config: ModelConfig,
    identity: ModelIdentity,
    /// `[vocab_size, hidden_size]`.
    embedding: B::Weight,
    layers: Vec<Layer<B::Weight>>,
    /// `[1, hidden_size]`.
    output_norm: B::Weight,
    /// `[vocab_size, hidden_size]`; the embedding where there is none.
    output: Option<B::Weight>,
}

/// Where the biases of the key projections go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyBiasMode {
    /// Large ones are added to the logits, if the backend can, and the cache holds keys without them
    /// ([`kivi_core::KeyBias`]); small ones are part of the keys.
    #[default]
    Beside,
    /// All are part of the keys in the cache.
    InKeys,
}

/// Key biases of a layer stay out of the cache if one of their elements is larger. Keys have elements
/// of about 1 without a bias; a bias that the rotation turns through a group widens the range of a
/// channel by up to twice its size, so below this it costs less than a fifth of a step at 2 bits, and
/// a product per query and token is not worth it.
const LARGE_KEY_BIAS: f32 = 0.25;

/// The weights of one layer; shapes as in [`LayerWeight`].
#[derive(Debug)]
struct Layer<W> {
    /// With the key bias, if the cached keys do not hold it; `key` has none then.
    attention: Attention,
    attention_norm: W,
    query: Projection<W>,
    key: Projection<W>,
    value: Projection<W>,
    output: Projection<W>,
    mlp_norm: W,
    gate: W,
    up: W,
    down: W,
}

/// A linear layer with an optional bias.
#[derive(Debug)]
struct Projection<W> {
    weight: W,
    bias: Option<W>,
}

impl<W> Projection<W> {
    fn parts(&self) -> (&W, Option<&W>) {
        (&self.weight, self.bias.as_ref())
    }
}

/// What the attention of one layer took and gave in a step.
#[non_exhaustive]
pub struct ObservedAttention<'a, B: DecoderBackend> {
    /// The backend, to read buffers with.
    pub backend: &'a B,
    /// The layer.
    pub layer: usize,
    /// `[rows, query_heads · head_dim]`, rotated.
    pub queries: &'a B::Buffer,
    /// `[rows, kv_heads · head_dim]`, rotated, before rounding to the store type.
    pub keys: &'a B::Buffer,
    /// `[rows, kv_heads · head_dim]`.
    pub values: &'a B::Buffer,
    /// `[rows, query_heads · head_dim]`, before the output projection.
    pub attended: &'a B::Buffer,
}

/// Looks at the attention of every layer of a step, in order.
pub type Observer<'o, B> = dyn FnMut(ObservedAttention<'_, B>) -> Result<()> + Send + 'o;

impl<B: DecoderBackend> Llama<B> {
    /// Loads the weights of a checkpoint into a backend.
    ///
    /// # Errors
    /// When a weight is missing, the model has biases in its MLP, or the backend refuses a weight.
    pub fn load(backend: B, checkpoint: &Checkpoint) -> Result<Self> {
        Self::load_with(backend, checkpoint, KeyBiasMode::Beside)
    }

    /// The same with a say in where key biases go.
    ///
    /// # Errors
    /// As [`Llama::load`].
    pub fn load_with(backend: B, checkpoint: &Checkpoint, mode: KeyBiasMode) -> Result<Self> {
        let config = checkpoint.config().clone();
        if config.mlp_bias {
            return Err(Error::unsupported("biases in the MLP", "none"));
        }
        let load =
            |name| -> Result<B::Weight> { Ok(backend.load(checkpoint.required_weight(name)?)?) };
        let rope = config.rope.frequencies();
        let plain = Attention::new(config.query_heads, 1.0 / (config.head_dim as f32).sqrt());
        let beside = mode == KeyBiasMode::Beside && backend.capabilities().key_bias;
        let layers = (0..config.layers)
            .map(|index| {
                let layer = |weight| load(WeightName::Layer(index, weight));
                let projection = |weight, bias| -> Result<_> {
                    let bias = config.attention_bias.then(|| layer(bias)).transpose()?;
                    Ok(Projection { weight: layer(weight)?, bias })
                };
                let mut attention = plain.clone();
                let mut key = projection(LayerWeight::Key, LayerWeight::KeyBias)?;
                if beside && key.bias.is_some() {
                    let name = WeightName::Layer(index, LayerWeight::KeyBias);
                    let data = checkpoint.required_weight(name)?;
                    let mut bias = vec![0.0; config.kv_size()];
                    data.dequantize_row(0, &mut bias)?;
                    if bias.iter().any(|x| x.abs() > LARGE_KEY_BIAS) {
                        let bias = KeyBias::new(&rope, config.head_dim, bias)?;
                        (attention.key_bias, key.bias) = (Some(Arc::new(bias)), None);
                    }
                }
                Ok(Layer {
                    attention,
                    attention_norm: layer(LayerWeight::AttentionNorm)?,
                    query: projection(LayerWeight::Query, LayerWeight::QueryBias)?,
                    key,
                    value: projection(LayerWeight::Value, LayerWeight::ValueBias)?,
                    output: projection(
                        LayerWeight::AttentionOutput,
                        LayerWeight::AttentionOutputBias,
                    )?,
                    mlp_norm: layer(LayerWeight::MlpNorm)?,
                    gate: layer(LayerWeight::MlpGate)?,
                    up: layer(LayerWeight::MlpUp)?,
                    down: layer(LayerWeight::MlpDown)?,
                })
            })
            .collect::<Result<Vec<Layer<B::Weight>>>>()?;
        let tied = config.tied_embeddings;
        let key_bias_beside = layers.iter().map(|layer| layer.attention.key_bias.is_some());
        let identity = ModelIdentity {
            fingerprint: checkpoint.fingerprint(),
            rope,
            key_bias_beside: key_bias_beside.collect(),
        };
        let parts = Parts {
            identity,
            embedding: load(WeightName::TokenEmbedding)?,
            layers,
            output_norm: load(WeightName::OutputNorm)?,
            output: if tied { None } else { Some(load(WeightName::Output)?) },
            config,
            backend,
        };
        Ok(Self { parts: Arc::new(parts) })
    }

    /// The backend the model runs on.
    pub fn backend(&self) -> &B {
        &self.parts.backend
    }

    /// How many layers have their key bias beside the cache ([`KeyBiasMode::Beside`]).
    pub fn key_biases_beside(&self) -> usize {
        self.parts.identity.key_bias_beside.iter().filter(|&&beside| beside).count()
    }

    /// What the keys and values in a cache depend on besides the tokens and the cache itself.
    pub fn identity(&self) -> &ModelIdentity {
        &self.parts.identity
    }

    /// The [fingerprint](Checkpoint::fingerprint) of the checkpoint.
    pub fn fingerprint(&self) -> [u8; 32] {
        self.parts.identity.fingerprint
    }

    /// Sizes and switches.
    pub fn config(&self) -> &ModelConfig {
        &self.parts.config
    }

    /// The rotary embedding.
    pub fn rope(&self) -> &Rope {
        &self.parts.identity.rope
    }

    /// The cache layers the model needs, in the formats of a cache configuration.
    pub fn cache_layers(&self, config: &CacheConfig) -> Vec<LayerSpec> {
        self.parts.config.cache_layers(config)
    }

    /// One step: appends `tokens`, one per row of the plan, to the cache and returns the normed
    /// hidden states `[rows, hidden_size]`, which [`Llama::logits`] takes.
    ///
    /// # Errors
    /// When there is not one token per row or the backend fails; the cache is then in no useful
    /// state and the plan's sequences must be removed.
    pub fn forward(
        &self,
        cache: &mut B::Cache,
        plan: &StepPlan,
        tokens: &[u32],
    ) -> Result<B::Buffer> {
        kivi_core::expect_len("forward", "tokens", tokens.len(), plan.rows)?;
        self.parts.backend.run(|| self.forward_inside(cache, plan, tokens, None))
    }

    /// The same, showing the attention of every layer to `observe`.
    ///
    /// # Errors
    /// As [`Llama::forward`], and those of `observe`.
    pub fn forward_observed(
        &self,
        cache: &mut B::Cache,
        plan: &StepPlan,
        tokens: &[u32],
        observe: &mut Observer<'_, B>,
    ) -> Result<B::Buffer> {
        kivi_core::expect_len("forward", "tokens", tokens.len(), plan.rows)?;
        self.parts.backend.run(|| self.forward_inside(cache, plan, tokens, Some(observe)))
    }

    /// [`Llama::forward`] inside [`DecoderBackend::run`].
    fn forward_inside(
        &self,
        cache: &mut B::Cache,
        plan: &StepPlan,
        tokens: &[u32],
        mut observe: Option<&mut Observer<'_, B>>,
    ) -> Result<B::Buffer> {
        let backend = &self.parts.backend;
        let epsilon = self.parts.config.norm_eps as f32;
        backend.begin_step(cache, plan)?;
        let angles = backend.prepare_rope(&self.parts.identity.rope, plan)?;
        let mut x = backend.embed(&self.parts.embedding, tokens)?;
        for (index, layer) in self.parts.layers.iter().enumerate() {
            let h = backend.rms_norm(&x, &layer.attention_norm, epsilon)?;
            let projections = [&layer.query, &layer.key, &layer.value].map(Projection::parts);
            let [mut queries, mut keys, mut values] = backend.linear_many(&h, projections)?;
            let qkv = [&mut queries, &mut keys, &mut values];
            let rope = &self.parts.identity.rope;
            backend.rotate_and_append(cache, index, plan, rope, &angles, qkv)?;
            backend.quantize(cache, index, plan)?;
            let attended = backend.attend(cache, index, plan, &layer.attention, &queries)?;
            if let Some(observe) = &mut observe {
                observe(ObservedAttention {
                    backend,
                    layer: index,
                    queries: &queries,
                    keys: &keys,
                    values: &values,
                    attended: &attended,
                })?;
            }
            backend.release(cache, index, plan)?;
            let (weight, bias) = layer.output.parts();
            backend.add(&mut x, &backend.linear(&attended, weight, bias)?)?;

            let h = backend.rms_norm(&x, &layer.mlp_norm, epsilon)?;
            let mlp = backend.gated_mlp(&h, &layer.gate, &layer.up, &layer.down)?;
            backend.add(&mut x, &mlp)?;
        }
        Ok(backend.rms_norm(&x, &self.parts.output_norm, epsilon)?)
    }

    /// The logits of some rows of [`Llama::forward`]'s result, `[rows.len(), vocab_size]`.
    ///
    /// # Errors
    /// When a row does not exist or the backend fails.
    pub fn logits(&self, hidden: &B::Buffer, rows: &[usize]) -> Result<Vec<f32>> {
        self.parts.backend.run(|| {
            let selected = self.parts.backend.select_rows(hidden, rows)?;
            let output = self.parts.output.as_ref().unwrap_or(&self.parts.embedding);
            let logits = self.parts.backend.linear(&selected, output, None)?;
            let mut out = vec![0.0; rows.len() * self.parts.config.vocab_size];
            self.parts.backend.read(&logits, &mut out)?;
            Ok(out)
        })
    }
}

impl ModelConfig {
    /// The cache layers a model of this shape needs, in the formats of a cache configuration.
    pub fn cache_layers(&self, config: &CacheConfig) -> Vec<LayerSpec> {
        let mut layer = LayerSpec::new(config, self.kv_heads, self.head_dim);
        layer.window = self.sliding_window;
        vec![layer; self.layers]
    }

    /// Whether several query heads share a kv head (GQA or MQA).
    pub fn shares_kv_heads(&self) -> bool {
        self.kv_heads < self.query_heads
    }
}
