//! Export to and import from the canonical form. The conversion happens on the host, on a copy of the
//! layer's arena.

use crate::{
    GpuCache, Shape, Store,
    launch::{Arena, Device},
    memory::{GroupMemory, push_run},
    order,
    place::Places,
};
use cubecl::prelude::*;
use half::{bf16, f16};
use kivi_core::{
    CanonicalLayer, FullTokens, KeyValue, PackedKeys, PackedValues, PageId, Result, SequenceLayout,
    quantizer::GroupParams,
};
use std::ops::Range;

/// Words of one layer, and where a sequence lies in them.
struct Reader<'a> {
    words: &'a [u32],
    shape: Shape,
    find: Places<'a>,
}

fn params(word: u32) -> GroupParams {
    GroupParams { scale: f16::from_bits(word as u16), zero: f16::from_bits((word >> 16) as u16) }
}

fn word_of(params: GroupParams) -> u32 {
    u32::from(params.scale.to_bits()) | u32::from(params.zero.to_bits()) << 16
}

fn decode(store: Store, words: &[u32], out: &mut Vec<f32>) {
    for &word in words {
        let halves = [word as u16, (word >> 16) as u16];
        match store {
            Store::F16 => out.extend(halves.map(|half| f16::from_bits(half).to_f32())),
            Store::Bf16 => out.extend(halves.map(|half| bf16::from_bits(half).to_f32())),
            Store::F32 => out.push(f32::from_bits(word)),
        }
    }
}

fn encode(store: Store, elements: &[f32], out: &mut Vec<u32>) {
    let pair = |bits: fn(f32) -> u16, pair: &[f32; 2]| {
        u32::from(bits(pair[0])) | u32::from(bits(pair[1])) << 16
    };
    let pairs = elements.as_chunks::<2>().0.iter();
    match store {
        Store::F16 => out.extend(pairs.map(|x| pair(|x| f16::from_f32(x).to_bits(), x))),
        Store::Bf16 => out.extend(pairs.map(|x| pair(|x| bf16::from_f32(x).to_bits(), x))),
        Store::F32 => out.extend(elements.iter().map(|x| x.to_bits())),
    }
}

impl Reader<'_> {
    fn keys(&self, out: &mut PackedKeys) -> Result<()> {
        let shape = self.shape;
        let bits = shape.key_bits;
        for group in 0..out.tokens / shape.group {
            let (page, token) = self.find.page(shape.sinks + group * shape.group)?;
            for head in 0..shape.kv_heads {
                let own = head * shape.groups() + token / shape.group;
                let codes = &self.words[page + own * shape.key_group_words()..];
                let at = page + shape.key_params() + own * shape.head_dim;
                for channel in 0..shape.head_dim {
                    out.set_params(head, group, channel, params(self.words[at + channel]));
                    for i in 0..shape.group {
                        let code = order::key_place(&shape, i, channel).get(bits, codes);
                        out.set_code(head, group * shape.group + i, channel, code);
                    }
                }
                let groups = out.tokens / shape.group;
                if let Some(plane) = &mut out.promoted {
                    let (masks, lows) = (shape.mask_words(), shape.low_group_words());
                    let from = page + shape.key_masks() + own * masks;
                    plane.mask[(head * groups + group) * masks..][..masks]
                        .copy_from_slice(&self.words[from..from + masks]);
                    let from = page + shape.key_lows() + own * lows;
                    plane.lo[(head * groups + group) * lows..][..lows]
                        .copy_from_slice(&self.words[from..from + lows]);
                }
            }
        }
        Ok(())
    }

    fn values(&self, out: &mut PackedValues) -> Result<()> {
        let shape = self.shape;
        for token in 0..out.tokens {
            let (page, place) = self.find.page(shape.sinks + token)?;
            for head in 0..shape.kv_heads {
                let codes = page
                    + shape.value_codes()
                    + head * shape.value_rows() * shape.value_row_words();
                let codes = &self.words[codes..];
                let at = page
                    + shape.value_params()
                    + (head * shape.page_tokens + place) * shape.channel_groups();
                for group in 0..shape.channel_groups() {
                    out.set_params(head, token, group, params(self.words[at + group]));
                }
                for channel in 0..shape.head_dim {
                    let code =
                        order::value_place(&shape, place, channel).get(shape.value_bits, codes);
                    out.set_code(head, token, channel, code);
                }
            }
        }
        Ok(())
    }

    fn full(&self, range: Range<usize>, keys: bool) -> Result<FullTokens> {
        let shape = &self.shape;
        let (width, store) = match keys {
            true => (shape.key_width(), shape.key_store),
            false => (shape.value_width(), shape.value_store),
        };
        let (head_words, tokens) = (width / shape.kv_heads, range.len());
        let starts: Result<Vec<usize>> =
            range.clone().map(|position| self.find.full(position, keys)).collect();
        let starts = starts?;
        let mut data = Vec::with_capacity(tokens * shape.kv_heads * shape.head_dim);
        for head in 0..shape.kv_heads {
            for start in &starts {
                let from = start + head * head_words;
                decode(store, &self.words[from..from + head_words], &mut data);
            }
        }
        Ok(FullTokens { first: range.start, tokens, data })
    }
}

