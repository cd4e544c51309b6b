//! Sizes and places, host arithmetic that the device code takes as constants.

/// How codes are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Routine {
    /// Matrix units: 8 query rows for the price of one.
    Matrix,
    /// Pairs of halves, chains of 8 products in f16: 1 or 2 query rows; registers spill with more. Such
    /// a chain is too coarse for 8-bit codes.
    Plane,
}

/// What a compiled kernel is made for.
///
/// A page holds, in words of 32 bits and in this order: key codes `[kv_heads][page groups]
/// [head_dim / P][group_size]`, `P = 32 / key_bits`; key parameters `[kv_heads][page groups]
/// [head_dim]`; value codes `[kv_heads][page_tokens / P][head_dim]`, `P = 32 / value_bits`; value
/// parameters `[kv_heads][page_tokens][⌈head_dim / group_size⌉]`. Parameters are the f16 scale in
/// the low half and the f16 zero in the high one. Code `2j + h` of a word lies at bit
/// `16·h + bits·j`; a word of keys is P channels of one token, one of values P tokens of one
/// channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SplitConfig {
    /// How codes are multiplied.
    pub routine: Routine,
    /// Query rows: 8 with [`Routine::Matrix`], 1 or 2 with [`Routine::Plane`].
    pub rows: usize,
    /// 2, 4 or 8.
    pub key_bits: usize,
    /// 2, 4 or 8.
    pub value_bits: usize,
    /// 32, 64 or 128.
    pub group_size: usize,
    /// A multiple of 16, at most 256; with [`Routine::Plane`] 64, 128 or 256.
    pub head_dim: usize,
    /// Kv heads of the layer.
    pub kv_heads: usize,
    /// A multiple of `group_size`.
    pub page_tokens: usize,
    /// Tokens of a cube: 256 or 512, a multiple of `page_tokens`.
    pub split_tokens: usize,
    /// Whether logits are capped.
    pub soft_cap: bool,
}

