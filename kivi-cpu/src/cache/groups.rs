//! The parts of a group of packed keys or values of one head.
//!
//! A group is one piece of memory, and the groups of a head follow each other in a page: attention
//! reads all of a head's groups and none of its neighbours', and the fewer places in memory that
//! takes, the fewer of them have to be looked up, and the longer the hardware's prefetcher is right.

use super::order::{KeyOrder, ValueOrder};
use half::f16;
use kivi_core::Promotion;

/// How a group of keys lies: codes; scales `[D]`; zeros `[D]`; and where channels are promoted a mask
/// `[⌈D / 32⌉]`, channel `d` being bit `d mod 32` of word `d / 32`, and the lower half of these
/// channels' codes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyLayout {
    /// Of the codes; of promoted channels, their upper half.
    pub(crate) order: KeyOrder,
    /// Of the lower half: as keys that have only the promoted channels, in ascending order.
    pub(crate) promoted: Option<KeyOrder>,
}

/// A group of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyGroup<'a> {
    pub(crate) codes: &'a [u32],
    pub(crate) scales: &'a [f16],
    pub(crate) zeros: &'a [f16],
    /// Empty unless channels are promoted, as `lo`.
    pub(crate) mask: &'a [u32],
    pub(crate) lo: &'a [u32],
}

/// A group of keys, to be written.
#[derive(Debug)]
pub(crate) struct KeyGroupMut<'a> {
    pub(crate) codes: &'a mut [u32],
    pub(crate) scales: &'a mut [f16],
    pub(crate) zeros: &'a mut [f16],
    pub(crate) mask: &'a mut [u32],
    pub(crate) lo: &'a mut [u32],
}

impl KeyLayout {
    /// Words of a mask.
    pub(crate) fn mask_words(self) -> usize {
        self.promoted.map_or(0, |_| Promotion::mask_words(self.order.channels))
    }

    /// Words of the lower half of the codes.
    pub(crate) fn lo_words(self) -> usize {
        self.promoted.map_or(0, KeyOrder::words)
    }

    /// Words of scales and zeros: two f16 to a channel.
    pub(crate) fn param_words(self) -> usize {
        self.order.channels
    }

    /// Words of a group.
    pub(crate) fn words(self) -> usize {
        self.order.words() + self.param_words() + self.mask_words() + self.lo_words()
    }

    /// The parts of group `row` of some; `None` if there are fewer.
    #[inline(always)]
    pub(crate) fn group(self, row: usize, groups: &[u32]) -> Option<KeyGroup<'_>> {
        let group = groups.get(row * self.words()..(row + 1) * self.words())?;
        let (codes, rest) = group.split_at(self.order.words());
        let (params, rest) = rest.split_at(self.param_words());
        let (mask, lo) = rest.split_at(self.mask_words());
        let (scales, zeros) = bytemuck::cast_slice(params).split_at(self.order.channels);
        Some(KeyGroup { codes, scales, zeros, mask, lo })
    }

    /// The same, to be written.
    pub(crate) fn group_mut(self, row: usize, groups: &mut [u32]) -> Option<KeyGroupMut<'_>> {
        let group = groups.get_mut(row * self.words()..(row + 1) * self.words())?;
        let (codes, rest) = group.split_at_mut(self.order.words());
        let (params, rest) = rest.split_at_mut(self.param_words());
        let (mask, lo) = rest.split_at_mut(self.mask_words());
        let (scales, zeros) = bytemuck::cast_slice_mut(params).split_at_mut(self.order.channels);
        Some(KeyGroupMut { codes, scales, zeros, mask, lo })
    }
}

/// How the values of `G` tokens lie: codes; scales `[⌈D / G⌉, G]`; zeros `[⌈D / G⌉, G]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueLayout {
    pub(crate) order: ValueOrder,
    /// `G`
    pub(crate) group: usize,
}

/// The values of `G` tokens.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueGroup<'a> {
    pub(crate) codes: &'a [u32],
    pub(crate) scales: &'a [f16],
    pub(crate) zeros: &'a [f16],
}

/// The values of `G` tokens, to be written.
#[derive(Debug)]
pub(crate) struct ValueGroupMut<'a> {
    pub(crate) codes: &'a mut [u32],
    pub(crate) scales: &'a mut [f16],
    pub(crate) zeros: &'a mut [f16],
}

impl ValueLayout {
    /// Words of scales and zeros, which is how many there are of each.
    pub(crate) fn param_words(self) -> usize {
        self.order.channels.div_ceil(self.group) * self.group
    }

    /// Words of a group.
    pub(crate) fn words(self) -> usize {
        self.order.words(self.group) + self.param_words()
    }

    /// The parts of group `row` of some; `None` if there are fewer.
    #[inline(always)]
    pub(crate) fn group(self, row: usize, groups: &[u32]) -> Option<ValueGroup<'_>> {
        let group = groups.get(row * self.words()..(row + 1) * self.words())?;
        let (codes, params) = group.split_at(self.order.words(self.group));
        let (scales, zeros) = bytemuck::cast_slice(params).split_at(self.param_words());
        Some(ValueGroup { codes, scales, zeros })
    }

    /// The same, to be written.
    pub(crate) fn group_mut(self, row: usize, groups: &mut [u32]) -> Option<ValueGroupMut<'_>> {
        let group = groups.get_mut(row * self.words()..(row + 1) * self.words())?;
        let (codes, params) = group.split_at_mut(self.order.words(self.group));
        let (scales, zeros) = bytemuck::cast_slice_mut(params).split_at_mut(self.param_words());
        Some(ValueGroupMut { codes, scales, zeros })
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
    use super::channels_of;

    #[test]
    fn channels_ascend() {
        let found = |mask: &[u32]| channels_of(mask).collect::<Vec<_>>();
        assert_eq!(found(&[0b1010_0001, 0, 0x8000_0001]), [0, 5, 7, 64, 95]);
        assert_eq!(found(&[u32::MAX, 1]), (0..33).collect::<Vec<_>>());
        assert_eq!(found(&[0, 0]), []);
    }
}
