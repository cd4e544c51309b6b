//! Errors of keys, values and attention with everything quantized.

use crate::cli::eval::score::RelativeError;
use anyhow::Result;
use kivi::{
    Bits, DecoderBackend, PackedKeys, PackedValues, Promotion, Rope, StoreDtype,
    models::{ModelConfig, ObservedAttention},
};
use rayon::prelude::*;
use serde_json::{Value, json};

/// How elements are put into groups.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Grouping {
    /// Consecutive channels of a token.
    Token,
    /// Consecutive tokens of a channel.
    Channel,
    /// The same, with a share of the channels at 4 bits.
    Promoted(Promotion),
    /// Consecutive tokens of a channel before the rotation.
    ChannelBeforeRope,
}

/// What is quantized, and how.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Variant {
    keys: bool,
    bits: Bits,
    grouping: Grouping,
}

impl Variant {
    /// The rows of the table.
    pub(super) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for keys in [true, false] {
            for bits in Bits::ALL {
                for grouping in [Grouping::Token, Grouping::Channel] {
                    all.push(Self { keys, bits, grouping });
                }
                if keys {
                    all.push(Self { keys, bits, grouping: Grouping::ChannelBeforeRope });
                }
                if keys && bits == Bits::Two {
                    let grouping = Grouping::Promoted(Promotion::QUARTER);
                    all.push(Self { keys, bits, grouping });
                }
            }
        }
        all
    }

    fn grouping(self) -> String {
        match self.grouping {
            Grouping::Token => "per token".into(),
            Grouping::Channel => "per channel".into(),
            Grouping::Promoted(share) => format!("per channel, {share} promoted"),
            Grouping::ChannelBeforeRope => "per channel, before RoPE".into(),
        }
    }

    fn tensor(self) -> &'static str {
        if self.keys { "keys" } else { "values" }
    }

    /// `[tokens, head_dim]` of one kv head, quantized and back.
    fn quantized(self, head: &Head<'_>, group_size: usize) -> Result<Vec<f32>> {
        let (tokens, width) = (head.tokens(), head.width);
        let shape = [1, tokens, width];
        let elements = |at: &dyn Fn(usize, usize) -> f32| {
            let positions = (0..tokens).flat_map(|token| (0..width).map(move |c| (token, c)));
            positions.map(|(token, channel)| at(token, channel)).collect::<Vec<f32>>()
        };
        let x = if self.keys { &head.keys } else { &head.values };
        Ok(match self.grouping {
            Grouping::Token => {
                let packed = PackedValues::quantize(self.bits, group_size, shape, x)?;
                elements(&|token, channel| packed.dequantize(0, token, channel))
            }
            Grouping::Channel => {
                let packed = PackedKeys::quantize(self.bits, group_size, shape, x)?;
                elements(&|token, channel| packed.dequantize(0, token, channel))
            }
            Grouping::Promoted(share) => {
                let packed = PackedKeys::quantize_promoted(share, group_size, shape, x)?;
                elements(&|token, channel| packed.dequantize(0, token, channel))
            }
            Grouping::ChannelBeforeRope => {
                let mut before = x.clone();
                rotate(&mut before, width, head.rope, -1.0);
                before.iter_mut().for_each(|x| *x = StoreDtype::F16.round(*x));
                let packed = PackedKeys::quantize(self.bits, group_size, shape, &before)?;
                let mut after = elements(&|token, channel| packed.dequantize(0, token, channel));
                rotate(&mut after, width, head.rope, 1.0);
                after
            }
        })
    }
}

/// Turns the rows of `[tokens, width]` by the angles of their positions, or back with `sign` −1.
fn rotate(x: &mut [f32], width: usize, rope: &Rope, sign: f32) {
    for (position, row) in x.chunks_exact_mut(width).enumerate() {
        for (pair, frequency) in rope.frequencies.iter().enumerate() {
            let (sin, cos) = (sign * position as f32 * frequency).sin_cos();
            let (i, j) = rope.pair(pair);
            (row[i], row[j]) = (row[i] * cos - row[j] * sin, row[i] * sin + row[j] * cos);
        }
    }
}

/// Queries, keys and values of one layer and prompt.
pub(super) struct Layer<'a> {
    /// `[tokens, query_heads, head_dim]`.
    queries: Vec<f32>,
    /// `[tokens, kv_heads, head_dim]`, rounded to f16.
    pub(super) keys: Vec<f32>,
    pub(super) values: Vec<f32>,
    query_heads: usize,
    pub(super) kv_heads: usize,
    pub(super) width: usize,
    rope: &'a Rope,
}

