//! The canonical packed form: what snapshots, golden files and parity tests hold.
//!
//! Codes lie in u32 words, element `j` of a word at bits `[b·j, b·j + b)`, first element lowest.
//! Keys are packed along tokens, values along channels, as in the authors' `quant/new_pack.py`; the
//! last word of a value row is filled up with zero bits. A backend may keep any physical order it
//! likes as long as it converts to and from this one without loss.

mod promoted;

pub use promoted::PromotedKeys;

use crate::{Bits, Error, Promotion, Result, expect_len, quantizer::GroupParams};
use half::f16;

/// Words that hold `elements` codes.
pub const fn words_for(bits: Bits, elements: usize) -> usize {
    elements.div_ceil(bits.codes_per_word())
}

/// The code of element `index` of a run of words.
///
/// # Panics
/// If the words end before it.
pub fn code_at(bits: Bits, words: &[u32], index: usize) -> u32 {
    let per_word = bits.codes_per_word();
    (words[index / per_word] >> (bits.get() * (index % per_word))) & bits.levels()
}

fn put_code(bits: Bits, word: &mut u32, index: usize, code: u32) {
    let shift = bits.get() * (index % bits.codes_per_word());
    *word = *word & !(bits.levels() << shift) | (code & bits.levels()) << shift;
}

/// Quantized keys of one layer: per channel, in groups of consecutive tokens.
///
/// Accessors of elements and groups panic when an index is out of range, as slices do.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PackedKeys {
    /// Width of a code.
    pub bits: Bits,
    /// `G`, in tokens.
    pub group_size: usize,
    /// Number of kv heads.
    pub kv_heads: usize,
    /// Number of tokens, a multiple of `G`.
    pub tokens: usize,
    /// Number of channels.
    pub head_dim: usize,
    /// `[kv_heads, tokens · b / 32, head_dim]`.
    pub codes: Vec<u32>,
    /// `[kv_heads, tokens / G, head_dim]`.
    pub scales: Vec<f16>,
    /// `[kv_heads, tokens / G, head_dim]`.
    pub zeros: Vec<f16>,
    /// The second plane of promoted channels, if the format has any. Codes, scales and zeros, and
    /// the accessors of these, are then those of the ordinary plane, `hi`;
    /// [`PackedKeys::dequantize`] reads both.
    pub promoted: Option<PromotedKeys>,
}

impl PackedKeys {
    /// Zero codes, scales and zeros of the given shape.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when `tokens` is not a multiple of `group_size`.
    pub fn zeroed(bits: Bits, group_size: usize, shape: [usize; 3]) -> Result<Self> {
        Self::shaped(bits, None, group_size, shape)
    }

    fn shaped(
        bits: Bits,
        promotion: Option<Promotion>,
        group_size: usize,
        [kv_heads, tokens, head_dim]: [usize; 3],
    ) -> Result<Self> {
        if group_size == 0 || !tokens.is_multiple_of(group_size) {
            let reason = format!("{tokens} tokens are not whole groups of {group_size}");
            return Err(Error::request("pack keys", reason));
        }
        let groups = tokens / group_size;
        let params = vec![f16::ZERO; kv_heads * groups * head_dim];
        let codes = vec![0; kv_heads * words_for(bits, tokens) * head_dim];
        let (scales, zeros) = (params.clone(), params);
        let promoted = promotion
            .map(|promotion| PromotedKeys::zeroed(promotion, groups, [kv_heads, tokens, head_dim]));
        Ok(Self { bits, group_size, kv_heads, tokens, head_dim, codes, scales, zeros, promoted })
    }

    /// Quantizes `keys`, `[kv_heads, tokens, head_dim]`, already rounded to the store type.
    ///
    /// # Errors
    /// When `tokens` is not a multiple of `group_size` or `keys` does not have the shape.
    pub fn quantize(
        bits: Bits,
        group_size: usize,
        shape: [usize; 3],
        keys: &[f32],
    ) -> Result<Self> {
        Self::quantized(bits, None, group_size, shape, keys)
    }

    fn quantized(
        bits: Bits,
        promotion: Option<Promotion>,
        group_size: usize,
        shape: [usize; 3],
        keys: &[f32],
    ) -> Result<Self> {
        let [kv_heads, tokens, head_dim] = shape;
        expect_len("pack keys", "keys", keys.len(), kv_heads * tokens * head_dim)?;
        let mut packed = Self::shaped(bits, promotion, group_size, shape)?;
        for head in 0..kv_heads {
            for group in 0..tokens / group_size {
                let first = head * tokens + group * group_size;
                packed.quantize_group(head, group, |i, channel| {
                    keys[(first + i) * head_dim + channel]
                });
            }
        }
        Ok(packed)
    }

