//! Attention in f64, straight from the definition, over a layer in canonical form.

use kivi::{CanonicalLayer, FullTokens, KeyValue};

/// One head of a layer as one query sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub(super) layer: &'a CanonicalLayer,
    /// The kv head.
    pub(super) head: usize,
    pub(super) head_dim: usize,
    /// Position of the query: it sees the tokens `0 ..= position`.
    pub(super) position: usize,
    /// First position it sees in full precision.
    pub(super) full_from: KeyValue<usize>,
}

impl View<'_> {
    fn key(&self, token: usize, out: &mut [f64]) {
        let sinks = self.layer.sinks.keys.tokens;
        match &self.layer.packed_keys {
            Some(keys) if (sinks..self.full_from.keys).contains(&token) => {
                for (channel, x) in out.iter_mut().enumerate() {
                    *x = keys.dequantize(self.head, token - sinks, channel).into();
                }
            }
            _ => self.full(token, [&self.layer.sinks.keys, &self.layer.full.keys], out),
        }
    }

    fn value(&self, token: usize, out: &mut [f64]) {
        let sinks = self.layer.sinks.values.tokens;
        match &self.layer.packed_values {
            Some(values) if (sinks..self.full_from.values).contains(&token) => {
                for (channel, x) in out.iter_mut().enumerate() {
                    *x = values.dequantize(self.head, token - sinks, channel).into();
                }
            }
            _ => self.full(token, [&self.layer.sinks.values, &self.layer.full.values], out),
        }
    }

    fn full(&self, token: usize, [sinks, rest]: [&FullTokens; 2], out: &mut [f64]) {
        let from = if token < sinks.tokens { sinks } else { rest };
        let start = (self.head * from.tokens + token - from.first) * self.head_dim;
        for (x, &stored) in out.iter_mut().zip(&from.data[start..start + self.head_dim]) {
            *x = stored.into();
        }
    }

    /// `softmax(scale · q·Kᵀ) · V` of some query heads, `[heads, head_dim]`.
    ///
    /// # Panics
    /// If the layer does not hold what the query sees.
    pub(super) fn attention(&self, scale: f64, queries: &[f32]) -> Vec<f64> {
        let tokens = self.position + 1;
        let mut row = vec![0.0; self.head_dim];
        // `[heads, tokens]`
        let heads = queries.len() / self.head_dim;
        let mut weights = vec![0.0; heads * tokens];
        for token in 0..tokens {
            self.key(token, &mut row);
            for (head, query) in queries.chunks_exact(self.head_dim).enumerate() {
                let dot: f64 = query.iter().zip(&row).map(|(&q, k)| f64::from(q) * k).sum();
                weights[head * tokens + token] = scale * dot;
            }
        }
        for weights in weights.chunks_exact_mut(tokens) {
            let largest = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            for weight in weights.iter_mut() {
                *weight = (*weight - largest).exp();
            }
            let sum: f64 = weights.iter().sum();
            for weight in weights {
                *weight /= sum;
            }
        }
        let mut out = vec![0.0; queries.len()];
        for token in 0..tokens {
            self.value(token, &mut row);
            for (head, out) in out.chunks_exact_mut(self.head_dim).enumerate() {
                let weight = weights[head * tokens + token];
                for (o, v) in out.iter_mut().zip(&row) {
                    *o += weight * v;
                }
            }
        }
        out
    }
}

