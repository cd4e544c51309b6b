//! Quantizing from the residual into pages.

use crate::{
    Cpu,
    cache::{
        Floats, KeyGroupMut, LayerCache, Page, Slot, ValueGroupMut, channels_of,
        order::{KeyOrder, Place, offset},
    },
    isa::{Kernel, LANES, Simd},
};
use half::f16;
use kivi_core::{
    Bits, Error, PageId, Result, SequencePlan,
    quantizer::{self, GroupParams},
};
use rayon::prelude::*;
use std::ops::Range;

/// The longest group.
const MAX_GROUP: usize = 128;

/// The part of one page that a step fills.
#[derive(Debug)]
pub(crate) struct Work {
    page: Page,
    id: PageId,
    /// Position of the page's first token.
    start: usize,
    /// Positions to quantize in it.
    keys: Range<usize>,
    values: Range<usize>,
}

impl Cpu {
    /// Quantizes the plan's ranges of one sequence; pages are independent of each other.
    pub(crate) fn quantize_sequence(
        &self,
        layer: &mut LayerCache,
        group: usize,
        sequence: &SequencePlan,
    ) -> Result<()> {
        let format = layer.spec.format;
        let only = |range: &Range<usize>, bits: Option<Bits>| match bits {
            Some(_) => range.clone(),
            None => 0..0,
        };
        let keys = only(&sequence.quantize.keys, format.keys.bits);
        let values = only(&sequence.quantize.values, format.values.bits);
        if keys.is_empty() && values.is_empty() {
            return Ok(());
        }
        // Before pages are taken out of the table.
        layer.appended_slot("quantize", sequence.before.slot)?;
        let geometry = layer.geometry;
        let first = |range: &Range<usize>| (!range.is_empty()).then_some(range.start);
        let start = first(&keys).into_iter().chain(first(&values)).min().unwrap_or_default();
        let indices = geometry.locate(start).0..=geometry.locate(keys.end.max(values.end) - 1).0;
        let mut work = std::mem::take(&mut layer.filling);
        work.clear();
        for index in indices {
            let Some(&id) = sequence.before.tables[group].get(index) else {
                return Err(Error::request("quantize", format!("no page at index {index}")));
            };
            if id == PageId::DROPPED {
                continue;
            }
            let start = geometry.sinks + index * geometry.page_tokens;
            let within = |range: &Range<usize>| {
                range.start.max(start)..range.end.min(start + geometry.page_tokens)
            };
            // Taken out of the table so that several threads may fill pages at once.
            let page = std::mem::take(layer.page_mut("quantize", id)?);
            work.push(Work { page, id, start, keys: within(&keys), values: within(&values) });
        }
        let slot = layer.slot("quantize", sequence.before.slot)?;
        let fill = |work: &mut Work| {
            self.isa.run(FillPage { layer, slot, work });
        };
        if work.len() == 1 {
            work.iter_mut().for_each(fill);
        } else {
            self.threads.install(|| work.par_iter_mut().for_each(fill));
        }
        for Work { page, id, .. } in work.drain(..) {
            *layer.page_mut("quantize", id)? = page;
        }
        layer.filling = work;
        Ok(())
    }
}

struct FillPage<'a> {
    layer: &'a LayerCache,
    slot: &'a Slot,
    work: &'a mut Work,
}

impl Kernel for FillPage<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self { layer, slot, work } = self;
        let (keys, values) = (work.keys.clone(), work.values.clone());
        if !keys.is_empty() {
            fill_keys(simd, layer, slot, &mut work.page, work.start, &keys);
        }
        if !values.is_empty() {
            fill_values(simd, layer, slot, &mut work.page, work.start, &values);
        }
    }
}