impl<'a> Layer<'a> {
    pub(super) fn read<B: DecoderBackend>(
        seen: &ObservedAttention<'_, B>,
        rope: &'a Rope,
        config: &ModelConfig,
    ) -> kivi::models::Result<Self> {
        let read = |buffer: &B::Buffer| -> kivi::models::Result<Vec<f32>> {
            let [rows, width] = seen.backend.shape(buffer);
            let mut out = vec![0.0; rows * width];
            seen.backend.read(buffer, &mut out)?;
            Ok(out)
        };
        let stored = |buffer| -> kivi::models::Result<Vec<f32>> {
            Ok(read(buffer)?.into_iter().map(|x| StoreDtype::F16.round(x)).collect())
        };
        Ok(Self {
            queries: read(seen.queries)?,
            keys: stored(seen.keys)?,
            values: stored(seen.values)?,
            query_heads: config.query_heads,
            kv_heads: config.kv_heads,
            width: config.head_dim,
            rope,
        })
    }

    pub(super) fn tokens(&self) -> usize {
        self.keys.len() / (self.kv_heads * self.width)
    }

    /// One kv head and what its query heads ask at `positions`.
    fn head(&self, head: usize, positions: &[usize]) -> Head<'_> {
        let gather = |x: &[f32]| {
            let rows = x.chunks_exact(self.kv_heads * self.width);
            let row = |row: &[f32]| row[head * self.width..][..self.width].to_vec();
            rows.flat_map(row).collect()
        };
        let group = self.query_heads / self.kv_heads;
        let queries = positions.iter().flat_map(|&position| {
            (head * group..(head + 1) * group).map(move |query_head| {
                let start = (position * self.query_heads + query_head) * self.width;
                (position, &self.queries[start..start + self.width])
            })
        });
        Head {
            keys: gather(&self.keys),
            values: gather(&self.values),
            queries: queries.collect(),
            width: self.width,
            rope: self.rope,
        }
    }
}

/// One kv head.
struct Head<'a> {
    /// `[tokens, width]`.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// Position and `[width]` of every query.
    queries: Vec<(usize, &'a [f32])>,
    width: usize,
    rope: &'a Rope,
}

impl Head<'_> {
    fn tokens(&self) -> usize {
        self.keys.len() / self.width
    }

    /// Causal attention weights of a query, `softmax(q·K / √width)`.
    fn weights(&self, query: &(usize, &[f32]), keys: &[f32]) -> Vec<f32> {
        let scale = 1.0 / (self.width as f32).sqrt();
        let dot = |key: &[f32]| key.iter().zip(query.1).map(|(k, q)| k * q).sum::<f32>() * scale;
        let mut logits: Vec<f32> =
            keys.chunks_exact(self.width).take(query.0 + 1).map(dot).collect();
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        logits.iter_mut().for_each(|x| *x = (*x - largest).exp());
        let sum: f32 = logits.iter().sum();
        logits.iter_mut().for_each(|x| *x /= sum);
        logits
    }

    /// `Σ p_j v_j`.
    fn output(&self, weights: &[f32], values: &[f32]) -> Vec<f32> {
        let mut out = vec![0.0; self.width];
        for (weight, value) in weights.iter().zip(values.chunks_exact(self.width)) {
            out.iter_mut().zip(value).for_each(|(out, v)| *out += weight * v);
        }
        out
    }

    fn errors(&self, variants: &[Variant], group_size: usize) -> Result<Vec<Errors>> {
        let exact: Vec<(Vec<f32>, Vec<f32>)> = self
            .queries
            .iter()
            .map(|query| {
                let weights = self.weights(query, &self.keys);
                let output = self.output(&weights, &self.values);
                (weights, output)
            })
            .collect();
        let measure = |variant: &Variant| -> Result<Errors> {
            let quantized = variant.quantized(self, group_size)?;
            let mut errors = Errors::default();
            let original = if variant.keys { &self.keys } else { &self.values };
            errors.reconstruction.add(&quantized, original);
            for (query, (weights, output)) in self.queries.iter().zip(&exact) {
                if variant.keys {
                    let found = self.weights(query, &quantized);
                    errors.weights.add(&found, weights);
                    errors.output.add(&self.output(&found, &self.values), output);
                } else {
                    errors.output.add(&self.output(weights, &quantized), output);
                }
            }
            Ok(errors)
        };
        variants.iter().map(measure).collect()
    }
}

/// Errors of one variant in one layer.
#[derive(Clone, Copy, Debug, Default)]
struct Errors {
    /// `‖X̂ − X‖ / ‖X‖`.
    reconstruction: RelativeError,
    /// Of the attention weights; zero for values.
    weights: RelativeError,
    /// Of the attention output, with only this tensor quantized.
    output: RelativeError,
}

/// All errors.
pub(super) struct Table {
    variants: Vec<Variant>,
    /// `[layers][variants]`.
    layers: Vec<Vec<Errors>>,
}

impl Table {
    pub(super) fn new(variants: Vec<Variant>) -> Self {
        Self { variants, layers: Vec::new() }
    }

