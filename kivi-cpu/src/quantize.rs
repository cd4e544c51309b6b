//! Quantizing from the residual into pages.

use crate::{
    Cpu,
    cache::{LayerCache, Page, Slot, Tensor},
    isa::{Kernel, Simd},
};
use half::f16;
use kivi_core::{Bits, Error, PageId, Result, SequencePlan, quantizer::GroupParams, words_for};
use rayon::prelude::*;
use std::ops::Range;

/// The longest group.
const MAX_GROUP: usize = 128;

/// The part of one page that a step fills.
struct Work {
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
        let geometry = layer.geometry;
        let first = |range: &Range<usize>| (!range.is_empty()).then_some(range.start);
        let start = first(&keys).into_iter().chain(first(&values)).min().unwrap_or_default();
        let indices = geometry.locate(start).0..=geometry.locate(keys.end.max(values.end) - 1).0;
        let mut work = Vec::with_capacity(indices.clone().count());
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
        for Work { page, id, .. } in work {
            *layer.page_mut("quantize", id)? = page;
        }
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

/// Per channel, groups of `G` consecutive tokens.
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
    let Tensor::Packed { codes, scales, zeros } = &mut page.keys else {
        return;
    };
    let (page_words, group_words) = (words_for(bits, g.page_tokens), words_for(bits, g.group));
    let (mut tokens, mut words) = ([0.0; MAX_GROUP], [0; MAX_GROUP / 4]);
    for position in range.clone().step_by(g.group) {
        let group = (position - start) / g.group;
        for head in 0..g.kv_heads {
            for channel in 0..g.head_dim {
                let first = slot.key_index(head, position) + channel * g.group;
                let tokens = &mut tokens[..g.group];
                slot.ring.keys.load(simd, first..first + g.group, tokens);
                let params = pack(bits, tokens, &mut words);
                let at = (head * (g.page_tokens / g.group) + group) * g.head_dim + channel;
                (scales[at], zeros[at]) = (params.scale, params.zero);
                for (word, &code) in words[..group_words].iter().enumerate() {
                    let row = head * page_words + group * group_words + word;
                    codes[row * g.head_dim + channel] = code;
                }
            }
        }
    }
    page.filled.keys = range.end - start;
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
    let Tensor::Packed { codes, scales, zeros } = &mut page.values else {
        return;
    };
    let (row_words, groups) = (words_for(bits, g.head_dim), g.head_dim.div_ceil(g.group));
    let mut channels = [0.0; MAX_GROUP];
    for position in range.clone() {
        for head in 0..g.kv_heads {
            let row = head * g.page_tokens + position - start;
            for group in 0..groups {
                let first = group * g.group;
                let length = g.group.min(g.head_dim - first);
                let from = slot.value_index(head, position) + first;
                let channels = &mut channels[..length];
                slot.ring.values.load(simd, from..from + length, channels);
                let word = row * row_words + first / bits.codes_per_word();
                let words = &mut codes[word..word + words_for(bits, length)];
                let params: GroupParams = pack(bits, channels, words);
                (scales[row * groups + group], zeros[row * groups + group]) =
                    (params.scale, params.zero);
            }
        }
    }
    page.filled.values = range.end - start;
}

/// Quantizes one group into words, as [`kivi_core::quantizer`] defines it.
///
/// The code is guessed with a reciprocal, which is off by at most one, and then put right by the
/// exact thresholds, without a branch.
#[inline(always)]
fn pack(bits: Bits, group: &[f32], words: &mut [u32]) -> GroupParams {
    let params = GroupParams::of(bits, group.iter().copied());
    let words = &mut words[..words_for(bits, group.len())];
    if params.scale == f16::ZERO {
        words.fill(0);
        return params;
    }
    let (scale, zero) = (params.scale.to_f32(), params.zero.to_f32());
    let (inverse, top) = (1.0 / scale, bits.levels() as f32);
    for (word, members) in words.iter_mut().zip(group.chunks(bits.codes_per_word())) {
        let mut packed = 0;
        for (i, &x) in members.iter().enumerate() {
            let distance = x - zero;
            let guess = (distance * inverse).clamp(0.0, top) as u32;
            // The exact quotient, rounded down, is `guess` or one beside it, and the code is that
            // or one more.
            let mut code = guess.saturating_sub(1);
            for _ in 0..3 {
                code += u32::from(code < bits.levels() && above(code, distance, scale));
            }
            packed |= code << (bits.get() * i);
        }
        *word = packed;
    }
    params
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
    use kivi_core::code_at;
    use proptest::prelude::*;

    proptest! {
        /// The fast quantizer agrees with the definition on every bit, ties and extremes included.
        #[test]
        fn pack_is_the_core_quantizer(
            group in prop::collection::vec(
                prop_oneof![
                    -1f32..1.0, -70000f32..70000.0, (-8i8..8).prop_map(f32::from),
                    Just(0.0), Just(f32::NAN), Just(f32::INFINITY), Just(1e-6), Just(-3.4e38),
                ],
                1..=MAX_GROUP,
            ),
            finite in any::<bool>(),
            bits in prop::sample::select(&Bits::ALL),
        ) {
            let group: Vec<f32> = group
                .iter()
                .map(|&x| if finite && !x.is_finite() { 0.5 } else { f16::from_f32(x).to_f32() })
                .collect();
            let expected = GroupParams::of(bits, group.iter().copied());
            let mut words = [0; MAX_GROUP / 4];
            let params = pack(bits, &group, &mut words);
            prop_assert_eq!(params.scale, expected.scale);
            prop_assert_eq!(params.zero.to_bits(), expected.zero.to_bits());
            for (i, &x) in group.iter().enumerate() {
                prop_assert_eq!(code_at(bits, &words, i), expected.code(bits, x));
            }
        }
    }
}
