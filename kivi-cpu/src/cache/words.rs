//! Memory for packed groups.

use bytemuck::{Pod, Zeroable};
use std::ops::{Deref, DerefMut};

/// A cache line.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line([u32; 16]);

/// Words that begin a cache line if they fill lines, so that no vector of theirs lies in two; an
/// allocator alone promises 16 bytes. They take their own size and nothing more.
#[derive(Clone, Debug)]
pub(crate) enum Words {
    Lines(Box<[Line]>),
    Ragged(Box<[u32]>),
}

impl Words {
    pub(crate) fn zeroed(words: usize) -> Self {
        let per_line = size_of::<Line>() / size_of::<u32>();
        if words.is_multiple_of(per_line) {
            Self::Lines(vec![Line::zeroed(); words / per_line].into())
        } else {
            Self::Ragged(vec![0; words].into())
        }
    }
}

impl Default for Words {
    fn default() -> Self {
        Self::Ragged(Box::default())
    }
}

impl Deref for Words {
    type Target = [u32];

    #[inline(always)]
    fn deref(&self) -> &[u32] {
        match self {
            Self::Lines(lines) => bytemuck::cast_slice(lines),
            Self::Ragged(words) => words,
        }
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut [u32] {
        match self {
            Self::Lines(lines) => bytemuck::cast_slice_mut(lines),
            Self::Ragged(words) => words,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_take_their_own_size_and_begin_lines_where_they_fill_them() {
        for count in [0, 1, 15, 16, 17, 384, 452] {
            let mut words = Words::zeroed(count);
            assert_eq!((words.len(), words.iter().all(|&word| word == 0)), (count, true));
            if count > 0 && count.is_multiple_of(16) {
                assert_eq!(words.as_ptr().addr() % 64, 0);
            }
            words.iter_mut().for_each(|word| *word = 7);
            assert_eq!(words.iter().sum::<u32>() as usize, 7 * count);
        }
    }
}
