//! Key biases that are kept out of the cache.

use crate::{LayerSpec, Result, Rope, expect_len};

/// The bias `b` of a layer's key projection, added to the logits instead of to the keys.
///
/// The rotary embedding is linear: a key at position `j` is `R_j (W x + b) = R_j W x + R_j b`. The
/// second part is known for every position, so the cache need only hold the first, and a query gets
/// `q · R_j b` on top of its product with the cached key, in full precision. A large bias (Qwen2 has
/// some in the hundreds) would otherwise set the range of its channels, and few bits would leave
/// nothing of `W x`.
///
/// For a tile of tokens that starts at `t`, `q · R_(t+i) b = (R_t⁻¹ q) · R_i b`: one rotation of the
/// query, and a product with the same table for every tile, [`KeyBias::block`].
#[derive(Clone, Debug, PartialEq)]
pub struct KeyBias {
    rope: Rope,
    head_dim: usize,
    /// `[kv_heads, head_dim]`
    bias: Vec<f32>,
    /// `[kv_heads, head_dim, BLOCK]`: `R_i b` for `i` in `0 .. BLOCK`.
    block: Vec<f32>,
}

impl KeyBias {
    /// Tokens of the table.
    pub const BLOCK: usize = 128;

    /// The bias of a layer, `[kv_heads, head_dim]`, under the model's rotary embedding.
    ///
    /// # Errors
    /// When there is not one element per channel, or more channels are rotated than a head has.
    pub fn new(rope: &Rope, head_dim: usize, bias: Vec<f32>) -> Result<Self> {
        rope.validate(head_dim)?;
        let heads = bias.len() / head_dim.max(1);
        expect_len("key bias", "bias", bias.len(), heads * head_dim)?;
        let block = vec![0.0; bias.len() * Self::BLOCK];
        let mut new = Self { rope: rope.clone(), head_dim, bias, block };
        for head in 0..heads {
            for token in 0..Self::BLOCK {
                for (channel, x) in new.rotated(head, token).into_iter().enumerate() {
                    new.block[(head * head_dim + channel) * Self::BLOCK + token] = x;
                }
            }
        }
        Ok(new)
    }

    /// Checks that there is a bias for every channel of a layer.
    ///
    /// # Errors
    /// When the layer has another shape.
    pub fn validate(&self, layer: &LayerSpec) -> Result<()> {
        expect_len("attend", "head_dim of the key bias", self.head_dim, layer.head_dim)?;
        let expected = layer.kv_heads * layer.head_dim;
        expect_len("attend", "key bias", self.bias.len(), expected)
    }

    /// `R_j b` of one kv head, `[head_dim]`; angles in f64.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn rotated(&self, head: usize, position: usize) -> Vec<f32> {
        let mut out = self.bias[head * self.head_dim..][..self.head_dim].to_vec();
        let factor = f64::from(self.rope.attention_factor);
        for (pair, &frequency) in self.rope.frequencies.iter().enumerate() {
            let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
            let (i, j) = self.rope.pair(pair);
            let (a, b) = (f64::from(out[i]), f64::from(out[j]));
            out[i] = ((a * cos - b * sin) * factor) as f32;
            out[j] = ((a * sin + b * cos) * factor) as f32;
        }
        out
    }

    /// Cosine and sine of every pair at position `t`, for [`KeyBias::turn_back`].
    pub fn angles(&self, position: usize, out: &mut Vec<[f32; 2]>) {
        out.clear();
        out.extend(self.rope.frequencies.iter().map(|&frequency| {
            let (sin, cos) = (position as f64 * f64::from(frequency)).sin_cos();
            [cos as f32, sin as f32]
        }));
    }

    /// Turns a query, `[head_dim]`, back by the angles of a position: only a rotation, since the table
    /// of [`KeyBias::block`] has the factor of the rotary embedding.
    pub fn turn_back(&self, query: &mut [f32], angles: &[[f32; 2]]) {
        for (pair, &[cos, sin]) in angles.iter().enumerate() {
            let (i, j) = self.rope.pair(pair);
            (query[i], query[j]) =
                (query[i] * cos + query[j] * sin, query[j] * cos - query[i] * sin);
        }
    }

    /// The table `R_i b` of one kv head, `[head_dim, BLOCK]`.
    ///
    /// # Panics
    /// If there is no such head.
    pub fn block(&self, head: usize) -> &[f32] {
        let size = self.head_dim * Self::BLOCK;
        &self.block[head * size..(head + 1) * size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RopeStyle;

    fn bias(style: RopeStyle, attention_factor: f32) -> KeyBias {
        let rope = Rope { style, frequencies: vec![1.0, 0.01], attention_factor };
        // Channels 4 and 5 are not rotated.
        let bias = vec![3.0, -1.0, 600.0, 2.0, 5.0, 7.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        KeyBias::new(&rope, 6, bias).unwrap()
    }

    #[test]
    fn rotations_follow_the_definition() {
        let bias = bias(RopeStyle::Halves, 1.0);
        // Pairs are channels (0, 2) and (1, 3).
        let (sin, cos) = 5f64.sin_cos();
        let found = bias.rotated(0, 5);
        assert!((f64::from(found[0]) - (3.0 * cos - 600.0 * sin)).abs() < 1e-4);
        assert!((f64::from(found[2]) - (3.0 * sin + 600.0 * cos)).abs() < 1e-4);
        assert_eq!(found[4..], [5.0, 7.0]);
        assert_eq!(bias.rotated(1, 0)[..2], [1.0, 0.0]);
    }

    /// `q · R_(t+i) b = (R_t⁻¹ q) · R_i b`, with and without a factor.
    #[test]
    fn the_table_serves_every_tile() {
        for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
            for factor in [1.0, 1.25] {
                let bias = bias(style, factor);
                let query = [0.5f32, -2.0, 1.0, 0.25, 3.0, -1.0];
                for (tile, token) in [(0, 0), (4, 3), (1_000, 127), (100_004, 64)] {
                    let dot = |a: &[f32], b: &[f32]| -> f64 {
                        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                    };
                    let expected = dot(&query, &bias.rotated(0, tile + token));
                    let (mut turned, mut angles) = (query, Vec::new());
                    bias.angles(tile, &mut angles);
                    bias.turn_back(&mut turned, &angles);
                    let column: Vec<f32> =
                        (0..6).map(|c| bias.block(0)[c * KeyBias::BLOCK + token]).collect();
                    let found = dot(&turned, &column);
                    // Both round their factors to f32.
                    assert!((found - expected).abs() < 1e-6 * 600.0 * 4.0, "{found} {expected}");
                }
            }
        }
    }

    #[test]
    fn shapes_are_checked() {
        let rope =
            Rope { style: RopeStyle::Halves, frequencies: vec![1.0; 2], attention_factor: 1.0 };
        assert!(KeyBias::new(&rope, 6, vec![0.0; 7]).is_err());
        assert!(KeyBias::new(&rope, 2, vec![0.0; 4]).is_err());
    }
}
