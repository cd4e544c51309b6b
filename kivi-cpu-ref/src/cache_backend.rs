//! The cache operations.

use crate::{
    Cache, CpuRef, Matrix, NAME,
    cache::{Slot, Tokens},
};
use kivi_core::{
    Attention, CacheBackend, CanonicalLayer, Capabilities, Error, FullTokens, KeyValue, PackedKeys,
    PackedValues, PageId, PoolSpec, Result, SequenceLayout, SequencePlan, StepPlan, StoreDtype,
    expect_len, memory::MeasuredBytes, quantizer::GroupParams,
};
use std::ops::Range;

impl CacheBackend for CpuRef {
    type Buffer = Matrix;
    type Cache = Cache;

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(NAME, "scalar reference, 1 thread", true).with_key_bias()
    }

    fn upload(&self, rows: usize, width: usize, data: &[f32]) -> Result<Matrix> {
        expect_len("upload", "data", data.len(), rows * width)?;
        Ok(Matrix::new(rows, width, data.to_vec()))
    }

    fn read(&self, buffer: &Matrix, out: &mut [f32]) -> Result<()> {
        expect_len("read", "output", out.len(), buffer.data.len())?;
        out.copy_from_slice(&buffer.data);
        Ok(())
    }

    fn shape(&self, buffer: &Matrix) -> [usize; 2] {
        [buffer.rows, buffer.width]
    }

    fn create_cache(&self, spec: &PoolSpec) -> Result<Cache> {
        Ok(Cache::new(spec))
    }

    fn begin_step(&self, cache: &mut Cache, plan: &StepPlan) -> Result<()> {
        let layers_of = |cache: &Cache, group: usize| -> Vec<usize> {
            (0..cache.layers.len()).filter(|&layer| cache.spec.group_of(layer) == group).collect()
        };
        for sequence in &plan.sequences {
            sequence.before.check("begin step", &cache.spec)?;
        }
        for freed in &plan.freed {
            for layer in layers_of(cache, freed.group) {
                cache.free_page(layer, freed.page);
            }
        }
        for &slot in &plan.freed_slots {
            for layer in 0..cache.layers.len() {
                *cache.slot_mut(layer, slot) = Slot::default();
            }
        }
        for sequence in &plan.sequences {
            cache.make_room(&sequence.before)?;
        }
        for copy in &plan.copies {
            for layer in layers_of(cache, copy.group) {
                *cache.page_mut(layer, copy.to)? = cache.page(layer, copy.from)?.clone();
            }
        }
        Ok(())
    }

    fn append(
        &self,
        cache: &mut Cache,
        layer: usize,
        plan: &StepPlan,
        keys: &Matrix,
        values: &Matrix,
    ) -> Result<()> {
        cache.expect_layer("append", layer)?;
        let spec = cache.layers[layer].spec.clone();
        let width = spec.kv_heads * spec.head_dim;
        keys.expect("append", plan.rows, width)?;
        values.expect("append", plan.rows, width)?;
        let sinks = cache.spec.config().sink_length();
        for sequence in &plan.sequences {
            for (row, position) in sequence.rows.clone().zip(sequence.positions()) {
                let key = round(keys.row(row), spec.format.keys.store, &mut cache.saturated);
                let value = round(values.row(row), spec.format.values.store, &mut cache.saturated);
                let located = if position < sinks {
                    None
                } else {
                    cache.locate(layer, &sequence.before, position)
                };
                let put = |cache: &mut Cache, paged: bool, is_key: bool, token: Vec<f32>| {
                    let full = match located.filter(|_| paged) {
                        Some((page, _)) => &mut cache.page_mut(layer, page)?.full,
                        None => &mut cache.slot_mut(layer, sequence.before.slot).full,
                    };
                    let tokens = if is_key { &mut full.keys } else { &mut full.values };
                    tokens.insert(position, token);
                    Ok::<_, Error>(())
                };
                put(cache, spec.format.keys.bits.is_none(), true, key)?;
                put(cache, spec.format.values.bits.is_none(), false, value)?;
            }
        }
        Ok(())
    }

    fn quantize(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        cache.expect_layer("quantize", layer)?;
        for sequence in &plan.sequences {
            if cache.layers[layer].spec.format.keys.bits.is_some() {
                quantize_keys(cache, layer, sequence)?;
            }
            if cache.layers[layer].spec.format.values.bits.is_some() {
                quantize_values(cache, layer, sequence)?;
            }
        }
        Ok(())
    }

    fn attend(
        &self,
        cache: &Cache,
        layer: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &Matrix,
    ) -> Result<Matrix> {
        cache.expect_layer("attend", layer)?;
        let spec = &cache.layers[layer].spec;
        attention.validate(spec)?;
        let width = attention.query_heads * spec.head_dim;
        queries.expect("attend", plan.rows, width)?;
        let mut data = Vec::with_capacity(plan.rows * width);
        for sequence in &plan.sequences {
            for row in 0..sequence.rows.len() {
                data.extend(self.attend_row(cache, layer, sequence, attention, row, queries)?);
            }
        }
        Ok(Matrix::new(plan.rows, width, data))
    }

    fn release(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        cache.expect_layer("release", layer)?;
        let sinks = cache.spec.config().sink_length();
        for sequence in &plan.sequences {
            let slot = cache.slot_mut(layer, sequence.before.slot);
            slot.capacity = sequence.capacity;
            let outlives = |position: usize, kept: usize| position < sinks || position >= kept;
            slot.full.keys.retain(|&position, _| outlives(position, sequence.kept.keys));
            slot.full.values.retain(|&position, _| outlives(position, sequence.kept.values));
        }
        Ok(())
    }

    fn copy_slot(&self, cache: &mut Cache, from: usize, to: &SequenceLayout) -> Result<()> {
        to.check("copy slot", &cache.spec)?;
        for layer in 0..cache.layers.len() {
            let mut copy = cache.slot_mut(layer, from).clone();
            copy.capacity = to.capacity;
            *cache.slot_mut(layer, to.slot) = copy;
        }
        Ok(())
    }

    fn export(
        &self,
        cache: &Cache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer> {
        cache.expect_layer("export", layer)?;
        layout.check("export", &cache.spec)?;
        let spec = &cache.layers[layer].spec;
        let (sinks, g) = (cache.spec.config().sink_length(), cache.spec.config().group_size());
        let quantized = layout.packed.map(|end| end - sinks);
        let shape = |tokens| [spec.kv_heads, tokens, spec.head_dim];
        let page_of = |position| {
            let located = cache.locate(layer, layout, position);
            let (page, token) =
                located.ok_or_else(|| Error::request("export", "a page is gone"))?;
            Ok::<_, Error>((cache.page(layer, page)?, token))
        };

        let mut packed_keys = PackedKeys::zeroed_for(spec.format.keys, g, shape(quantized.keys))?;
        if let Some(all) = &mut packed_keys {
            for group in 0..quantized.keys / g {
                let (page, index) = page_of(sinks + group * g)?;
                if let Some(keys) = &page.keys {
                    all.copy_group(group, keys, index / g);
                }
            }
        }
        let mut packed_values = None;
        if let Some(bits) = spec.format.values.bits {
            let mut all = PackedValues::zeroed(bits, g, shape(quantized.values))?;
            for token in 0..quantized.values {
                let (page, index) = page_of(sinks + token)?;
                let Some(values) = &page.values else { continue };
                for head in 0..spec.kv_heads {
                    for channel in 0..spec.head_dim {
                        let params = values.params(head, index, channel / g);
                        all.set_params(head, token, channel / g, params);
                        all.set_code(head, token, channel, values.code(head, index, channel));
                    }
                }
            }
            packed_values = Some(all);
        }

        let gather = |range: Range<usize>, keys: bool| {
            let rows: Result<Vec<Vec<f32>>> = range
                .clone()
                .map(|position| match keys {
                    true => cache.key(layer, layout, position, 0),
                    false => cache.value(layer, layout, position, 0),
                })
                .collect();
            let rows = rows?;
            let heads = (0..spec.kv_heads).flat_map(|head| {
                rows.iter().flat_map(move |row| &row[head * spec.head_dim..][..spec.head_dim])
            });
            let data = heads.copied().collect();
            Ok::<_, Error>(FullTokens { first: range.start, tokens: range.len(), data })
        };
        let first = |bits: Option<_>, kept: usize| if bits.is_some() { kept } else { sinks };
        let tail = |first: usize| first..layout.tokens.max(first);
        let in_sinks = 0..layout.tokens.min(sinks);
        Ok(CanonicalLayer {
            sinks: KeyValue::new(gather(in_sinks.clone(), true)?, gather(in_sinks, false)?),
            packed_keys,
            packed_values,
            full: KeyValue::new(
                gather(tail(first(spec.format.keys.bits, layout.kept.keys)), true)?,
                gather(tail(first(spec.format.values.bits, layout.kept.values)), false)?,
            ),
        })
    }

    fn import(
        &self,
        cache: &mut Cache,
        layer: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        cache.expect_layer("import", layer)?;
        contents.check(&cache.spec, &cache.layers[layer].spec, layout)?;
        cache.make_room(layout)?;
        for &page in &layout.tables[cache.spec.group_of(layer)] {
            if page != PageId::DROPPED {
                // It may hold what its last owner left.
                let page = cache.page_mut(layer, page)?;
                (page.full, page.filled) = (KeyValue::default(), KeyValue::default());
            }
        }
        let spec = cache.layers[layer].spec.clone();
        let (sinks, g) = (cache.spec.config().sink_length(), cache.spec.config().group_size());
        let locate = |cache: &Cache, position| {
            let located = cache.locate(layer, layout, position);
            located.ok_or_else(|| Error::request("import", format!("no page for {position}")))
        };

        if let Some(keys) = &contents.packed_keys {
            for group in 0..keys.tokens / g {
                let (page, index) = locate(cache, sinks + group * g)?;
                let page = cache.page_mut(layer, page)?;
                page.filled.keys = index + g;
                if let Some(own) = &mut page.keys {
                    own.copy_group(index / g, keys, group);
                }
            }
        }
        if let Some(values) = &contents.packed_values {
            for token in 0..values.tokens {
                let (page, index) = locate(cache, sinks + token)?;
                let page = cache.page_mut(layer, page)?;
                page.filled.values = index + 1;
                let Some(own) = &mut page.values else {
                    continue;
                };
                for head in 0..spec.kv_heads {
                    for channel in 0..spec.head_dim {
                        let params = values.params(head, token, channel / g);
                        own.set_params(head, index, channel / g, params);
                        own.set_code(head, index, channel, values.code(head, token, channel));
                    }
                }
            }
        }
        let width = spec.head_dim;
        for (tokens, is_key) in [
            (&contents.sinks.keys, true),
            (&contents.full.keys, true),
            (&contents.sinks.values, false),
            (&contents.full.values, false),
        ] {
            let paged = if is_key { spec.format.keys } else { spec.format.values }.bits.is_none();
            for token in 0..tokens.tokens {
                let position = tokens.first + token;
                let row = (0..spec.kv_heads).flat_map(|head| {
                    let start = (head * tokens.tokens + token) * width;
                    tokens.data[start..start + width].iter().copied()
                });
                let row = row.collect();
                let full = if paged && position >= sinks {
                    let (page, _) = locate(cache, position)?;
                    &mut cache.page_mut(layer, page)?.full
                } else {
                    &mut cache.slot_mut(layer, layout.slot).full
                };
                let own = if is_key { &mut full.keys } else { &mut full.values };
                own.insert(position, row);
            }
        }
        Ok(())
    }

    fn measure(&self, cache: &Cache) -> MeasuredBytes {
        let mut total = MeasuredBytes::default();
        let sinks = cache.spec.config().sink_length();
        let page_tokens = KeyValue::both(cache.spec.config().page_tokens());
        for layer in &cache.layers {
            let spec = &layer.spec;
            let packs = spec.packs();
            let full = |tokens: KeyValue<usize>| cache.spec.full_bytes(spec, tokens);
            for page in layer.pages.iter().flatten() {
                let codes = cache.spec.code_bytes(spec, page_tokens);
                let params = cache.spec.param_bytes(spec, page_tokens);
                let masks = cache.spec.mask_bytes(spec, page_tokens);
                let paged = |packs: bool| if packs { 0 } else { page_tokens.keys };
                total.allocated += codes + params + masks + full(packs.map(paged));
                total.codes += cache.spec.code_bytes(spec, page.filled);
                total.scales_and_zeros += cache.spec.param_bytes(spec, page.filled);
                total.channel_masks += cache.spec.mask_bytes(spec, page.filled);
                total.full_precision +=
                    full(KeyValue::new(page.full.keys.len(), page.full.values.len()));
            }
            for slot in layer.slots.iter().filter(|slot| slot.allocated) {
                total.full_precision +=
                    full(KeyValue::new(slot.full.keys.len(), slot.full.values.len()));
                let room = slot.capacity.zip(packs).map(|(n, packs)| if packs { n } else { 0 });
                total.allocated += full(room.map(|room| room + sinks));
            }
        }
        total
    }

    fn saturated(&self, cache: &Cache) -> u64 {
        cache.saturated
    }
}

