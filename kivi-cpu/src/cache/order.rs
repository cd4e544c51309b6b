//! The physical order of codes: words are laid out so that unpacking is a shift and a mask, and the
//! inner products need no shuffle.
//!
//! A 32-bit word is one lane of a vector and holds `P = 32 / bits` codes, code `i` at the bit
//! [`shift`]`(i)`: the word shifted right by `bits·j` and masked byte by byte leaves codes
//! `4·j … 4·j + 3` in its four bytes, ready for a byte-wise inner product.
//!
//! - *Keys*, one group of `G` tokens of a head: a word holds `P` channels of one token, and the
//!   words of the group's tokens lie side by side, `[⌊D/P⌋, G]`. What `P` does not divide follows in
//!   the canonical order (words of tokens of one channel), `[G/P, D mod P]`.
//! - *Values* of `G` tokens of a head: a word holds `P` tokens of one channel, and a row the words of
//!   all channels, `[G/P, ⌈D/P⌉·P]`.
//!
//! Both take exactly the bytes of the canonical form, for every head_dim. Codes of 8 bits are stored
//! as two's complement, less 128: instruction sets multiply signed bytes, or unsigned with signed.

use kivi_core::Bits;

/// First bit of code `index` of a word.
pub(crate) const fn shift(bits: Bits, index: usize) -> usize {
    8 * (index % 4) + bits.get() * (index / 4)
}

/// What is added to a code before it is stored, modulo its width.
pub(crate) const fn offset(bits: Bits) -> u32 {
    match bits {
        Bits::Two | Bits::Four => 0,
        Bits::Eight => 128,
    }
}

/// Where a code lies: a word and the first bit in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) word: usize,
    pub(crate) shift: usize,
}

impl Place {
    pub(crate) fn get(self, bits: Bits, words: &[u32]) -> u32 {
        (words[self.word] >> self.shift).wrapping_sub(offset(bits)) & bits.levels()
    }

    pub(crate) fn set(self, bits: Bits, words: &mut [u32], code: u32) {
        let word = &mut words[self.word];
        let code = code.wrapping_add(offset(bits)) & bits.levels();
        *word = *word & !(bits.levels() << self.shift) | code << self.shift;
    }
}

/// Codes of one group of keys of one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyOrder {
    pub(crate) bits: Bits,
    /// `D`
    pub(crate) channels: usize,
    /// `G`
    pub(crate) group: usize,
}

impl KeyOrder {
    /// Rows of `G` words that hold [`Bits::codes_per_word`] channels each.
    pub(crate) const fn chunks(self) -> usize {
        self.channels / self.bits.codes_per_word()
    }

    /// Channels in canonical order, after the chunks.
    pub(crate) const fn rest(self) -> usize {
        self.channels % self.bits.codes_per_word()
    }

    /// All words of the group.
    pub(crate) const fn words(self) -> usize {
        self.group / self.bits.codes_per_word() * self.channels
    }

    pub(crate) fn place(self, token: usize, channel: usize) -> Place {
        let per_word = self.bits.codes_per_word();
        let in_chunks = self.chunks() * per_word;
        if channel < in_chunks {
            let word = channel / per_word * self.group + token;
            return Place { word, shift: shift(self.bits, channel % per_word) };
        }
        let row = self.chunks() * self.group + token / per_word * self.rest();
        let shift = self.bits.get() * (token % per_word);
        Place { word: row + channel - in_chunks, shift }
    }
}

impl KeyOrder {
    /// The group with its last chunk filled up with channels of code 0, `[⌈D/P⌉, G]`.
    pub(crate) fn pad(self, words: &[u32], out: &mut [u32]) {
        let in_chunks = self.chunks() * self.group;
        out[..in_chunks].copy_from_slice(&words[..in_chunks]);
        for token in 0..self.group {
            for channel in self.channels - self.rest()..self.channels {
                let Place { word, shift: from } = self.place(token, channel);
                let code = words[word] >> from & self.bits.levels();
                let to = shift(self.bits, channel % self.bits.codes_per_word());
                out[in_chunks + token] |= code << to;
            }
        }
    }
}

/// Codes of the values of some tokens of one head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ValueOrder {
    pub(crate) bits: Bits,
    /// `D`
    pub(crate) channels: usize,
}

impl ValueOrder {
    /// Words of a row.
    pub(crate) const fn width(self) -> usize {
        self.channels.next_multiple_of(self.bits.codes_per_word())
    }

    /// All words of `tokens` tokens, a multiple of [`Bits::codes_per_word`].
    pub(crate) const fn words(self, tokens: usize) -> usize {
        tokens / self.bits.codes_per_word() * self.width()
    }

    pub(crate) fn place(self, token: usize, channel: usize) -> Place {
        let per_word = self.bits.codes_per_word();
        let word = token / per_word * self.width() + channel;
        Place { word, shift: shift(self.bits, token % per_word) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kivi_core::words_for;
    use std::collections::HashSet;

    /// Every element has a place of its own, and the places fill the canonical number of words.
    fn is_bijection(
        bits: Bits,
        words: usize,
        tokens: usize,
        channels: usize,
        place: impl Fn(usize, usize) -> Place,
    ) {
        let mut seen = HashSet::new();
        for token in 0..tokens {
            for channel in 0..channels {
                let place = place(token, channel);
                assert!(place.word < words && place.shift + bits.get() <= 32);
                assert!(place.shift.is_multiple_of(bits.get()));
                assert!(seen.insert((place.word, place.shift)), "{token}, {channel} share a place");
            }
        }
    }

    #[test]
    fn every_code_has_a_place_of_its_own() {
        for bits in Bits::ALL {
            for channels in [1, 3, 16, 20, 64, 72, 100, 128] {
                for group in [16, 32, 64, 128] {
                    let keys = KeyOrder { bits, channels, group };
                    assert_eq!(keys.words(), words_for(bits, group) * channels);
                    is_bijection(bits, keys.words(), group, channels, |t, c| keys.place(t, c));
                    let values = ValueOrder { bits, channels };
                    assert_eq!(values.words(group), group * words_for(bits, channels));
                    is_bijection(bits, values.words(group), group, channels, |t, c| {
                        values.place(t, c)
                    });
                }
            }
        }
    }

    #[test]
    fn a_masked_byte_is_a_code() {
        // Sixteen channels of one token whose codes are 0, 1, 2, 3, 3, 2, 1, 0, …
        let codes = [0, 1, 2, 3, 3, 2, 1, 0, 1, 1, 2, 2, 0, 3, 0, 3];
        let order = KeyOrder { bits: Bits::Two, channels: 16, group: 16 };
        let mut words = [0; 16];
        for (channel, &code) in codes.iter().enumerate() {
            order.place(5, channel).set(Bits::Two, &mut words, code);
        }
        for (j, quad) in codes.as_chunks::<4>().0.iter().enumerate() {
            let bytes = (words[5] >> (2 * j) & 0x0303_0303).to_le_bytes();
            assert_eq!(bytes.map(u32::from), *quad);
        }
        assert_eq!(words.iter().filter(|&&word| word != 0).count(), 1);
    }

    #[test]
    fn eight_bits_are_stored_less_128() {
        let place = Place { word: 0, shift: 8 };
        let mut words = [0];
        for (code, stored) in [(0, 0x80), (127, 0xFF), (128, 0), (255, 0x7F)] {
            place.set(Bits::Eight, &mut words, code);
            assert_eq!((words[0], place.get(Bits::Eight, &words)), (stored << 8, code));
        }
    }
}
