//! The physical order of codes.
//!
//! A word holds `P = 32 / bits` codes. Code `i = 2·j + h` of a word lies at bit
//! `16·h + bits·j`: masking a word with `L · 0x10001 << bits·j` leaves a *pair* of codes in the
//! two halves, ready for arithmetic on two 16-bit floats.
//!
//! - *Keys*, one group of `G` tokens of a head: a word holds `P` channels of one token, and the
//!   words of the group's tokens lie side by side, `[⌊D/P⌋, G]`. What `P` does not divide follows
//!   in the canonical order, `[G/P, D mod P]`.
//! - *Values* of a page: a word holds `P` tokens of one channel, and a row the words of all
//!   channels, `[page_tokens/P, ⌈D/P⌉·P]`.
//!
//! Both take exactly the bytes of the canonical form.

use crate::Shape;

/// First bit of code `index` of a word in the order of pairs.
pub const fn shift(bits: usize, index: usize) -> usize {
    16 * (index % 2) + bits * (index / 2)
}

/// Where a code lies: a word and the first bit in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Word within the group (keys) or the page (values) of a head.
    pub word: usize,
    /// First bit.
    pub shift: usize,
}

impl Place {
    /// The code at this place.
    pub fn get(self, bits: usize, words: &[u32]) -> u32 {
        words[self.word] >> self.shift & ((1 << bits) - 1)
    }

    /// Writes a code to a place that holds 0.
    pub fn set(self, words: &mut [u32], code: u32) {
        words[self.word] |= code << self.shift;
    }
}

/// Where the code of a key lies within its group.
pub fn key_place(shape: &Shape, token: usize, channel: usize) -> Place {
    let (bits, per_word) = (shape.key_bits, shape.keys_per_word());
    let in_chunks = shape.chunks() * per_word;
    if channel < in_chunks {
        let word = channel / per_word * shape.group + token;
        return Place { word, shift: shift(bits, channel % per_word) };
    }
    let row = shape.chunks() * shape.group + token / per_word * shape.rest();
    Place { word: row + channel - in_chunks, shift: bits * (token % per_word) }
}

/// Where the code of a value lies within its page.
pub fn value_place(shape: &Shape, token: usize, channel: usize) -> Place {
    let per_word = shape.values_per_word();
    let word = token / per_word * shape.value_row_words() + channel;
    Place { word, shift: shift(shape.value_bits, token % per_word) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;
    use std::collections::HashSet;

    fn shape(bits: usize, head_dim: usize, group: usize) -> Shape {
        Shape {
            kv_heads: 1,
            head_dim,
            group,
            page_tokens: 128,
            sinks: 0,
            key_bits: bits,
            value_bits: bits,
            key_store: Store::F16,
            value_store: Store::F16,
            promoted: 0,
        }
    }

    /// Every code has a place of its own, inside the words there are.
    #[test]
    fn places_are_a_bijection() {
        for bits in [2, 4, 8] {
            for head_dim in [20, 64, 72, 128] {
                for group in [16, 32, 64, 128] {
                    let shape = shape(bits, head_dim, group);
                    let mut seen = HashSet::new();
                    for token in 0..group {
                        for channel in 0..head_dim {
                            let place = key_place(&shape, token, channel);
                            assert!(place.word < shape.key_group_words());
                            assert!(place.shift + bits <= 32);
                            assert!(seen.insert((place.word, place.shift)));
                        }
                    }
                    // All bits of all words are used: no byte more than the canonical form.
                    assert_eq!(seen.len() * bits, shape.key_group_words() * 32);
                    let mut seen = HashSet::new();
                    for token in 0..shape.page_tokens {
                        for channel in 0..head_dim {
                            let place = value_place(&shape, token, channel);
                            assert!(place.word < shape.value_rows() * shape.value_row_words());
                            assert!(seen.insert((place.word, place.shift)));
                        }
                    }
                }
            }
        }
    }

    /// A mask leaves two neighbouring codes in the halves of a word.
    #[test]
    fn masking_leaves_pairs() {
        let shape = shape(2, 16, 16);
        let codes = [0, 1, 2, 3, 3, 2, 1, 0, 1, 1, 2, 2, 0, 3, 0, 3];
        let mut words = [0; 16];
        for (channel, &code) in codes.iter().enumerate() {
            key_place(&shape, 5, channel).set(&mut words, code);
        }
        for (j, pair) in codes.as_chunks::<2>().0.iter().enumerate() {
            let masked = (words[5] & (0x0003_0003 << (2 * j))) >> (2 * j);
            assert_eq!([masked & 0xFFFF, masked >> 16], *pair);
        }
        assert_eq!(words.iter().filter(|&&word| word != 0).count(), 1);
    }
}