/// A token rounded to the store type; what had to be saturated is counted.
fn round(token: &[f32], store: StoreDtype, saturated: &mut u64) -> Vec<f32> {
    *saturated += token.iter().filter(|&&x| store.saturates(x)).count() as u64;
    token.iter().map(|&x| store.round(x)).collect()
}

/// Per channel, groups of `G` consecutive tokens; which channels are promoted is decided per group.
fn quantize_keys(cache: &mut Cache, layer: usize, sequence: &SequencePlan) -> Result<()> {
    let spec = cache.layers[layer].spec.clone();
    let g = cache.spec.config().group_size();
    for start in sequence.quantize.keys.clone().step_by(g) {
        let slot = cache.slot_mut(layer, sequence.before.slot);
        let group: Result<Vec<Vec<f32>>> =
            (start..start + g).map(|position| token(&slot.full.keys, position)).collect();
        let group = group?;
        let Some((page, first)) = cache.locate(layer, &sequence.before, start) else {
            continue;
        };
        let page = cache.page_mut(layer, page)?;
        page.filled.keys = first + g;
        let Some(packed) = &mut page.keys else {
            continue;
        };
        for head in 0..spec.kv_heads {
            packed.quantize_group(head, first / g, |offset, channel| {
                group[offset][head * spec.head_dim + channel]
            });
        }
    }
    Ok(())
}

