//! One layer of one sequence in canonical form.

use crate::{
    Error, KeyValue, LayerSpec, PackedKeys, PackedValues, PoolSpec, Result, SequenceLayout,
    expect_len, words_for,
};

/// Full-precision tokens of one layer in canonical form.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FullTokens {
    /// Position of the first token.
    pub first: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// `[kv_heads, tokens, head_dim]`.
    pub data: Vec<f32>,
}

/// One layer of one sequence in canonical form, the same on every backend.
#[derive(Clone, Debug, PartialEq)]
pub struct CanonicalLayer {
    /// The first `min(tokens, S)` tokens.
    pub sinks: KeyValue<FullTokens>,
    /// Quantized keys from position `S` on; `None` for an uncompressed format.
    pub packed_keys: Option<PackedKeys>,
    /// Quantized values from position `S` on; `None` for an uncompressed format.
    pub packed_values: Option<PackedValues>,
    /// The residual of a quantized format; all tokens after the sinks of an uncompressed one.
    pub full: KeyValue<FullTokens>,
}

impl CanonicalLayer {
    /// Bytes of the arrays.
    pub(crate) fn host_bytes(&self) -> usize {
        let keys = self.packed_keys.as_ref().map_or(0, |keys| {
            let promoted = keys.promoted.as_ref();
            let second = promoted.map_or(0, |plane| plane.mask.len() + plane.lo.len());
            4 * (keys.codes.len() + second) + 2 * (keys.scales.len() + keys.zeros.len())
        });
        let values = self.packed_values.as_ref().map_or(0, |values| {
            4 * values.codes.len() + 2 * (values.scales.len() + values.zeros.len())
        });
        let full = [&self.sinks.keys, &self.sinks.values, &self.full.keys, &self.full.values];
        keys + values + full.iter().map(|tokens| 4 * tokens.data.len()).sum::<usize>()
    }

    /// Checks that the contents have exactly the shape of a layout in a layer of a pool; every
    /// backend's import does so before it changes anything.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] or [`Error::InvalidShape`] that name the part that does not fit.
    pub fn check(&self, pool: &PoolSpec, layer: &LayerSpec, layout: &SequenceLayout) -> Result<()> {
        const OPERATION: &str = "import";
        layout.check(OPERATION, pool)?;
        let (sinks, group) = (pool.config().sink_length(), pool.config().group_size());
        let quantized = layout.packed.map(|end| end - sinks);
        let refuse = |what| Err(Error::request(OPERATION, format!("{what} do not fit the layer")));
        match (layer.format.keys.bits, &self.packed_keys) {
            (None, None) => {}
            (Some(bits), Some(keys)) => {
                let same = (keys.bits, keys.group_size, keys.kv_heads, keys.tokens, keys.head_dim)
                    == (bits, group, layer.kv_heads, quantized.keys, layer.head_dim);
                if !same {
                    return refuse("quantized keys");
                }
                let width = layer.kv_heads * layer.head_dim;
                let (codes, params) =
                    (words_for(bits, keys.tokens) * width, keys.tokens / group * width);
                expect_len(OPERATION, "key codes", keys.codes.len(), codes)?;
                expect_len(OPERATION, "key scales", keys.scales.len(), params)?;
                expect_len(OPERATION, "key zeros", keys.zeros.len(), params)?;
                match (layer.format.keys.promoted, &keys.promoted) {
                    (None, None) => {}
                    (Some(promotion), Some(plane)) => plane.check(OPERATION, promotion, keys)?,
                    _ => return refuse("promoted key channels"),
                }
            }
            _ => return refuse("quantized keys"),
        }
        match (layer.format.values.bits, &self.packed_values) {
            (None, None) => {}
            (Some(bits), Some(values)) => {
                let found = (values.bits, values.group_size, values.kv_heads);
                let same = found == (bits, group, layer.kv_heads)
                    && (values.tokens, values.head_dim) == (quantized.values, layer.head_dim);
                if !same {
                    return refuse("quantized values");
                }
                let rows = layer.kv_heads * values.tokens;
                let (codes, params) =
                    (rows * words_for(bits, layer.head_dim), rows * layer.head_dim.div_ceil(group));
                expect_len(OPERATION, "value codes", values.codes.len(), codes)?;
                expect_len(OPERATION, "value scales", values.scales.len(), params)?;
                expect_len(OPERATION, "value zeros", values.zeros.len(), params)?;
            }
            _ => return refuse("quantized values"),
        }
        let packs = layer.packs();
        let first = packs.zip(layout.kept).map(|(packs, kept)| if packs { kept } else { sinks });
        let in_sinks = layout.tokens.min(sinks);
        for (tokens, first, end) in [
            (&self.sinks.keys, 0, in_sinks),
            (&self.sinks.values, 0, in_sinks),
            (&self.full.keys, first.keys, layout.tokens.max(first.keys)),
            (&self.full.values, first.values, layout.tokens.max(first.values)),
        ] {
            if (tokens.first, tokens.tokens) != (first, end - first) {
                return refuse("full-precision tokens");
            }
            let width = layer.kv_heads * layer.head_dim;
            expect_len(OPERATION, "tokens", tokens.data.len(), tokens.tokens * width)?;
        }
        Ok(())
    }
}
