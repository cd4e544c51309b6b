//! The second plane of promoted key channels.

use super::{
    keys::{Logits, whole_rows},
    operand::STRIPE,
    scratch::Scratch,
};
use crate::{
    cache::{KeyGroup, KeyOrder, channels_of},
    isa::{Kernel, Simd},
};
use half::f16;

/// Adds the lower half of the codes of promoted channels to the logits of a group of keys for the
/// active queries: `Σ (q∘s/4)·lo` over these channels, `s` being the scale of the upper half.
pub(super) struct PromotedCodes<'a> {
    pub(super) scratch: &'a mut Scratch,
    /// Of the lower half of the codes.
    pub(super) order: KeyOrder,
    pub(super) group: KeyGroup<'a>,
    /// First vector of the group in the queries' weights.
    pub(super) first: usize,
    /// The group that will be read after a tile.
    pub(super) next: Option<KeyGroup<'a>>,
}

impl Kernel for PromotedCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { scratch, order, group, first, next } = self;
        let Scratch { operands, active, weights, scaled, params, padded, promoted, .. } = scratch;
        let count = order.channels;
        promoted.channels.clear();
        promoted.channels.extend(channels_of(group.mask).take(count));
        params.clear(0..count.next_multiple_of(STRIPE));
        for (i, &channel) in promoted.channels.iter().enumerate() {
            params.set(i, &group.scales[channel..=channel], &[f16::ZERO]);
        }
        let params = params.get(count.next_multiple_of(STRIPE));
        for (pair, queries) in active.chunks(2).enumerate() {
            for (i, &query) in queries.iter().enumerate() {
                let from = scaled.row(query).as_flattened();
                let to = promoted.queries.row_mut(i).as_flattened_mut();
                for (to, &channel) in to.iter_mut().zip(&promoted.channels) {
                    // A quarter of the query instead of the scale, which f16 might not hold.
                    *to = 0.25 * from[channel];
                }
                to[promoted.channels.len()..].fill(0.0);
            }
            let picked = (&promoted.queries, &[0, 1][..queries.len()]);
            operands.fold_rows::<S, 4>(simd, pair, picked, &[params]);
        }
        let codes = whole_rows(order, group.lo, padded);
        let logits = Logits { active, first, add: true };
        let next = next.map_or(codes, |next| next.lo.as_chunks().0);
        logits.of_codes::<S, 4>(simd, order, [codes, next], operands, weights);
    }
}
