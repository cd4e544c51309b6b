//! The second plane of promoted key channels.

use super::{PackedKeys, code_at, put_code, words_for};
use crate::{
    Bits, Error, Format, Promotion, Result, expect_len,
    quantizer::{GroupParams, promote, range},
};

/// The promoted channels of [`PackedKeys`] at 2 bits: which they are, and the lower half of their
/// 4-bit codes.
///
/// The code of a promoted element is `4·hi + lo`: `hi` lies in [`PackedKeys::codes`], `lo` here. The
/// scale in [`PackedKeys::scales`] is that of `hi`, four times the step of the 4-bit code. A reader
/// that ignores this plane so reads a 2-bit approximation; `lo · scale/4` is what it lacks.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct PromotedKeys {
    /// Promoted channels of a group, the same in every group.
    pub count: usize,
    /// `[kv_heads, tokens / G, ⌈head_dim / 32⌉]`: channel `d` is promoted if bit `d mod 32` of word
    /// `d/32` is set. `count` bits are set in each mask, none at or above `head_dim`.
    pub mask: Vec<u32>,
    /// `lo`, packed along tokens like the codes: `[kv_heads, tokens · 2 / 32, count]`, the promoted
    /// channels of the token's group in ascending order.
    pub lo: Vec<u32>,
}

impl PromotedKeys {
    /// What a cache of zeros has: the first channels are promoted, all codes are 0.
    pub(super) fn zeroed(
        promotion: Promotion,
        groups: usize,
        [kv_heads, tokens, head_dim]: [usize; 3],
    ) -> Self {
        let count = promotion.count(head_dim);
        let mask = promote(&vec![0.0; head_dim], count).repeat(kv_heads * groups);
        Self { count, mask, lo: vec![0; kv_heads * words_for(Bits::Two, tokens) * count] }
    }

    /// Checks that this belongs to the promotion and to `keys`, whose own shape has been checked.
    pub(crate) fn check(
        &self,
        operation: &'static str,
        promotion: Promotion,
        keys: &PackedKeys,
    ) -> Result<()> {
        let count = promotion.count(keys.head_dim);
        if self.count != count {
            let reason = format!("{} promoted key channels, not {count}", self.count);
            return Err(Error::request(operation, reason));
        }
        let (groups, words) = (keys.tokens / keys.group_size, Promotion::mask_words(keys.head_dim));
        expect_len(operation, "key mask", self.mask.len(), keys.kv_heads * groups * words)?;
        let lo = keys.kv_heads * words_for(Bits::Two, keys.tokens) * count;
        expect_len(operation, "promoted key codes", self.lo.len(), lo)?;
        for mask in self.mask.chunks_exact(words) {
            let set: usize = mask.iter().map(|word| word.count_ones() as usize).sum();
            let beyond = (keys.head_dim..32 * words).any(|channel| is_set(mask, channel));
            if set != count || beyond {
                let reason = format!(
                    "a key mask does not have {count} bits, all below channel {}",
                    keys.head_dim
                );
                return Err(Error::request(operation, reason));
            }
        }
        Ok(())
    }
}

fn is_set(mask: &[u32], channel: usize) -> bool {
    mask[channel / 32] >> (channel % 32) & 1 == 1
}

/// The place of a channel among the promoted ones of a group.
fn rank(mask: &[u32], channel: usize) -> Option<usize> {
    let (word, bit) = (channel / 32, channel % 32);
    let in_word = mask[word] & ((1 << bit) - 1);
    let below = mask[..word].iter().chain([&in_word]).map(|word| word.count_ones() as usize).sum();
    is_set(mask, channel).then_some(below)
}

impl PackedKeys {
    /// Keys of zero in a format; `None` for an uncompressed one.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when `tokens` is not a multiple of `group_size`,
    /// [`Error::InvalidConfig`] when the format is not one for keys.
    pub fn zeroed_for(
        format: Format,
        group_size: usize,
        shape: [usize; 3],
    ) -> Result<Option<Self>> {
        format.check_keys()?;
        let Some(bits) = format.bits else { return Ok(None) };
        Self::shaped(bits, format.promoted, group_size, shape).map(Some)
    }

    /// Quantizes `keys`, `[kv_heads, tokens, head_dim]`, already rounded to the store type, with the
    /// given share of every group's channels at 4 bits and the others at 2.
    ///
    /// # Errors
    /// When `tokens` is not a multiple of `group_size` or `keys` does not have the shape.
    pub fn quantize_promoted(
        promotion: Promotion,
        group_size: usize,
        shape: [usize; 3],
        keys: &[f32],
    ) -> Result<Self> {
        Self::quantized(Bits::Two, Some(promotion), group_size, shape, keys)
    }