/// `‖found − exact‖₂ / ‖exact‖₂`
pub(super) fn relative_error(found: &[f32], exact: &[f64]) -> f64 {
    let difference = found.iter().zip(exact).map(|(&a, b)| (f64::from(a) - b).powi(2));
    let norm: f64 = exact.iter().map(|x| x * x).sum();
    (difference.sum::<f64>() / norm).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;
    use kivi::{Bits, PackedKeys, PackedValues, quantizer::GroupParams};

    fn full(first: usize, head_dim: usize, data: &[f32]) -> FullTokens {
        FullTokens { first, tokens: data.len() / head_dim, data: data.to_vec() }
    }

    fn close(found: &[f64], exact: &[f64]) {
        assert_eq!(found.len(), exact.len());
        for (a, b) in found.iter().zip(exact) {
            assert!((a - b).abs() < 1e-12, "{found:?} {exact:?}");
        }
    }

    /// Keys that are unit vectors, so that the logits are the query's elements.
    #[test]
    fn one_hot_keys_pick_the_elements_of_the_query() {
        let layer = CanonicalLayer {
            sinks: KeyValue::both(FullTokens::default()),
            packed_keys: None,
            packed_values: None,
            full: KeyValue::new(
                full(0, 2, &[1.0, 0.0, 0.0, 1.0, 9.0, 9.0]),
                full(0, 2, &[1.0, 2.0, 5.0, 6.0, 9.0, 9.0]),
            ),
        };
        let full_from = KeyValue::both(0);
        let view = View { layer: &layer, head: 0, head_dim: 2, position: 1, full_from };
        // Logits 2·(ln 3 / 2, 0): weights ¾ and ¼. The second head's are equal: ½ and ½. The third
        // token lies in the future.
        let queries = [3f32.ln() / 2.0, 0.0, 0.0, 0.0];
        let found = view.attention(2.0, &queries);
        let p = f64::from(3f32.ln()).exp() / (f64::from(3f32.ln()).exp() + 1.0);
        assert!((p - 0.75).abs() < 1e-7);
        close(&found[..2], &[p + 5.0 * (1.0 - p), 2.0 * p + 6.0 * (1.0 - p)]);
        close(&found[2..], &[3.0, 4.0]);
    }

    /// A sink, 16 packed tokens and two in full precision; values are packed up to one token less.
    #[test]
    fn tokens_are_read_where_the_view_says() {
        let params =
            |scale, zero| GroupParams { scale: f16::from_f32(scale), zero: f16::from_f32(zero) };
        // Second head of two. Keys are all 0, so every weight is 1/19.
        let mut keys = PackedKeys::zeroed(Bits::Two, 16, [2, 16, 1]).unwrap();
        keys.set_params(0, 0, 0, params(1.0, 77.0));
        let mut values = PackedValues::zeroed(Bits::Two, 16, [2, 16, 1]).unwrap();
        for token in 0..16 {
            // 2·code + 10 with code 3 for the last token, which the view does not see as a code.
            values.set_params(1, token, 0, params(2.0, 10.0));
            values.set_code(1, token, 0, if token == 15 { 3 } else { 1 });
        }
        let layer = CanonicalLayer {
            sinks: KeyValue::new(full(0, 1, &[77.0, 0.0]), full(0, 1, &[77.0, 100.0])),
            packed_keys: Some(keys),
            packed_values: Some(values),
            full: KeyValue::new(
                full(17, 1, &[77.0, 77.0, 0.0, 0.0]),
                full(16, 1, &[77.0, 77.0, 77.0, 20.0, 30.0, 40.0]),
            ),
        };
        // `tokens` counts those of one head.
        let mut layer = layer;
        for tokens in [
            &mut layer.sinks.keys,
            &mut layer.sinks.values,
            &mut layer.full.keys,
            &mut layer.full.values,
        ] {
            tokens.tokens /= 2;
        }
        let full_from = KeyValue::new(17, 16);
        let view = View { layer: &layer, head: 1, head_dim: 1, position: 18, full_from };
        let sum = 100.0 + 15.0 * 12.0 + 20.0 + 30.0 + 40.0;
        close(&view.attention(1.0, &[5.0]), &[sum / 19.0]);
    }

    #[test]
    fn error_is_relative_to_the_exact_vector() {
        assert_eq!(relative_error(&[3.0, 4.5], &[3.0, 4.0]), 0.1);
        assert!(relative_error(&[f32::NAN], &[1.0]).is_nan());
    }
}
