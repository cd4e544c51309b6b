//! Names of the weights, and how the two kinds of checkpoint spell them.

use crate::config::ModelConfig;
use std::fmt;

/// A weight of a decoder.
///
/// [`Display`](fmt::Display) prints the GGUF name, for example `blk.0.attn_q.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WeightName {
    /// `[vocab_size, hidden_size]`.
    TokenEmbedding,
    /// `[1, hidden_size]`, the norm before the logits.
    OutputNorm,
    /// `[vocab_size, hidden_size]`; absent where the embedding is used instead.
    Output,
    /// A weight of the layer with this index.
    Layer(usize, LayerWeight),
}

/// A weight that every layer has. Shapes use the words of [`ModelConfig`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LayerWeight {
    /// `[1, hidden_size]`, the norm before the attention.
    AttentionNorm,
    /// `[query_heads · head_dim, hidden_size]`.
    Query,
    /// `[kv_heads · head_dim, hidden_size]`.
    Key,
    /// `[kv_heads · head_dim, hidden_size]`.
    Value,
    /// `[hidden_size, query_heads · head_dim]`.
    AttentionOutput,
    /// `[1, query_heads · head_dim]`, with `attention_bias` only, like the next three.
    QueryBias,
    /// `[1, kv_heads · head_dim]`.
    KeyBias,
    /// `[1, kv_heads · head_dim]`.
    ValueBias,
    /// `[1, hidden_size]`.
    AttentionOutputBias,
    /// `[1, hidden_size]`, the norm before the MLP.
    MlpNorm,
    /// `[intermediate_size, hidden_size]`.
    MlpGate,
    /// `[intermediate_size, hidden_size]`.
    MlpUp,
    /// `[hidden_size, intermediate_size]`.
    MlpDown,
    /// `[1, intermediate_size]`, with `mlp_bias` only, like the next two.
    MlpGateBias,
    /// `[1, intermediate_size]`.
    MlpUpBias,
    /// `[1, hidden_size]`.
    MlpDownBias,
}

use LayerWeight as L;

/// Each layer weight with its name in GGUF (after `blk.N.`) and Hugging Face (after
/// `model.layers.N.`) checkpoints.
const LAYER_NAMES: [(LayerWeight, &str, &str); 16] = [
    (L::AttentionNorm, "attn_norm.weight", "input_layernorm.weight"),
    (L::Query, "attn_q.weight", "self_attn.q_proj.weight"),
    (L::Key, "attn_k.weight", "self_attn.k_proj.weight"),
    (L::Value, "attn_v.weight", "self_attn.v_proj.weight"),
    (L::AttentionOutput, "attn_output.weight", "self_attn.o_proj.weight"),
    (L::QueryBias, "attn_q.bias", "self_attn.q_proj.bias"),
    (L::KeyBias, "attn_k.bias", "self_attn.k_proj.bias"),
    (L::ValueBias, "attn_v.bias", "self_attn.v_proj.bias"),
    (L::AttentionOutputBias, "attn_output.bias", "self_attn.o_proj.bias"),
    (L::MlpNorm, "ffn_norm.weight", "post_attention_layernorm.weight"),
    (L::MlpGate, "ffn_gate.weight", "mlp.gate_proj.weight"),
    (L::MlpUp, "ffn_up.weight", "mlp.up_proj.weight"),
    (L::MlpDown, "ffn_down.weight", "mlp.down_proj.weight"),
    (L::MlpGateBias, "ffn_gate.bias", "mlp.gate_proj.bias"),
    (L::MlpUpBias, "ffn_up.bias", "mlp.up_proj.bias"),
    (L::MlpDownBias, "ffn_down.bias", "mlp.down_proj.bias"),
];

/// The weights outside the layers, likewise.
const OTHER_NAMES: [(WeightName, &str, &str); 3] = [
    (WeightName::TokenEmbedding, "token_embd.weight", "model.embed_tokens.weight"),
    (WeightName::OutputNorm, "output_norm.weight", "model.norm.weight"),
    (WeightName::Output, "output.weight", "lm_head.weight"),
];

/// How a checkpoint spells the names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Naming {
    Gguf,
    HuggingFace,
}

impl Naming {
    fn pick<'a>(self, gguf: &'a str, hugging_face: &'a str) -> &'a str {
        match self {
            Self::Gguf => gguf,
            Self::HuggingFace => hugging_face,
        }
    }

