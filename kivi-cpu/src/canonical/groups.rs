//! Groups of packed keys and values, to and from the canonical form.

use crate::cache::{
    KeyGroup, KeyGroupMut, KeyLayout, ValueGroup, ValueGroupMut, ValueLayout, order::Place,
};
use kivi_core::{Bits, PackedKeys, PackedValues, Promotion, quantizer::GroupParams, words_for};
use std::ops::Range;

impl KeyGroup<'_> {
    /// Copies the group to where its first token is token `first` of a head.
    pub(super) fn export(
        &self,
        layout: KeyLayout,
        [head, first]: [usize; 2],
        keys: &mut PackedKeys,
    ) {
        let KeyLayout { order, promoted } = layout;
        for channel in 0..order.channels {
            let params = GroupParams { scale: self.scales[channel], zero: self.zeros[channel] };
            keys.set_params(head, first / order.group, channel, params);
            for token in 0..order.group {
                let code = order.place(token, channel).get(order.bits, self.codes);
                keys.set_code(head, first + token, channel, code);
            }
        }
        let canonical = Canonical::of(layout, [head, first], keys);
        let Some((order, plane)) = promoted.zip(keys.promoted.as_mut()) else { return };
        plane.mask[canonical.mask()].copy_from_slice(self.mask);
        for rank in 0..order.channels {
            for token in 0..order.group {
                let code = order.place(token, rank).get(order.bits, self.lo);
                canonical.lo(token, rank).set(order.bits, &mut plane.lo, code);
            }
        }
    }
}

impl KeyGroupMut<'_> {
    /// The way back.
    pub(super) fn import(
        &mut self,
        layout: KeyLayout,
        [head, first]: [usize; 2],
        keys: &PackedKeys,
    ) {
        let KeyLayout { order, promoted } = layout;
        for channel in 0..order.channels {
            let params = keys.params(head, first / order.group, channel);
            (self.scales[channel], self.zeros[channel]) = (params.scale, params.zero);
            for token in 0..order.group {
                let code = keys.code(head, first + token, channel);
                order.place(token, channel).set(order.bits, self.codes, code);
            }
        }
        let canonical = Canonical::of(layout, [head, first], keys);
        let Some((order, plane)) = promoted.zip(keys.promoted.as_ref()) else { return };
        self.mask.copy_from_slice(&plane.mask[canonical.mask()]);
        for rank in 0..order.channels {
            for token in 0..order.group {
                let code = canonical.lo(token, rank).get(order.bits, &plane.lo);
                order.place(token, rank).set(order.bits, self.lo, code);
            }
        }
    }
}

/// Where what a group of promoted channels has lies in the canonical second plane.
struct Canonical {
    layout: KeyLayout,
    head: usize,
    first: usize,
    /// Tokens of the whole plane.
    tokens: usize,
}

impl Canonical {
    fn of(layout: KeyLayout, [head, first]: [usize; 2], keys: &PackedKeys) -> Self {
        Self { layout, head, first, tokens: keys.tokens }
    }

    fn mask(&self) -> Range<usize> {
        let KeyLayout { order, .. } = self.layout;
        let row = (self.head * self.tokens + self.first) / order.group;
        let words = Promotion::mask_words(order.channels);
        row * words..(row + 1) * words
    }

    /// The code of a token of the group and a channel, given by its place among the promoted ones.
    fn lo(&self, token: usize, rank: usize) -> Place {
        let count = self.layout.promoted.map_or(0, |order| order.channels);
        let (bits, token) = (Bits::Two, self.first + token);
        let row = self.head * words_for(bits, self.tokens) + token / bits.codes_per_word();
        Place { word: row * count + rank, shift: bits.get() * (token % bits.codes_per_word()) }
    }
}

impl ValueGroup<'_> {
    /// Copies the first `tokens` to where they begin with token `first` of a head.
    pub(super) fn export(
        &self,
        layout: ValueLayout,
        [head, first]: [usize; 2],
        tokens: usize,
        values: &mut PackedValues,
    ) {
        let ValueLayout { order, group } = layout;
        for token in 0..tokens {
            for index in 0..order.channels.div_ceil(group) {
                let at = index * group + token;
                let params = GroupParams { scale: self.scales[at], zero: self.zeros[at] };
                values.set_params(head, first + token, index, params);
            }
            for channel in 0..order.channels {
                let code = order.place(token, channel).get(order.bits, self.codes);
                values.set_code(head, first + token, channel, code);
            }
        }
    }
}

impl ValueGroupMut<'_> {
    /// The way back.
    pub(super) fn import(
        &mut self,
        layout: ValueLayout,
        [head, first]: [usize; 2],
        tokens: usize,
        values: &PackedValues,
    ) {
        let ValueLayout { order, group } = layout;
        for token in 0..tokens {
            for index in 0..order.channels.div_ceil(group) {
                let params = values.params(head, first + token, index);
                let at = index * group + token;
                (self.scales[at], self.zeros[at]) = (params.scale, params.zero);
            }
            for channel in 0..order.channels {
                let code = values.code(head, first + token, channel);
                order.place(token, channel).set(order.bits, self.codes, code);
            }
        }
    }
}