/// Per channel, groups of `G` consecutive tokens; which channels are promoted is decided per group.
#[inline(always)]
fn fill_keys<S: Simd>(
    simd: S,
    layer: &LayerCache,
    slot: &Slot,
    page: &mut Page,
    start: usize,
    range: &Range<usize>,
) {
    let g = layer.geometry;
    let Some(bits) = layer.spec.format.keys.bits else {
        return;
    };
    let Some(groups) = page.keys.groups_mut() else { return };
    let layout = g.key_layout(bits);
    let mut ranges = vec![0.0; if layout.promoted.is_some() { g.head_dim } else { 0 }];
    let mut group = Group::default();
    for position in range.clone().step_by(g.group) {
        for head in 0..g.kv_heads {
            let row = g.group_row(head, position - start);
            let Some(KeyGroupMut { codes, scales, zeros, mask, lo }) =
                layout.group_mut(row, groups)
            else {
                return;
            };
            codes.fill(0);
            let tile = slot.key_index(head, position);
            let elements = |channel: usize| {
                let first = tile + channel * g.group;
                first..first + g.group
            };
            if let Some(order) = layout.promoted {
                for (channel, range) in ranges.iter_mut().enumerate() {
                    group.load(simd, &slot.ring.keys, elements(channel));
                    *range = quantizer::range(group.ends(simd).as_flattened().iter().copied());
                }
                mask.copy_from_slice(&quantizer::promote(&ranges, order.channels));
                lo.fill(0);
            }
            let mut next = channels_of(mask).enumerate().peekable();
            for channel in 0..g.head_dim {
                group.load(simd, &slot.ring.keys, elements(channel));
                let rank = next.next_if(|&(_, promoted)| promoted == channel);
                let params = match rank.zip(layout.promoted) {
                    Some(((rank, _), order)) => {
                        let params = group.quantize_promoted(simd);
                        put_channel(simd, order, lo, rank, &group.lo);
                        params
                    }
                    None => group.quantize(simd, bits),
                };
                (scales[channel], zeros[channel]) = (params.scale, params.zero);
                put_channel(simd, layout.order, codes, channel, &group.codes);
            }
        }
    }
    page.filled.keys = range.end - start;
}

/// Puts the codes of one channel into a group's words, where the channel has only zeros so far.
#[inline(always)]
fn put_channel<S: Simd>(
    simd: S,
    order: KeyOrder,
    words: &mut [u32],
    channel: usize,
    codes: &[[u32; LANES]],
) {
    if channel < order.chunks() * order.bits.codes_per_word() {
        let Place { word, shift } = order.place(0, channel);
        let words = words[word..word + order.group].as_chunks_mut::<LANES>().0;
        for (words, codes) in words.iter_mut().zip(codes) {
            let shifted = simd.shl(simd.load_u32(codes), shift as u32);
            simd.store_u32(simd.add_u32(simd.load_u32(words), shifted), words);
        }
        return;
    }
    for (token, &code) in codes.as_flattened()[..order.group].iter().enumerate() {
        let Place { word, shift } = order.place(token, channel);
        words[word] |= code << shift;
    }
}

/// Per token, groups of `G` consecutive channels; the last one may be short.
#[inline(always)]
fn fill_values<S: Simd>(
    simd: S,
    layer: &LayerCache,
    slot: &Slot,
    page: &mut Page,
    start: usize,
    range: &Range<usize>,
) {
    let g = layer.geometry;
    let Some(bits) = layer.spec.format.values.bits else {
        return;
    };
    let Some(groups) = page.values.groups_mut() else { return };
    let layout = g.value_layout(bits);
    let mut group = Group::default();
    for position in range.clone() {
        for head in 0..g.kv_heads {
            let row = g.group_row(head, position - start);
            let token = (position - start) % g.group;
            let Some(ValueGroupMut { codes, scales, zeros }) = layout.group_mut(row, groups) else {
                return;
            };
            for (index, first) in (0..g.head_dim).step_by(g.group).enumerate() {
                let length = g.group.min(g.head_dim - first);
                let from = slot.value_index(head, position) + first;
                group.load(simd, &slot.ring.values, from..from + length);
                let params = group.quantize(simd, bits);
                let at = index * g.group + token;
                (scales[at], zeros[at]) = (params.scale, params.zero);
                let Place { word, shift } = layout.order.place(token, first);
                let words = &mut codes[word..word + length];
                // What a token taken back has left goes.
                let keep = !(bits.levels() << shift);
                for (word, code) in words.iter_mut().zip(group.codes.as_flattened()) {
                    *word = *word & keep | code << shift;
                }
            }
        }
    }
    page.filled.values = range.end - start;
}

/// Buffers for one group.
struct Group {
    length: usize,
    /// Its elements, then the last one repeated.
    elements: [[f32; LANES]; MAX_GROUP / LANES],
    /// Their codes, as they are stored.
    codes: [[u32; LANES]; MAX_GROUP / LANES],
    /// The lower halves of their codes, if they are promoted.
    lo: [[u32; LANES]; MAX_GROUP / LANES],
}

impl Default for Group {
    fn default() -> Self {
        let (elements, codes) = ([[0.0; LANES]; _], [[0; LANES]; _]);
        Self { length: 0, elements, codes, lo: codes }
    }
}

