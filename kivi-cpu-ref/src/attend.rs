//! Attention, equation by equation.

use crate::{Cache, CpuRef, Matrix};
use kivi_core::{Attention, Result, SequencePlan};

impl CpuRef {
    /// One row: `softmax(logits) · V`, head by head.
    pub(crate) fn attend_row(
        self,
        cache: &Cache,
        layer: usize,
        sequence: &SequencePlan,
        attention: &Attention,
        row: usize,
        queries: &Matrix,
    ) -> Result<Vec<f32>> {
        let spec = &cache.layers[layer].spec;
        let layout = &sequence.before;
        let head_dim = spec.head_dim;
        let query_position = layout.tokens + row;
        let view = sequence.views[row];

        let visible: Vec<usize> = (0..=query_position)
            .filter(|&token| spec.sees(query_position, token))
            .filter(|&token| cache.is_present(layer, layout, token))
            .collect();
        let mut keys = Vec::with_capacity(visible.len());
        let mut values = Vec::with_capacity(visible.len());
        for &token in &visible {
            keys.push(cache.key(layer, layout, token, view.keys)?);
            values.push(cache.value(layer, layout, token, view.values)?);
        }

        let mut output = vec![0.0; attention.query_heads * head_dim];
        for head in 0..attention.query_heads {
            let kv_head = head / attention.head_group(spec);
            let channels = kv_head * head_dim..(kv_head + 1) * head_dim;
            let query = &queries.row(sequence.rows.start + row)[head * head_dim..][..head_dim];

            // A_j = q · k_j, scaled, capped and biased.
            let mut weights: Vec<f32> = Vec::with_capacity(visible.len());
            for (&token, key) in visible.iter().zip(&keys) {
                let product = |x: &[f32]| query.iter().zip(x).map(|(q, x)| q * x).sum::<f32>();
                let mut dot = product(&key[channels.clone()]);
                if let Some(bias) = &attention.key_bias {
                    dot += product(&bias.rotated(kv_head, token));
                }
                weights.push(attention.logit(head, query_position, token, dot));
            }
            // Softmax, shifted by the largest logit; a learned sink only adds to the denominator.
            let sink = attention.sink_logits.as_ref().map(|sinks| sinks[head]);
            let largest = weights.iter().copied().chain(sink).fold(f32::NEG_INFINITY, f32::max);
            let mut denominator = sink.map_or(0.0, |sink| (sink - largest).exp());
            for weight in &mut weights {
                *weight = (*weight - largest).exp();
                denominator += *weight;
            }
            // o = Σ_j softmax_j · v_j.
            let out = &mut output[head * head_dim..(head + 1) * head_dim];
            for (weight, value) in weights.iter().zip(&values) {
                for (o, v) in out.iter_mut().zip(&value[channels.clone()]) {
                    *o += weight / denominator * v;
                }
            }
        }
        Ok(output)
    }
}
