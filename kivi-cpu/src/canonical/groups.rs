//! The second plane of promoted key channels, to and from the canonical form.

use super::for_each_key;
use crate::cache::{Geometry, Promoted, order::Place};
use kivi_core::{Bits, PackedKeys, Promotion, words_for};
use std::ops::Range;

impl Promoted {
    /// Copies the first `tokens` of a page, whole groups, to where the page's token 0 is token
    /// `first`.
    pub(super) fn export(
        &self,
        g: &Geometry,
        first: usize,
        tokens: Range<usize>,
        keys: &mut PackedKeys,
    ) {
        let (place, all) = (canonical(keys.tokens, self.order.channels), keys.tokens);
        let Some(plane) = &mut keys.promoted else { return };
        for (own, there) in masks(g, first, tokens.clone(), all) {
            plane.mask[there].copy_from_slice(&self.masks[own]);
        }
        for_each_key(g, self.order, tokens, |head, token, rank, _, at| {
            let code = at.get(Bits::Two, &self.lo);
            place(head, first + token, rank).set(Bits::Two, &mut plane.lo, code);
        });
    }

    /// The way back.
    pub(super) fn import(
        &mut self,
        g: &Geometry,
        first: usize,
        tokens: Range<usize>,
        keys: &PackedKeys,
    ) {
        let (place, all) = (canonical(keys.tokens, self.order.channels), keys.tokens);
        let Some(plane) = &keys.promoted else { return };
        for (own, there) in masks(g, first, tokens.clone(), all) {
            self.masks[own].copy_from_slice(&plane.mask[there]);
        }
        for_each_key(g, self.order, tokens, |head, token, rank, _, at| {
            let code = place(head, first + token, rank).get(Bits::Two, &plane.lo);
            at.set(Bits::Two, &mut self.lo, code);
        });
    }
}

/// Where the code of `(head, token, place among the promoted channels)` lies in the canonical plane
/// of `tokens` tokens.
fn canonical(tokens: usize, count: usize) -> impl Fn(usize, usize, usize) -> Place {
    let per_word = Bits::Two.codes_per_word();
    move |head, token, rank| {
        let row = head * words_for(Bits::Two, tokens) + token / per_word;
        Place { word: row * count + rank, shift: Bits::Two.get() * (token % per_word) }
    }
}

/// Where the masks of the groups of a page lie, in the page and in the canonical form of `all`
/// tokens.
fn masks(
    g: &Geometry,
    first: usize,
    tokens: Range<usize>,
    all: usize,
) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    let words = Promotion::mask_words(g.head_dim);
    let (kv_heads, size) = (g.kv_heads, g.group);
    let (groups, all, first) = (g.page_tokens / size, all / size, first / size);
    let of = move |row: usize| row * words..(row + 1) * words;
    (0..kv_heads).flat_map(move |head| {
        let tokens = tokens.start / size..tokens.end / size;
        tokens.map(move |group| (of(head * groups + group), of(head * all + first + group)))
    })
}