/// Where `dequantize` finds every token of a sequence.
pub(crate) fn places(
    memory: &GroupMemory,
    group: usize,
    layout: &SequenceLayout,
    keys: bool,
) -> Result<Vec<u32>> {
    let find = Places::new("dequantize", memory, group, layout);
    let (sinks, packs) = (memory.shape.sinks, memory.shape.packs());
    let (packs, packed) = match keys {
        true => (packs.keys, layout.packed.keys),
        false => (packs.values, layout.packed.values),
    };
    let mut places = Vec::with_capacity(3 * layout.tokens);
    for position in 0..layout.tokens {
        let place = if packs && (sinks..packed).contains(&position) {
            let (page, token) = find.page(position)?;
            [page, token, 1]
        } else {
            [find.full(position, keys)?, 0, 0]
        };
        places.extend(place.map(|word| word as u32));
    }
    Ok(places)
}

/// Reads a layer of a sequence.
pub(crate) fn export<R: Runtime>(
    device: &Device<R>,
    cache: &GpuCache,
    layer: usize,
    layout: &SequenceLayout,
) -> Result<CanonicalLayer> {
    let (arena, memory) = cache.layer("export", layer)?;
    layout.check("export", &cache.spec)?;
    let bytes = device.read("export", arena.handle.clone())?;
    let find = Places::new("export", memory, cache.spec.group_of(layer), layout);
    let reader = Reader { words: u32::from_bytes(&bytes), shape: memory.shape, find };
    let (spec, sinks) = (&memory.spec, memory.shape.sinks);
    let quantized = layout.packed.map(|end| end - sinks);
    let shape = |tokens| [spec.kv_heads, tokens, spec.head_dim];
    let group = memory.shape.group;
    let mut packed_keys = PackedKeys::zeroed_for(spec.format.keys, group, shape(quantized.keys))?;
    if let Some(keys) = &mut packed_keys {
        reader.keys(keys)?;
    }
    let bits = spec.format.values.bits;
    let packed_values = bits.map(|bits| PackedValues::zeroed(bits, group, shape(quantized.values)));
    let mut packed_values = packed_values.transpose()?;
    if let Some(values) = &mut packed_values {
        reader.values(values)?;
    }
    let first = |packs: bool, kept: usize| if packs { kept } else { sinks };
    let first = layout.kept.zip(spec.packs()).map(|(kept, packs)| first(packs, kept));
    let tail = |first: usize| first..layout.tokens.max(first);
    let in_sinks = 0..layout.tokens.min(sinks);
    Ok(CanonicalLayer {
        sinks: KeyValue::new(reader.full(in_sinks.clone(), true)?, reader.full(in_sinks, false)?),
        packed_keys,
        packed_values,
        full: KeyValue::new(
            reader.full(tail(first.keys), true)?,
            reader.full(tail(first.values), false)?,
        ),
    })
}

