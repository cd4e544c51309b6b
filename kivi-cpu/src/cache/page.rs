//! One page of one layer.

use super::{Floats, Geometry, Promoted};
use half::f16;
use kivi_core::{Bits, Format, KeyValue, LayerSpec, memory::MeasuredBytes};

/// `page_tokens` consecutive tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    /// The second plane of the keys, if channels of them are promoted.
    pub(crate) promoted: Option<Promoted>,
    /// Tokens that hold something.
    pub(crate) filled: KeyValue<usize>,
}

/// The keys or the values of a page.
#[derive(Clone, Debug)]
pub(crate) enum Tensor {
    /// An uncompressed format: keys `[kv_heads, page_tokens / G, head_dim, G]`, values
    /// `[kv_heads, page_tokens, head_dim]`.
    Full(Floats),
    /// Keys `[kv_heads, page_tokens / G]` groups of codes as in [`KeyOrder`](super::KeyOrder), scales and zeros
    /// `[kv_heads, page_tokens / G, head_dim]`. Values `[kv_heads]` codes as in [`ValueOrder`](super::ValueOrder),
    /// scales and zeros `[kv_heads, ⌈head_dim / G⌉, page_tokens]`.
    Packed { codes: Box<[u32]>, scales: Box<[f16]>, zeros: Box<[f16]> },
}

impl Default for Tensor {
    fn default() -> Self {
        Self::Packed { codes: Box::default(), scales: Box::default(), zeros: Box::default() }
    }
}

impl Page {
    pub(super) fn new(spec: &LayerSpec, geometry: &Geometry) -> Self {
        let Geometry { kv_heads, head_dim, group, page_tokens, .. } = *geometry;
        let tensor =
            |format: Format, words: &dyn Fn(Bits) -> usize, params: usize| match format.bits {
                None => Tensor::Full(Floats::zeroed(format.store, page_tokens * geometry.width())),
                Some(bits) => Tensor::Packed {
                    codes: vec![0; kv_heads * words(bits)].into(),
                    scales: vec![f16::ZERO; kv_heads * params].into(),
                    zeros: vec![f16::ZERO; kv_heads * params].into(),
                },
            };
        Self {
            keys: tensor(
                spec.format.keys,
                &|bits| page_tokens / group * geometry.key_order(bits).words(),
                page_tokens / group * head_dim,
            ),
            values: tensor(
                spec.format.values,
                &|bits| geometry.value_order(bits).words(page_tokens),
                page_tokens * head_dim.div_ceil(group),
            ),
            promoted: spec.promoted_channels().map(|count| Promoted::new(count, geometry)),
            filled: KeyValue::default(),
        }
    }

    pub(super) fn measure(&self, geometry: &Geometry, total: &mut MeasuredBytes) {
        let tensors = [(&self.keys, self.filled.keys), (&self.values, self.filled.values)];
        for (tensor, filled) in tensors {
            // Every part of a page grows in proportion to the tokens in it.
            let share = |bytes: usize| bytes / geometry.page_tokens * filled;
            match tensor {
                Tensor::Full(floats) => {
                    total.allocated += floats.bytes();
                    total.full_precision += share(floats.bytes());
                }
                Tensor::Packed { codes, scales, zeros } => {
                    let codes = size_of_val::<[u32]>(codes);
                    let params = size_of_val::<[f16]>(scales) + size_of_val::<[f16]>(zeros);
                    total.allocated += codes + params;
                    total.codes += codes * filled / geometry.page_tokens;
                    total.scales_and_zeros += params * filled / geometry.page_tokens;
                }
            }
        }
        if let Some(Promoted { masks, lo, .. }) = &self.promoted {
            let [masks, lo] = [size_of_val::<[u32]>(masks), size_of_val::<[u32]>(lo)];
            total.allocated += masks + lo;
            total.channel_masks += masks * self.filled.keys / geometry.page_tokens;
            total.codes += lo * self.filled.keys / geometry.page_tokens;
        }
    }
}