/// Per token, groups of `G` consecutive channels.
fn quantize_values(cache: &mut Cache, layer: usize, sequence: &SequencePlan) -> Result<()> {
    let spec = cache.layers[layer].spec.clone();
    let g = cache.spec.config().group_size();
    let Some(bits) = spec.format.values.bits else {
        return Ok(());
    };
    for position in sequence.quantize.values.clone() {
        let slot = cache.slot_mut(layer, sequence.before.slot);
        let value = token(&slot.full.values, position)?;
        let Some((page, index)) = cache.locate(layer, &sequence.before, position) else {
            continue;
        };
        let page = cache.page_mut(layer, page)?;
        page.filled.values = index + 1;
        let Some(packed) = &mut page.values else {
            continue;
        };
        for head in 0..spec.kv_heads {
            let channels = &value[head * spec.head_dim..(head + 1) * spec.head_dim];
            for (group, members) in channels.chunks(g).enumerate() {
                let params = GroupParams::of(bits, members.iter().copied());
                packed.set_params(head, index, group, params);
                for (offset, &x) in members.iter().enumerate() {
                    packed.set_code(head, index, group * g + offset, params.code(bits, x));
                }
            }
        }
    }
    Ok(())
}

fn token(tokens: &Tokens, position: usize) -> Result<Vec<f32>> {
    let found = tokens.get(&position).cloned();
    found.ok_or_else(|| Error::request("quantize", format!("no token at position {position}")))
}
