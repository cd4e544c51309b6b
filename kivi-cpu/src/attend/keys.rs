//! The loop over packed keys: logits of one group.

use super::{
    dots::{Product, STRIPE_WORDS, Words},
    operand::{Operands, Params, STRIPE},
    scratch::{Rows, Scratch},
};
use crate::{
    cache::{KeyGroup, KeyOrder},
    isa::{Kernel, LANES, Simd},
};
use half::f16;

/// Rows of keys that are multiplied at once: 512 channels of 2 bits, 128 of 8.
const MAX_ROWS: usize = 32;

/// Logits of one group of keys for the active queries, into their weights from vector `first` on; of
/// promoted channels with the upper half of their codes.
pub(super) struct KeyCodes<'a, const QUADS: usize> {
    pub(super) scratch: &'a mut Scratch,
    pub(super) order: KeyOrder,
    pub(super) group: KeyGroup<'a>,
    pub(super) first: usize,
    /// The group that will be read after a tile.
    pub(super) next: Option<KeyGroup<'a>>,
}

impl<const QUADS: usize> Kernel for KeyCodes<'_, QUADS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, order, group, first, next } = self;
        let KeyGroup { codes, scales, zeros, .. } = group;
        let Scratch { operands, active, weights, scaled, params: buffer, padded, .. } = scratch;
        let channels = order.channels.next_multiple_of(STRIPE);
        let params = if channels == order.channels {
            Params::new(scales, zeros)
        } else {
            buffer.set(0, scales, zeros);
            buffer.clear(order.channels..channels);
            buffer.get(channels)
        };
        if let Some(next) = next {
            params_ahead(simd, next.scales);
            params_ahead(simd, next.zeros);
        }
        for (pair, queries) in active.chunks(2).enumerate() {
            operands.fold_rows::<S, QUADS>(simd, pair, (scaled, queries), &[params]);
        }
        let codes = whole_rows(order, codes, padded);
        let next = next.map_or(codes, |next| next.codes.as_chunks().0);
        let logits = Logits { active, first, add: false };
        logits.of_codes::<S, QUADS>(simd, order, [codes, next], operands, weights);
    }
}

/// Asks for the cache lines of scales or zeros.
#[inline(always)]
pub(super) fn params_ahead<S: Simd>(simd: S, params: &[f16]) {
    for first in (0..params.len()).step_by(32) {
        simd.prefetch(params.as_ptr().wrapping_add(first).cast());
    }
}

/// The codes of a group in whole vectors, `[⌈D/P⌉, G]`: in `padded` if they are not.
#[inline(always)]
pub(super) fn whole_rows<'a>(
    order: KeyOrder,
    codes: &'a [u32],
    padded: &'a mut Vec<[u32; LANES]>,
) -> &'a [[u32; LANES]] {
    if order.rest() == 0 {
        return codes.as_chunks().0;
    }
    padded.clear();
    padded.resize((order.chunks() + 1) * (order.group / LANES), [0; LANES]);
    order.pad(codes, padded.as_flattened_mut());
    padded
}

/// Rows of words of a group, one after the other.
#[derive(Clone, Copy)]
struct KeyWords<'a> {
    codes: &'a [[u32; LANES]],
    next: *const [u32; LANES],
    /// Vectors of a row.
    width: usize,
}

impl Words for KeyWords<'_> {
    #[inline(always)]
    fn get<const V: usize>(&self, row: usize, first: usize) -> &[[u32; LANES]; V] {
        let words = self.codes.get(row * self.width + first..).and_then(<[_]>::first_chunk);
        words.unwrap_or(const { &[[0; LANES]; V] })
    }

    #[inline(always)]
    fn next(&self, row: usize, first: usize) -> *const [u32; LANES] {
        self.next.wrapping_add(row * self.width + first)
    }
}

/// Where the logits of a group go.
#[derive(Clone, Copy)]
pub(super) struct Logits<'a> {
    pub(super) active: &'a [usize],
    /// First vector of the group in the queries' weights.
    pub(super) first: usize,
    /// Whether to add to what is there.
    pub(super) add: bool,
}

impl Logits<'_> {
    /// Multiplies the folded queries with the codes of [`whole_rows`], and asks for the next ones.
    #[inline(always)]
    pub(super) fn of_codes<S: Simd, const QUADS: usize>(
        self,
        simd: S,
        order: KeyOrder,
        [codes, next]: [&[[u32; LANES]]; 2],
        operands: &Operands,
        weights: &mut Rows,
    ) {
        let Self { active, first, add } = self;
        let chunks = order.channels.div_ceil(order.bits.codes_per_word());
        let width = order.group / LANES;
        for start in (0..chunks).step_by(MAX_ROWS) {
            let codes = codes.get(start * width..).unwrap_or_default();
            for (pair, queries) in active.chunks(2).enumerate() {
                // Once is enough.
                let next = if pair == 0 {
                    next.as_ptr().wrapping_add(start * width)
                } else {
                    codes.as_ptr()
                };
                let (mut folded, planes) = operands.pair(pair);
                if start > 0 {
                    // The constants have been added with the first rows.
                    folded.iter_mut().for_each(|operand| operand.constant = 0.0);
                }
                let product = Product {
                    words: KeyWords { codes, next, width },
                    rows: MAX_ROWS.min(chunks - start),
                    vectors: 0..width,
                    operands: folded,
                    planes: &planes[start * QUADS / STRIPE_WORDS..],
                    add: add || start > 0,
                };
                match *queries {
                    [a, b, ..] => {
                        let out = weights.two_rows_mut(a, b).map(|row| &mut row[first..]);
                        product.run::<S, QUADS, 2>(simd, out);
                    }
                    [a] => product.run::<S, QUADS, 1>(simd, [&mut weights.row_mut(a)[first..]]),
                    [] => {}
                }
            }
        }
    }
}