impl SplitConfig {
    /// Why this cannot be compiled, if it cannot.
    pub fn refusal(&self) -> Option<&'static str> {
        let plane = self.routine == Routine::Plane;
        let bits = |bits| matches!(bits, 2 | 4) || bits == 8 && !plane;
        if if plane { !matches!(self.rows, 1 | 2) } else { self.rows != 8 } {
            Some("8 query rows on matrix units, 1 or 2 without")
        } else if plane && !matches!(self.head_dim, 64 | 128 | 256) {
            Some("a head_dim of 64, 128 or 256 without matrix units")
        } else if !bits(self.key_bits) || !bits(self.value_bits) {
            Some("codes of 2 or 4 bits, or 8 on matrix units")
        } else if !matches!(self.group_size, 32 | 64 | 128) {
            Some("groups of 32, 64 or 128")
        } else if self.head_dim == 0 || !self.head_dim.is_multiple_of(16) || self.head_dim > 256 {
            Some("a head_dim that is a multiple of 16, at most 256")
        } else if self.page_tokens == 0
            || !self.page_tokens.is_multiple_of(self.group_size)
            || !self.split_tokens.is_multiple_of(self.page_tokens)
        {
            Some("pages of whole groups and splits of whole pages")
        } else if !matches!(self.split_tokens, 256 | 512) {
            Some("splits of 256 or 512 tokens")
        } else {
            None
        }
    }

    /// Warps of a cube: one per 32 channels.
    pub fn warps(&self) -> usize {
        self.head_dim.div_ceil(32)
    }

    pub(super) fn split_pages(&self) -> usize {
        self.split_tokens / self.page_tokens
    }

    pub(super) fn split_groups(&self) -> usize {
        self.split_tokens / self.group_size
    }

    pub(super) fn page_groups(&self) -> usize {
        self.page_tokens / self.group_size
    }

    /// Groups of channels that share a scale of a token's value.
    pub(super) fn value_groups(&self) -> usize {
        self.head_dim.div_ceil(self.group_size)
    }

    /// Channels of a word of keys.
    pub(super) fn key_word(&self) -> usize {
        32 / self.key_bits
    }

    /// Tokens of a word of values.
    pub(super) fn value_word(&self) -> usize {
        32 / self.value_bits
    }

    pub(super) fn chunks(&self) -> usize {
        self.head_dim / self.key_word()
    }

    /// Chunks of a lane: every fourth.
    pub(super) fn lane_chunks(&self) -> usize {
        self.chunks().div_ceil(4)
    }

    /// Pairs of channels of a lane.
    pub(super) fn key_pairs(&self) -> usize {
        self.lane_chunks() * self.key_word() / 2
    }

    /// Words of one head's codes of one group of keys.
    pub(super) fn key_group_words(&self) -> usize {
        self.chunks() * self.group_size
    }

    /// Where the key parameters of a page begin.
    pub(super) fn key_parameters_at(&self) -> usize {
        self.kv_heads * self.page_groups() * self.key_group_words()
    }

    /// Where the value codes of a page begin.
    pub(super) fn value_codes_at(&self) -> usize {
        self.key_parameters_at() + self.kv_heads * self.page_groups() * self.head_dim
    }

    /// Where the value parameters of a page begin.
    pub(super) fn value_parameters_at(&self) -> usize {
        self.value_codes_at() + self.kv_heads * self.page_rows() * self.head_dim
    }

    /// Words of a page.
    pub fn page_words(&self) -> usize {
        self.value_parameters_at() + self.kv_heads * self.page_tokens * self.value_groups()
    }

    /// Rows of words of values in a page.
    pub(super) fn page_rows(&self) -> usize {
        self.page_tokens / self.value_word()
    }

    /// Groups that a warp takes at once: two, so that twice the loads are in flight, if all warps
    /// then end at the end of the split; registers of two query rows without matrix units would
    /// spill.
    pub(super) fn groups_at_once(&self) -> usize {
        let registers = self.routine == Routine::Matrix || self.rows == 1;
        if registers && self.split_groups().is_multiple_of(2 * self.warps()) { 2 } else { 1 }
    }

    /// 128-bit words from one row of channels to the next in shared memory. This and the strides
    /// below are powers of two, from 8 on, so that constant parts of an index meet no carry and
    /// become offsets of instructions. Where lanes read different rows, row `r` holds word `i` at
    /// `i ^ (r mod 8)`: they then meet different banks.
    pub(super) fn channel_stride(&self) -> usize {
        (self.head_dim / 8).next_power_of_two().max(8)
    }

    /// From one row of tokens to the next: pairs.
    pub(super) fn token_stride(&self) -> usize {
        self.split_tokens / 8
    }

    /// From one row of logits, or of the weights in their place, to the next.
    pub(super) fn logit_stride(&self) -> usize {
        self.split_tokens / 4
    }

    /// 128-bit words of shared memory for scales or zeros of a split, keys' or values'; of folded
    /// operands with [`Routine::Plane`].
    pub(super) fn parameter_words(&self) -> usize {
        let keys = self.split_groups() * self.channel_stride();
        let one = keys.max(self.value_groups() * self.token_stride());
        if self.routine == Routine::Plane { one * self.rows } else { one }
    }

    /// Runs of 8 channels' key parameters of a split per unit.
    pub(super) fn key_items(&self) -> usize {
        (self.split_groups() * self.head_dim / 8).div_ceil(32 * self.warps())
    }

    /// Runs of 8 tokens' value parameters of a split per unit.
    pub(super) fn value_items(&self) -> usize {
        (self.split_tokens / 8 * self.value_groups()).div_ceil(32 * self.warps())
    }

    /// Rounds in which the warps go through the query rows.
    pub(super) fn row_rounds(&self) -> usize {
        self.rows.div_ceil(self.warps())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: SplitConfig = SplitConfig {
        routine: Routine::Matrix,
        rows: 8,
        key_bits: 2,
        value_bits: 4,
        group_size: 32,
        head_dim: 80,
        kv_heads: 3,
        page_tokens: 64,
        split_tokens: 512,
        soft_cap: false,
    };

    /// By hand: codes take their bits, and each group a word.
    #[test]
    fn pages() {
        assert_eq!(CONFIG.refusal(), None);
        // 64 tokens of 80 channels: 2 and 4 bits of 32; 2 groups of tokens, 3 of channels.
        let head = 64 * 80 * 2 / 32 + 2 * 80 + 64 * 80 * 4 / 32 + 64 * 3;
        assert_eq!(CONFIG.page_words(), 3 * head);
        assert_eq!(CONFIG.warps(), 3, "the last one half full");
    }

    #[test]
    fn what_cannot_be_compiled_is_refused() {
        let refused = [
            SplitConfig { rows: 4, ..CONFIG },
            SplitConfig { routine: Routine::Plane, ..CONFIG },
            SplitConfig { routine: Routine::Plane, rows: 1, ..CONFIG },
            SplitConfig { routine: Routine::Plane, rows: 1, head_dim: 64, key_bits: 8, ..CONFIG },
            SplitConfig { key_bits: 3, ..CONFIG },
            SplitConfig { group_size: 16, ..CONFIG },
            SplitConfig { head_dim: 72, ..CONFIG },
            SplitConfig { head_dim: 0, ..CONFIG },
            SplitConfig { head_dim: 512, ..CONFIG },
            SplitConfig { page_tokens: 48, ..CONFIG },
            SplitConfig { page_tokens: 0, ..CONFIG },
            SplitConfig { split_tokens: 1024, ..CONFIG },
            SplitConfig { page_tokens: 96, ..CONFIG },
        ];
        for config in refused {
            assert!(config.refusal().is_some(), "{config:?}");
        }
    }
}