    /// Quantizes group `group` of one kv head: `at(i, channel)` is its token `i`, below `G`.
    pub fn quantize_group(&mut self, head: usize, group: usize, at: impl Fn(usize, usize) -> f32) {
        let (bits, g, at) = (self.bits, self.group_size, &at);
        let elements = |channel| (0..g).map(move |i| at(i, channel));
        if let Some(promoted) = &self.promoted {
            let ranges: Vec<f32> = (0..self.head_dim).map(|d| range(elements(d))).collect();
            let mask = promote(&ranges, promoted.count);
            self.set_mask(head, group, &mask);
        }
        for channel in 0..self.head_dim {
            let promoted = self.is_promoted(head, group, channel);
            let params = match promoted {
                true => GroupParams::of_promoted(elements(channel)),
                false => GroupParams::of(bits, elements(channel)),
            };
            self.set_params(head, group, channel, params);
            for (i, x) in elements(channel).enumerate() {
                let token = group * g + i;
                if promoted {
                    let code = params.promoted_code(x);
                    self.set_code(head, token, channel, code / 4);
                    self.set_lo_code(head, token, channel, code % 4);
                } else {
                    self.set_code(head, token, channel, params.code(bits, x));
                }
            }
        }
    }

    /// Copies group `from_group` of `from`, in every kv head, to group `group`.
    ///
    /// # Panics
    /// If a group does not exist, or width, `G`, heads, `head_dim` or promoted channels differ.
    pub fn copy_group(&mut self, group: usize, from: &Self, from_group: usize) {
        let shape = |keys: &Self| {
            let count = keys.promoted.as_ref().map(|promoted| promoted.count);
            (keys.bits, keys.group_size, keys.kv_heads, keys.head_dim, count)
        };
        assert_eq!(shape(self), shape(from), "keys of different shapes");
        for head in 0..self.kv_heads {
            if let Some(mask) = from.mask(head, from_group) {
                self.set_mask(head, group, mask);
            }
            for channel in 0..self.head_dim {
                self.set_params(head, group, channel, from.params(head, from_group, channel));
                for i in 0..self.group_size {
                    let (token, from_token) =
                        (group * self.group_size + i, from_group * self.group_size + i);
                    self.set_code(head, token, channel, from.code(head, from_token, channel));
                    if let Some(lo) = from.lo_code(head, from_token, channel) {
                        self.set_lo_code(head, token, channel, lo);
                    }
                }
            }
        }
    }

    /// The channel mask of a group, `[⌈head_dim / 32⌉]`; `None` without promoted channels.
    pub fn mask(&self, head: usize, group: usize) -> Option<&[u32]> {
        let words = Promotion::mask_words(self.head_dim);
        let start = (head * (self.tokens / self.group_size) + group) * words;
        self.promoted.as_ref().map(|promoted| &promoted.mask[start..start + words])
    }

    fn set_mask(&mut self, head: usize, group: usize, mask: &[u32]) {
        let start = (head * (self.tokens / self.group_size) + group) * mask.len();
        if let Some(promoted) = &mut self.promoted {
            promoted.mask[start..start + mask.len()].copy_from_slice(mask);
        }
    }

    /// Whether a channel of a group is promoted.
    pub fn is_promoted(&self, head: usize, group: usize, channel: usize) -> bool {
        self.mask(head, group).is_some_and(|mask| is_set(mask, channel))
    }

    /// The lower half of the code of an element of a promoted channel; `None` for others.
    pub fn lo_code(&self, head: usize, token: usize, channel: usize) -> Option<u32> {
        let index = self.lo_index(head, token, channel)?;
        let word = self.promoted.as_ref()?.lo[index];
        Some(code_at(Bits::Two, &[word], token % Bits::Two.codes_per_word()))
    }

    /// The code `4·hi + lo` of an element of a promoted channel; `None` for others.
    pub fn promoted_code(&self, head: usize, token: usize, channel: usize) -> Option<u32> {
        Some(4 * self.code(head, token, channel) + self.lo_code(head, token, channel)?)
    }

    fn set_lo_code(&mut self, head: usize, token: usize, channel: usize, code: u32) {
        let index = self.lo_index(head, token, channel);
        if let (Some(index), Some(promoted)) = (index, &mut self.promoted) {
            put_code(Bits::Two, &mut promoted.lo[index], token, code);
        }
    }

    fn lo_index(&self, head: usize, token: usize, channel: usize) -> Option<usize> {
        let (promoted, mask) = (self.promoted.as_ref()?, self.mask(head, token / self.group_size)?);
        let row = head * words_for(Bits::Two, self.tokens) + token / Bits::Two.codes_per_word();
        Some(row * promoted.count + rank(mask, channel)?)
    }
}