    /// Adds a layer, measured with `queries` positions of its second half.
    pub(super) fn measure(
        &mut self,
        layer: &Layer<'_>,
        group_size: usize,
        queries: usize,
    ) -> Result<()> {
        let tokens = layer.tokens();
        let later = tokens - tokens / 2;
        let count = queries.min(later);
        // The last position is among them.
        let positions: Vec<usize> =
            (1..=count).map(|index| tokens / 2 + index * later / count - 1).collect();
        let heads: Vec<Vec<Errors>> = (0..layer.kv_heads)
            .into_par_iter()
            .map(|head| layer.head(head, &positions).errors(&self.variants, group_size))
            .collect::<Result<_>>()?;
        let mut sums = vec![Errors::default(); self.variants.len()];
        for errors in heads.iter().flat_map(|head| head.iter().enumerate()) {
            let (sum, errors) = (&mut sums[errors.0], errors.1);
            sum.reconstruction.merge(errors.reconstruction);
            sum.weights.merge(errors.weights);
            sum.output.merge(errors.output);
        }
        self.layers.push(sums);
        Ok(())
    }

    fn mean(&self, variant: usize, of: impl Fn(&Errors) -> RelativeError) -> f64 {
        let sum: f64 = self.layers.iter().map(|layer| of(&layer[variant]).get()).sum();
        sum / self.layers.len().max(1) as f64
    }

    /// The means over the layers, for people.
    pub(super) fn text(&self) -> String {
        let mut text = String::from(
            "relative errors in %, means over the layers\n\
             tensor  bits  grouping                      itself  attention weights  attention output\n",
        );
        for (index, variant) in self.variants.iter().enumerate() {
            let percent = |of: fn(&Errors) -> RelativeError| 100.0 * self.mean(index, of);
            let weights = match variant.keys {
                true => format!("{:.2}", percent(|errors| errors.weights)),
                false => "-".into(),
            };
            text += &format!(
                "{:<7} {:>4}  {:<28} {:>7.2}  {weights:>17}  {:>16.2}\n",
                variant.tensor(),
                variant.bits.get(),
                variant.grouping(),
                percent(|errors| errors.reconstruction),
                percent(|errors| errors.output),
            );
        }
        text
    }

    pub(super) fn json(&self) -> Vec<Value> {
        let rows = self.variants.iter().enumerate().map(|(index, variant)| {
            let layers = |of: fn(&Errors) -> RelativeError| -> Vec<f64> {
                self.layers.iter().map(|layer| of(&layer[index]).get()).collect()
            };
            json!({
                "tensor": variant.tensor(),
                "bits": variant.bits.get(),
                "grouping": variant.grouping(),
                "reconstruction_error": self.mean(index, |errors| errors.reconstruction),
                "attention_weights_error":
                    variant.keys.then(|| self.mean(index, |errors| errors.weights)),
                "attention_output_error": self.mean(index, |errors| errors.output),
                "reconstruction_error_per_layer": layers(|errors| errors.reconstruction),
                "attention_output_error_per_layer": layers(|errors| errors.output),
            })
        });
        rows.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kivi::RopeStyle;

    fn rope() -> Rope {
        Rope { style: RopeStyle::Halves, frequencies: vec![1.0, 0.1], attention_factor: 1.0 }
    }

    /// Keys with one large, constant channel: no error per channel, a large one per token.
    #[test]
    fn a_constant_outlier_channel_costs_tokens_but_not_channels() {
        let rope = rope();
        let tokens = 32;
        let key = |token: usize| [100.0, (token % 4) as f32, 0.0, 1.0];
        let keys: Vec<f32> = (0..tokens).flat_map(key).collect();
        let query = [0.0, 1.0, 0.0, 0.0];
        let layer = Layer {
            queries: (0..tokens).flat_map(|_| query).collect(),
            values: keys.clone(),
            keys,
            query_heads: 1,
            kv_heads: 1,
            width: 4,
            rope: &rope,
        };
        let variant = |grouping| Variant { keys: true, bits: Bits::Two, grouping };
        let variants = vec![variant(Grouping::Token), variant(Grouping::Channel)];
        let mut table = Table::new(variants);
        table.measure(&layer, 16, 4).unwrap();
        let errors = &table.layers[0];
        // 0 to 3 in steps of 1 are levels of their own; of a token's four channels three become 0.
        assert_eq!(errors[1].reconstruction.get(), 0.0);
        assert_eq!(errors[1].output.get(), 0.0);
        // Without them all weights are 1/n; for keys 0 to 3 times 1/2 they are e^(0, ½, 1, 1½) / 9.85,
        // and the relative distance of the two is 0.474.
        assert!((errors[0].weights.get() - 0.474).abs() < 0.02, "{:?}", errors[0]);
    }

    #[test]
    fn rotation_is_undone_by_its_inverse() {
        let (rope, start) = (rope(), (0..32).map(|x| x as f32).collect::<Vec<_>>());
        let mut x = start.clone();
        rotate(&mut x, 4, &rope, 1.0);
        // Position 1, pair (0, 2) with frequency 1: (4, 6) turned by one radian.
        let expected = 4.0 * 1f32.cos() - 6.0 * 1f32.sin();
        assert!((x[4] - expected).abs() < 1e-5);
        rotate(&mut x, 4, &rope, -1.0);
        assert!(x.iter().zip(&start).all(|(a, b)| (a - b).abs() < 1e-4));
    }
}