impl Group {
    #[inline(always)]
    fn load<S: Simd>(&mut self, simd: S, floats: &Floats, range: Range<usize>) {
        self.length = range.len();
        let elements = self.elements.as_flattened_mut();
        floats.load(simd, range, &mut elements[..self.length]);
        let last = elements[self.length - 1];
        elements[self.length..self.length.next_multiple_of(LANES)].fill(last);
    }

    /// Quantizes the group, as [`kivi_core::quantizer`] defines it.
    #[inline(always)]
    fn quantize<S: Simd>(&mut self, simd: S, bits: Bits) -> GroupParams {
        let params = GroupParams::of(bits, self.ends(simd).as_flattened().iter().copied());
        self.encode(simd, bits, params);
        params
    }

    /// Quantizes the group as a promoted channel: its codes are those of the upper plane, and `lo`
    /// those of the lower one.
    #[inline(always)]
    fn quantize_promoted<S: Simd>(&mut self, simd: S) -> GroupParams {
        let params = GroupParams::of_promoted(self.ends(simd).as_flattened().iter().copied());
        self.encode(simd, Bits::Four, params.fine());
        let vectors = self.length.div_ceil(LANES);
        let low = simd.splat_u32(Bits::Two.levels());
        for (codes, lo) in self.codes[..vectors].iter_mut().zip(&mut self.lo) {
            let both = simd.load_u32(codes);
            simd.store_u32(simd.and(both, low), lo);
            simd.store_u32(simd.shr(both, 2), codes);
        }
        params
    }

    /// The smallest and the largest element of every lane; NaN if an element is not finite.
    #[inline(always)]
    fn ends<S: Simd>(&self, simd: S) -> [[f32; LANES]; 2] {
        let elements = &self.elements[..self.length.div_ceil(LANES)];
        let zero = simd.splat(0.0);
        let first = simd.load(&elements[0]);
        let (mut min, mut max, mut poison) = (first, first, zero);
        for x in elements {
            let x = simd.load(x);
            min = simd.min(x, min);
            max = simd.max(x, max);
            // 0 as long as everything is finite.
            poison = simd.mul_add(x, zero, poison);
        }
        let mut ends = [[f32::NAN; LANES]; 2];
        if simd.sum(poison) == 0.0 {
            simd.store(min, &mut ends[0]);
            simd.store(max, &mut ends[1]);
        }
        ends
    }

    /// The codes of the elements, as they are stored.
    #[inline(always)]
    fn encode<S: Simd>(&mut self, simd: S, bits: Bits, params: GroupParams) {
        let vectors = self.length.div_ceil(LANES);
        let (elements, codes) = (&self.elements[..vectors], &mut self.codes[..vectors]);
        if params.scale == f16::ZERO {
            codes.as_flattened_mut().fill(offset(bits));
            return;
        }
        for (x, codes) in elements.iter().zip(codes) {
            let found = match bits {
                Bits::Two => count_thresholds::<S, 3>(simd, x, params),
                Bits::Four => count_thresholds::<S, 15>(simd, x, params),
                Bits::Eight => near_guess(simd, x, params),
            };
            simd.store_u32(found, codes);
        }
    }
}

/// The codes of a vector of elements by definition: the number of thresholds that lie below. Adding an
/// odd threshold's equality is comparing the other way round.
#[inline(always)]
fn count_thresholds<S: Simd, const LEVELS: usize>(
    simd: S,
    x: &[f32; LANES],
    params: GroupParams,
) -> S::I32 {
    let scale = params.scale.to_f32();
    let distance = simd.sub(simd.load(x), simd.splat(params.zero.to_f32()));
    let mut code = simd.splat_u32(0);
    for k in 0..LEVELS {
        let threshold = simd.splat((k as f32 + 0.5) * scale);
        // All bits of a lane that holds, which is −1.
        let above = match k % 2 {
            0 => simd.less(threshold, distance),
            _ => simd.less_or_equal(threshold, distance),
        };
        code = simd.sub_u32(code, above);
    }
    code
}

/// The stored codes of a vector of elements at 8 bits, one by one: guessed with a reciprocal, which is off
/// by at most one, and put right by the exact thresholds.
#[inline(always)]
fn near_guess<S: Simd>(simd: S, x: &[f32; LANES], params: GroupParams) -> S::I32 {
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let (inverse, levels) = (1.0 / scale, Bits::Eight.levels());
    let mut codes = [0; LANES];
    for (code, &x) in codes.iter_mut().zip(x) {
        let distance = x - zero;
        let guess = (distance * inverse).clamp(0.0, levels as f32) as u32;
        // The exact quotient, rounded down, is `guess` or one beside it, and the code is that or
        // one more.
        *code = guess.saturating_sub(1);
        for _ in 0..3 {
            *code += u32::from(*code < levels && above(*code, distance, scale));
        }
        *code ^= offset(Bits::Eight);
    }
    simd.load_u32(&codes)
}