    /// What stands before the number of the layer.
    fn prefix(self) -> &'static str {
        self.pick("blk.", "model.layers.")
    }

    /// The weight called `name`, if a model can have one.
    pub(super) fn parse(self, name: &str) -> Option<WeightName> {
        if let Some(rest) = name.strip_prefix(self.prefix()) {
            let (digits, part) = rest.split_once('.')?;
            let layer = digits.parse().ok()?;
            let (weight, ..) =
                LAYER_NAMES.iter().find(|(_, gguf, hf)| self.pick(gguf, hf) == part)?;
            let weight = WeightName::Layer(layer, *weight);
            // Only the canonical spelling of the number, so that no two names mean one weight.
            (self.spell(weight) == name).then_some(weight)
        } else {
            let found = OTHER_NAMES.iter().find(|(_, gguf, hf)| self.pick(gguf, hf) == name);
            found.map(|&(weight, ..)| weight)
        }
    }

    /// The name of `weight`.
    pub(super) fn spell(self, weight: WeightName) -> String {
        match weight {
            WeightName::Layer(layer, weight) => {
                let (_, gguf, hf) = LAYER_NAMES[weight as usize];
                format!("{}{layer}.{}", self.prefix(), self.pick(gguf, hf))
            }
            WeightName::TokenEmbedding | WeightName::OutputNorm | WeightName::Output => {
                let row = OTHER_NAMES.iter().find(|(name, ..)| *name == weight);
                row.map(|(_, gguf, hf)| self.pick(gguf, hf)).unwrap_or_default().to_owned()
            }
        }
    }

    /// Whether a checkpoint may hold a tensor of this name that is not a weight: the rotation
    /// frequencies, which the configuration describes (and, in GGUF files, has already read).
    pub(super) fn is_derived(self, name: &str) -> bool {
        match self {
            Self::Gguf => name == "rope_freqs.weight",
            Self::HuggingFace => name.ends_with("rotary_emb.inv_freq"),
        }
    }
}

impl fmt::Display for WeightName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&Naming::Gguf.spell(*self))
    }
}

impl ModelConfig {
    /// `[rows, columns]` of a weight, `None` if this model does not have it.
    pub fn weight_shape(&self, name: WeightName) -> Option<[usize; 2]> {
        let (hidden, mlp) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.query_size(), self.kv_size());
        let (layer, weight) = match name {
            WeightName::TokenEmbedding => return Some([self.vocab_size, hidden]),
            WeightName::OutputNorm => return Some([1, hidden]),
            WeightName::Output => {
                return (!self.tied_embeddings).then_some([self.vocab_size, hidden]);
            }
            WeightName::Layer(layer, weight) => (layer, weight),
        };
        let (shape, present) = match weight {
            L::AttentionNorm | L::MlpNorm => ([1, hidden], true),
            L::Query => ([q, hidden], true),
            L::Key | L::Value => ([kv, hidden], true),
            L::AttentionOutput => ([hidden, q], true),
            L::MlpGate | L::MlpUp => ([mlp, hidden], true),
            L::MlpDown => ([hidden, mlp], true),
            L::QueryBias => ([1, q], self.attention_bias),
            L::KeyBias | L::ValueBias => ([1, kv], self.attention_bias),
            L::AttentionOutputBias => ([1, hidden], self.attention_bias),
            L::MlpGateBias | L::MlpUpBias => ([1, mlp], self.mlp_bias),
            L::MlpDownBias => ([1, hidden], self.mlp_bias),
        };
        (present && layer < self.layers).then_some(shape)
    }

    /// Every weight this model has.
    pub fn weight_names(&self) -> impl Iterator<Item = WeightName> + '_ {
        let layers = (0..self.layers).flat_map(|layer| {
            LAYER_NAMES.iter().map(move |&(weight, ..)| WeightName::Layer(layer, weight))
        });
        [WeightName::TokenEmbedding, WeightName::OutputNorm, WeightName::Output]
            .into_iter()
            .chain(layers)
            .filter(|&name| self.weight_shape(name).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_enumeration() {
        for (index, (weight, ..)) in LAYER_NAMES.iter().enumerate() {
            assert_eq!(*weight as usize, index);
        }
    }

    #[test]
    fn names_follow_both_conventions() {
        let query = WeightName::Layer(7, L::Query);
        assert_eq!(query.to_string(), "blk.7.attn_q.weight");
        assert_eq!(Naming::HuggingFace.spell(query), "model.layers.7.self_attn.q_proj.weight");
        assert_eq!(WeightName::Output.to_string(), "output.weight");
        for naming in [Naming::Gguf, Naming::HuggingFace] {
            for (weight, ..) in LAYER_NAMES {
                let name = WeightName::Layer(31, weight);
                assert_eq!(naming.parse(&naming.spell(name)), Some(name));
            }
            for (name, ..) in OTHER_NAMES {
                assert_eq!(naming.parse(&naming.spell(name)), Some(name));
            }
        }
    }

    #[test]
    fn only_the_canonical_spelling_parses() {
        for name in [
            "blk.07.attn_q.weight",
            "blk.+7.attn_q.weight",
            "blk.-1.attn_q.weight",
            "blk.99999999999999999999999.attn_q.weight",
            "blk.7.attn_q",
            "blk.7.attn_qkv.weight",
            "blk..attn_q.weight",
            "blk.",
            "",
            "model.norm.weight",
        ] {
            assert_eq!(Naming::Gguf.parse(name), None, "{name}");
        }
    }
}