/// Writes a layer of an adopted sequence.
pub(crate) fn import<R: Runtime>(
    device: &Device<R>,
    cache: &mut GpuCache,
    layer: usize,
    layout: &SequenceLayout,
    contents: &CanonicalLayer,
) -> Result<()> {
    let (_, memory) = cache.layer("import", layer)?;
    contents.check(&cache.spec, &memory.spec, layout)?;
    cache.adopt(device, layout)?;
    let (arena, memory) = cache.layer("import", layer)?;
    let shape = memory.shape;
    let group = cache.spec.group_of(layer);
    let find = Places::new("import", memory, group, layout);
    let (mut words, mut runs) = (Vec::new(), Vec::new());

    // Pages whole, so that nothing of an earlier owner stays. Runs are copied at the same time, so no
    // two of them may have a word in common: tokens that lie in a page are put into its run.
    let mut page_starts = vec![0; find.table.len()];
    for (index, _) in find.table.iter().enumerate().filter(|&(_, &page)| page != PageId::DROPPED) {
        let (page, _) = find.page(shape.sinks + index * shape.page_tokens)?;
        let start = words.len();
        page_starts[index] = start;
        words.resize(start + shape.page_words(), 0);
        push_run(&mut runs, start, page, shape.page_words());
        fill_page(&shape, index * shape.page_tokens, contents, &mut words[start..]);
    }
    let mut row = Vec::new();
    for (tokens, keys) in [
        (&contents.sinks.keys, true),
        (&contents.full.keys, true),
        (&contents.sinks.values, false),
        (&contents.full.values, false),
    ] {
        let (store, packs) = match keys {
            true => (shape.key_store, shape.packs().keys),
            false => (shape.value_store, shape.packs().values),
        };
        for token in 0..tokens.tokens {
            row.clear();
            for head in 0..shape.kv_heads {
                let from = (head * tokens.tokens + token) * shape.head_dim;
                encode(store, &tokens.data[from..from + shape.head_dim], &mut row);
            }
            let position = tokens.first + token;
            let to = find.full(position, keys)?;
            if position >= shape.sinks && !packs {
                let (page, _) = find.page(position)?;
                let index = (position - shape.sinks) / shape.page_tokens;
                words[page_starts[index] + (to - page)..][..row.len()].copy_from_slice(&row);
            } else {
                push_run(&mut runs, words.len(), to, row.len());
                words.extend_from_slice(&row);
            }
        }
    }
    if words.is_empty() {
        return Ok(());
    }
    let length = words.len();
    let source =
        Arena { handle: device.client.create_from_slice(u32::as_bytes(&words)), words: length };
    device.copy_between(&source, arena, &runs)
}

/// The codes and parameters of the page whose first token is `first` after the sinks.
fn fill_page(shape: &Shape, first: usize, contents: &CanonicalLayer, page: &mut [u32]) {
    if let Some(keys) = &contents.packed_keys {
        let groups = keys.tokens / shape.group;
        let own = first / shape.group..groups.min(first / shape.group + shape.groups());
        for (local, group) in own.enumerate() {
            for head in 0..shape.kv_heads {
                let at = head * shape.groups() + local;
                let params = shape.key_params() + at * shape.head_dim;
                for channel in 0..shape.head_dim {
                    page[params + channel] = word_of(keys.params(head, group, channel));
                    let codes = &mut page[at * shape.key_group_words()..];
                    for i in 0..shape.group {
                        let code = keys.code(head, group * shape.group + i, channel);
                        order::key_place(shape, i, channel).set(codes, code);
                    }
                }
                if let Some(plane) = &keys.promoted {
                    let (masks, lows) = (shape.mask_words(), shape.low_group_words());
                    page[shape.key_masks() + at * masks..][..masks]
                        .copy_from_slice(&plane.mask[(head * groups + group) * masks..][..masks]);
                    page[shape.key_lows() + at * lows..][..lows]
                        .copy_from_slice(&plane.lo[(head * groups + group) * lows..][..lows]);
                }
            }
        }
    }
    if let Some(values) = &contents.packed_values {
        for token in first..values.tokens.min(first + shape.page_tokens) {
            let place = token - first;
            for head in 0..shape.kv_heads {
                let at = shape.value_params()
                    + (head * shape.page_tokens + place) * shape.channel_groups();
                for group in 0..shape.channel_groups() {
                    page[at + group] = word_of(values.params(head, token, group));
                }
                let codes =
                    shape.value_codes() + head * shape.value_rows() * shape.value_row_words();
                for channel in 0..shape.head_dim {
                    let code = values.code(head, token, channel);
                    order::value_place(shape, place, channel).set(&mut page[codes..], code);
                }
            }
        }
    }
}