/// Whether the threshold between level `k` and the next one is passed.
#[inline(always)]
fn above(k: u32, distance: f32, scale: f32) -> bool {
    let threshold = (k as f32 + 0.5) * scale;
    distance > threshold || (k % 2 == 1 && distance == threshold)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use proptest::prelude::*;

    struct Quantize<'a> {
        group: &'a [f32],
        bits: Bits,
    }

    impl Kernel for Quantize<'_> {
        type Output = (GroupParams, Vec<u32>);

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let mut buffers = Group::default();
            buffers.load(simd, &Floats::F32(self.group.into()), 0..self.group.len());
            let params = buffers.quantize(simd, self.bits);
            let stored = &buffers.codes.as_flattened()[..self.group.len()];
            (params, stored.iter().map(|code| code ^ offset(self.bits)).collect())
        }
    }

    struct Promote<'a>(&'a [f32]);

    impl Kernel for Promote<'_> {
        type Output = (f32, GroupParams, Vec<u32>);

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> Self::Output {
            let mut buffers = Group::default();
            buffers.load(simd, &Floats::F32(self.0.into()), 0..self.0.len());
            let range = quantizer::range(buffers.ends(simd).as_flattened().iter().copied());
            let params = buffers.quantize_promoted(simd);
            let planes = buffers.codes.as_flattened().iter().zip(buffers.lo.as_flattened());
            let codes = planes.map(|(hi, lo)| {
                assert!(*hi < 4 && *lo < 4);
                4 * hi + lo
            });
            (range, params, codes.take(self.0.len()).collect())
        }
    }

    /// Elements of a group, extremes included.
    fn elements() -> impl Strategy<Value = Vec<f32>> {
        let element = prop_oneof![
            -1f32..1.0,
            -70000f32..70000.0,
            (-8i8..8).prop_map(f32::from),
            Just(0.0),
            Just(-0.0),
            Just(f32::NAN),
            Just(f32::INFINITY),
            Just(1e-6),
            Just(-3.4e38),
        ];
        prop::collection::vec(element, 1..=MAX_GROUP)
    }

    /// Rounded to f16, and everything finite if so wished.
    fn rounded(group: &[f32], finite: bool) -> Vec<f32> {
        let round = |x: f32| if finite && !x.is_finite() { 0.5 } else { f16::from_f32(x).to_f32() };
        group.iter().map(|&x| round(x)).collect()
    }

    proptest! {
        /// The fast quantizer agrees with the definition on every bit, ties and extremes included.
        #[test]
        fn fast_quantizer_is_the_core_quantizer(
            group in elements(),
            finite in any::<bool>(),
            bits in prop::sample::select(&Bits::ALL),
        ) {
            let group = rounded(&group, finite);
            let expected = GroupParams::of(bits, group.iter().copied());
            for isa in Isa::available() {
                let (params, codes) = isa.run(Quantize { group: &group, bits });
                prop_assert_eq!(params.scale, expected.scale);
                prop_assert_eq!(params.zero.to_bits(), expected.zero.to_bits());
                for (&code, &x) in codes.iter().zip(&group) {
                    prop_assert_eq!(code, expected.code(bits, x));
                }
            }
        }

        /// The same of a promoted channel, with its range, in f16 and in f32, whose scales saturate.
        #[test]
        fn fast_promotion_is_that_of_the_core(
            group in elements(),
            finite in any::<bool>(),
            wide in any::<bool>(),
        ) {
            let replace = |&x: &f32| if finite && !x.is_finite() { 0.5 } else { x };
            let group = if wide {
                group.iter().map(replace).collect()
            } else {
                rounded(&group, finite)
            };
            let expected = GroupParams::of_promoted(group.iter().copied());
            for isa in Isa::available() {
                let (range, params, codes) = isa.run(Promote(&group));
                prop_assert_eq!(
                    range.to_bits(),
                    quantizer::range(group.iter().copied()).to_bits()
                );
                prop_assert_eq!(params.scale, expected.scale);
                prop_assert_eq!(params.zero.to_bits(), expected.zero.to_bits());
                for (&code, &x) in codes.iter().zip(&group) {
                    prop_assert_eq!(code, expected.promoted_code(x));
                }
            }
        }
    }
}
