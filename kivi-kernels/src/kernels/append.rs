//! Rounds new keys or values to the store type and stores them in full precision.

use super::number;
use crate::Store;
use cubecl::prelude::*;

/// `rows` is `[n, width]`; row `r` goes to the words from `places[first + r]` on. One unit for each
/// word.
#[cube(launch_unchecked)]
pub(crate) fn append(
    rows: &Array<f32>,
    places: &Array<u32>,
    arena: &mut Array<u32>,
    saturated: &mut Array<Atomic<u32>>,
    first: u32,
    words: u32,
    #[comptime] row_words: usize,
    #[comptime] store: Store,
) {
    let index = ABSOLUTE_POS;
    if index >= words as usize {
        terminate!();
    }
    let row = index / row_words;
    let word = index % row_words;
    let place = places[first as usize + row] as usize;
    let per_word = comptime!(store.per_word());
    let mut packed = 0u32;
    let mut count = 0u32;
    #[unroll]
    for i in 0..per_word {
        let x = rows[index * per_word + i];
        packed |= number::encode(x, store) << comptime!(16 * i as u32);
        count += select(number::saturates(x, store), 1u32, 0u32);
    }
    arena[place + word] = packed;
    if count > 0u32 {
        saturated[0].fetch_add(count);
    }
}
