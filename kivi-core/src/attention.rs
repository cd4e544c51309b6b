//! What an attention operation computes, beside the cache.

use crate::{Error, KeyBias, LayerSpec, Result};
use std::sync::Arc;

/// Parameters of causal attention over one layer's cache.
///
/// For a query row at position `t` and a visible token at position `j ≤ t`, the logit is
/// `softcap(scale · q·(k + R_j b)) + slope · (j − t)`, `R_j b` being the rotated key bias, if it is
/// not part of the key, with `softcap(x) = c · tanh(x / c)`, and the weights
/// are the softmax of the logits, whose denominator also holds `exp(sink logit)` of the head. The
/// window is the layer's, [`LayerSpec::window`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Attention {
    /// Number of query heads, a multiple of the layer's kv heads; head `h` reads kv head
    /// `h / (query_heads / kv_heads)`.
    pub query_heads: usize,
    /// Factor of the dot products, usually `1/√head_dim`.
    pub scale: f32,
    /// `c` of the logit soft-cap (Gemma 2).
    pub softcap: Option<f32>,
    /// Learned sink logit of each query head (gpt-oss).
    pub sink_logits: Option<Vec<f32>>,
    /// ALiBi slope of each query head (Falcon).
    pub alibi_slopes: Option<Vec<f32>>,
    /// Bias of the keys that the cached keys do not hold; a backend that does not say
    /// [`Capabilities::key_bias`](crate::Capabilities::key_bias) refuses it.
    pub key_bias: Option<Arc<KeyBias>>,
}

impl Attention {
    /// Plain scaled dot-product attention.
    pub fn new(query_heads: usize, scale: f32) -> Self {
        Self {
            query_heads,
            scale,
            softcap: None,
            sink_logits: None,
            alibi_slopes: None,
            key_bias: None,
        }
    }

    /// Checks the parameters against a layer.
    ///
    /// # Errors
    /// When the query heads are not a positive multiple of the kv heads, a per-head list has
    /// another length, the scale is 0 or not finite, or a soft-cap is not positive.
    pub fn validate(&self, layer: &LayerSpec) -> Result<()> {
        let heads = self.query_heads;
        if heads == 0 || !heads.is_multiple_of(layer.kv_heads) {
            let reason = format!("{heads} query heads do not share {} kv heads", layer.kv_heads);
            return Err(Error::request("attend", reason));
        }
        if !self.scale.is_finite() || self.scale == 0.0 {
            let reason = format!("softmax scale {} is not a number other than 0", self.scale);
            return Err(Error::request("attend", reason));
        }
        for (name, list) in [("sink logits", &self.sink_logits), ("slopes", &self.alibi_slopes)] {
            if let Some(list) = list
                && list.len() != heads
            {
                let reason = format!("{} {name} for {heads} query heads", list.len());
                return Err(Error::request("attend", reason));
            }
        }
        if let Some(bias) = &self.key_bias {
            bias.validate(layer)?;
        }
        match self.softcap {
            Some(cap) if cap.is_nan() || cap <= 0.0 => {
                Err(Error::request("attend", format!("soft-cap {cap} is not positive")))
            }
            _ => Ok(()),
        }
    }

    /// Query heads that share one kv head of `layer`: the size of a head group.
    pub fn head_group(&self, layer: &LayerSpec) -> usize {
        self.query_heads / layer.kv_heads
    }

    /// The logit of query head `head` at position `query` for the token at `token`, given the product of
    /// the query and the whole key, its bias included.
    ///
    /// # Panics
    /// If `token` lies after `query` or there is no such head.
    pub fn logit(&self, head: usize, query: usize, token: usize, dot: f32) -> f32 {
        let mut logit = dot * self.scale;
        if let Some(cap) = self.softcap {
            logit = cap * (logit / cap).tanh();
        }
        if let Some(slopes) = &self.alibi_slopes {
            logit -= slopes[head] * (query - token) as f32;
        }
        logit
    }
}
