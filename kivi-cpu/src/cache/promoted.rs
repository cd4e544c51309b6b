//! The second plane of promoted key channels.

use super::{Geometry, KeyOrder};
use kivi_core::{Bits, Promotion};

/// Which key channels of a page are promoted, group by group, and the lower half of their codes; the
/// upper half lies in the ordinary plane.
#[derive(Clone, Debug)]
pub(crate) struct Promoted {
    /// How a group of `lo` lies: as one of keys that have only the promoted channels, in ascending
    /// order.
    pub(crate) order: KeyOrder,
    /// `[kv_heads, page_tokens / G, ⌈head_dim / 32⌉]`: channel `d` is bit `d mod 32` of word `d/32`.
    pub(crate) masks: Box<[u32]>,
    /// `[kv_heads, page_tokens / G]` groups of codes.
    pub(crate) lo: Box<[u32]>,
    /// Words of a mask.
    mask_words: usize,
}

impl Promoted {
    /// Room for a page with `count` promoted channels in every group.
    pub(super) fn new(count: usize, g: &Geometry) -> Self {
        let order = KeyOrder { bits: Bits::Two, channels: count, group: g.group };
        let groups = g.kv_heads * (g.page_tokens / g.group);
        let mask_words = Promotion::mask_words(g.head_dim);
        Self {
            order,
            masks: vec![0; groups * mask_words].into(),
            lo: vec![0; groups * order.words()].into(),
            mask_words,
        }
    }

    /// Mask and codes of group `row` of the page, counted through all heads.
    pub(crate) fn group(&self, row: usize) -> Option<(&[u32], &[u32])> {
        let words = self.order.words();
        let mask = self.masks.get(row * self.mask_words..(row + 1) * self.mask_words)?;
        Some((mask, self.lo.get(row * words..(row + 1) * words)?))
    }

    /// The same, to be written.
    pub(crate) fn group_mut(&mut self, row: usize) -> Option<(&mut [u32], &mut [u32])> {
        let words = self.order.words();
        let mask = self.masks.get_mut(row * self.mask_words..(row + 1) * self.mask_words)?;
        Some((mask, self.lo.get_mut(row * words..(row + 1) * words)?))
    }
}

/// The channels of a mask, in ascending order.
pub(crate) fn channels_of(mask: &[u32]) -> impl Iterator<Item = usize> {
    mask.iter().enumerate().flat_map(|(word, &bits)| {
        let some = |bits: u32| (bits != 0).then_some(bits);
        let rests = std::iter::successors(some(bits), move |bits| some(bits & (bits - 1)));
        rests.map(move |bits| 32 * word + bits.trailing_zeros() as usize)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_ascend() {
        let found = |mask: &[u32]| channels_of(mask).collect::<Vec<_>>();
        assert_eq!(found(&[0b1010_0001, 0, 0x8000_0001]), [0, 5, 7, 64, 95]);
        assert_eq!(found(&[u32::MAX, 1]), (0..33).collect::<Vec<_>>());
        assert_eq!(found(&[0, 0]), []);
    }
}