    /// The code of one element; `hi` of one in a promoted channel.
    pub fn code(&self, head: usize, token: usize, channel: usize) -> u32 {
        let word = self.codes[self.word_index(head, token, channel)];
        code_at(self.bits, &[word], token % self.bits.codes_per_word())
    }

    /// Sets the code of one element; `hi` of one in a promoted channel.
    pub fn set_code(&mut self, head: usize, token: usize, channel: usize, code: u32) {
        let index = self.word_index(head, token, channel);
        put_code(self.bits, &mut self.codes[index], token, code);
    }

    /// Scale and zero of the group `token / G` of one channel, as stored.
    pub fn params(&self, head: usize, group: usize, channel: usize) -> GroupParams {
        let index = self.param_index(head, group, channel);
        GroupParams { scale: self.scales[index], zero: self.zeros[index] }
    }

    /// Sets scale and zero of a group.
    pub fn set_params(&mut self, head: usize, group: usize, channel: usize, params: GroupParams) {
        let index = self.param_index(head, group, channel);
        (self.scales[index], self.zeros[index]) = (params.scale, params.zero);
    }

    /// The reconstructed element, in f32.
    pub fn dequantize(&self, head: usize, token: usize, channel: usize) -> f32 {
        let params = self.params(head, token / self.group_size, channel);
        match self.promoted_code(head, token, channel) {
            Some(code) => params.dequantize_promoted(code),
            None => params.dequantize(self.code(head, token, channel)),
        }
    }

    fn word_index(&self, head: usize, token: usize, channel: usize) -> usize {
        let words = words_for(self.bits, self.tokens);
        (head * words + token / self.bits.codes_per_word()) * self.head_dim + channel
    }

    fn param_index(&self, head: usize, group: usize, channel: usize) -> usize {
        (head * (self.tokens / self.group_size) + group) * self.head_dim + channel
    }
}

/// Quantized values of one layer: per token, in groups of consecutive channels. Accessors panic when
/// an index is out of range.
///
/// If `G` does not divide `head_dim`, the last group of a token is short.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PackedValues {
    /// Width of a code.
    pub bits: Bits,
    /// `G`, in channels.
    pub group_size: usize,
    /// Number of kv heads.
    pub kv_heads: usize,
    /// Number of tokens.
    pub tokens: usize,
    /// Number of channels.
    pub head_dim: usize,
    /// `[kv_heads, tokens, ⌈head_dim · b / 32⌉]`.
    pub codes: Vec<u32>,
    /// `[kv_heads, tokens, ⌈head_dim / G⌉]`.
    pub scales: Vec<f16>,
    /// `[kv_heads, tokens, ⌈head_dim / G⌉]`.
    pub zeros: Vec<f16>,
}

impl PackedValues {
    /// Zero codes, scales and zeros of the given shape.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when `group_size` is 0.
    pub fn zeroed(
        bits: Bits,
        group_size: usize,
        [kv_heads, tokens, head_dim]: [usize; 3],
    ) -> Result<Self> {
        if group_size == 0 {
            return Err(Error::request("pack values", "group size 0"));
        }
        let params = vec![f16::ZERO; kv_heads * tokens * head_dim.div_ceil(group_size)];
        let codes = vec![0; kv_heads * tokens * words_for(bits, head_dim)];
        let (scales, zeros) = (params.clone(), params);
        Ok(Self { bits, group_size, kv_heads, tokens, head_dim, codes, scales, zeros })
    }

    /// Quantizes `values`, `[kv_heads, tokens, head_dim]`, already rounded to the store type.
    ///
    /// # Errors
    /// When `group_size` is 0 or `values` does not have the shape.
    pub fn quantize(
        bits: Bits,
        group_size: usize,
        shape: [usize; 3],
        values: &[f32],
    ) -> Result<Self> {
        let [kv_heads, tokens, head_dim] = shape;
        expect_len("pack values", "values", values.len(), kv_heads * tokens * head_dim)?;
        let mut packed = Self::zeroed(bits, group_size, shape)?;
        for head in 0..kv_heads {
            for token in 0..tokens {
                let start = (head * tokens + token) * head_dim;
                let row = &values[start..start + head_dim];
                for (group, members) in row.chunks(group_size).enumerate() {
                    let params = GroupParams::of(bits, members.iter().copied());
                    packed.set_params(head, token, group, params);
                    for (i, &x) in members.iter().enumerate() {
                        let channel = group * group_size + i;
                        packed.set_code(head, token, channel, params.code(bits, x));
                    }
                }
            }
        }
        Ok(packed)
    }

