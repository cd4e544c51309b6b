//! One page of one layer.

use super::{Floats, Geometry, KeyGroup, KeyLayout, ValueGroup, ValueLayout, words::Words};
use kivi_core::{Bits, Format, KeyValue, LayerSpec, memory::MeasuredBytes};

/// `page_tokens` consecutive tokens.
#[derive(Clone, Debug, Default)]
pub(crate) struct Page {
    pub(crate) keys: Tensor,
    pub(crate) values: Tensor,
    /// Tokens that hold something.
    pub(crate) filled: KeyValue<usize>,
}

/// The keys or the values of a page.
#[derive(Clone, Debug)]
pub(crate) enum Tensor {
    /// An uncompressed format: keys `[kv_heads, page_tokens / G, head_dim, G]`, values
    /// `[kv_heads, page_tokens, head_dim]`.
    Full(Floats),
    /// `[kv_heads, page_tokens / G]` groups as in [`KeyLayout`] or [`ValueLayout`].
    Packed(Words),
}

impl Default for Tensor {
    fn default() -> Self {
        Self::Packed(Words::default())
    }
}

impl Page {
    pub(super) fn new(spec: &LayerSpec, geometry: &Geometry) -> Self {
        let Geometry { kv_heads, group, page_tokens, .. } = *geometry;
        let tensor = |format: Format, words: &dyn Fn(Bits) -> usize| match format.bits {
            None => Tensor::Full(Floats::zeroed(format.store, page_tokens * geometry.width())),
            Some(bits) => {
                Tensor::Packed(Words::zeroed(kv_heads * (page_tokens / group) * words(bits)))
            }
        };
        Self {
            keys: tensor(spec.format.keys, &|bits| geometry.key_layout(bits).words()),
            values: tensor(spec.format.values, &|bits| geometry.value_layout(bits).words()),
            filled: KeyValue::default(),
        }
    }

    /// The packed keys of a head that hold a token, the first of a group.
    #[inline(always)]
    pub(crate) fn key_group(
        &self,
        g: &Geometry,
        layout: KeyLayout,
        [head, token]: [usize; 2],
    ) -> Option<KeyGroup<'_>> {
        layout.group(g.group_row(head, token), self.keys.groups()?)
    }

    /// As [`key_group`](Self::key_group), of values.
    #[inline(always)]
    pub(crate) fn value_group(
        &self,
        g: &Geometry,
        layout: ValueLayout,
        [head, token]: [usize; 2],
    ) -> Option<ValueGroup<'_>> {
        layout.group(g.group_row(head, token), self.values.groups()?)
    }

    pub(super) fn measure(&self, spec: &LayerSpec, g: &Geometry, total: &mut MeasuredBytes) {
        for (tensor, filled) in [(&self.keys, self.filled.keys), (&self.values, self.filled.values)]
        {
            total.allocated += tensor.bytes();
            if let Tensor::Full(floats) = tensor {
                // Every part of a page grows in proportion to the tokens in it.
                total.full_precision += floats.bytes() / g.page_tokens * filled;
            }
        }
        let bytes =
            |words: usize, filled: usize| g.kv_heads * words * size_of::<u32>() * filled / g.group;
        if let Some(bits) = spec.format.keys.bits {
            let layout = g.key_layout(bits);
            let bytes = |words: usize| bytes(words, self.filled.keys);
            total.codes += bytes(layout.order.words()) + bytes(layout.lo_words());
            total.scales_and_zeros += bytes(layout.param_words());
            total.channel_masks += bytes(layout.mask_words());
        }
        if let Some(bits) = spec.format.values.bits {
            let layout = g.value_layout(bits);
            let bytes = |words: usize| bytes(words, self.filled.values);
            total.codes += bytes(layout.order.words(g.group));
            total.scales_and_zeros += bytes(layout.param_words());
        }
    }
}

impl Tensor {
    /// Of the buffer.
    fn bytes(&self) -> usize {
        match self {
            Self::Full(floats) => floats.bytes(),
            Self::Packed(words) => size_of_val::<[u32]>(words),
        }
    }

    /// The packed groups, `None` in full precision.
    #[inline(always)]
    pub(crate) fn groups(&self) -> Option<&[u32]> {
        match self {
            Self::Full(_) => None,
            Self::Packed(words) => Some(words),
        }
    }

    /// The same, to be written.
    pub(crate) fn groups_mut(&mut self) -> Option<&mut [u32]> {
        match self {
            Self::Full(_) => None,
            Self::Packed(words) => Some(words),
        }
    }
}