    /// The code of one element.
    pub fn code(&self, head: usize, token: usize, channel: usize) -> u32 {
        let words = words_for(self.bits, self.head_dim);
        let start = (head * self.tokens + token) * words;
        code_at(self.bits, &self.codes[start..start + words], channel)
    }

    /// Sets the code of one element.
    pub fn set_code(&mut self, head: usize, token: usize, channel: usize, code: u32) {
        let words = words_for(self.bits, self.head_dim);
        let word = channel / self.bits.codes_per_word();
        let index = (head * self.tokens + token) * words + word;
        put_code(self.bits, &mut self.codes[index], channel, code);
    }

    /// Scale and zero of the group `channel / G` of one token.
    pub fn params(&self, head: usize, token: usize, group: usize) -> GroupParams {
        let index = self.param_index(head, token, group);
        GroupParams { scale: self.scales[index], zero: self.zeros[index] }
    }

    /// Sets scale and zero of a group.
    pub fn set_params(&mut self, head: usize, token: usize, group: usize, params: GroupParams) {
        let index = self.param_index(head, token, group);
        (self.scales[index], self.zeros[index]) = (params.scale, params.zero);
    }

    /// The reconstructed element, in f32.
    pub fn dequantize(&self, head: usize, token: usize, channel: usize) -> f32 {
        let params = self.params(head, token, channel / self.group_size);
        params.dequantize(self.code(head, token, channel))
    }

    fn param_index(&self, head: usize, token: usize, group: usize) -> usize {
        (head * self.tokens + token) * self.head_dim.div_ceil(self.group_size) + group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_filled_lowest_bits_first() {
        // Sixteen tokens of one channel whose codes are 0, 1, 2, 3, 0, … with scale 1 and zero 0.
        let keys: Vec<f32> = (0..16).map(|t| (t % 4) as f32).collect();
        let packed = PackedKeys::quantize(Bits::Two, 16, [1, 16, 1], &keys).unwrap();
        assert_eq!(packed.codes, [0xE4E4_E4E4]);
        assert_eq!((packed.scales[0].to_f32(), packed.zeros[0].to_f32()), (1.0, 0.0));
        // The same along the channels of one token.
        let packed = PackedValues::quantize(Bits::Two, 16, [1, 1, 16], &keys).unwrap();
        assert_eq!(packed.codes, [0xE4E4_E4E4]);
    }

    #[test]
    fn keys_are_packed_along_tokens_and_values_along_channels() {
        // Two channels, 32 tokens at 4 bits: channel 0 counts up, channel 1 is constant.
        let keys: Vec<f32> = (0..32).flat_map(|t| [(t % 16) as f32, 7.0]).collect();
        let packed = PackedKeys::quantize(Bits::Four, 32, [1, 32, 2], &keys).unwrap();
        assert_eq!(packed.codes, [0x7654_3210, 0, 0xFEDC_BA98, 0, 0x7654_3210, 0, 0xFEDC_BA98, 0]);
        assert_eq!(packed.dequantize(0, 21, 0), 5.0);
        assert_eq!(packed.dequantize(0, 21, 1), 7.0);
    }

    #[test]
    fn last_value_group_may_be_short() {
        // 80 channels in groups of 32: 32 + 32 + 16.
        let values: Vec<f32> = (0..80).map(|c| if c < 64 { 1.0 } else { c as f32 }).collect();
        let packed = PackedValues::quantize(Bits::Eight, 32, [1, 1, 80], &values).unwrap();
        assert_eq!((packed.scales.len(), packed.codes.len()), (3, 20));
        assert_eq!(packed.params(0, 0, 2).zero.to_f32(), 64.0);
        assert_eq!(packed.dequantize(0, 0, 5), 1.0);
    }

    #[test]
    fn keys_need_whole_groups() {
        assert!(PackedKeys::quantize(Bits::Two, 32, [1, 33, 1], &[0.0; 33]).is_err());
        assert!(PackedKeys::quantize(Bits::Two, 32, [1, 32, 1], &[0.0; 31]).is_err());
    }
}
