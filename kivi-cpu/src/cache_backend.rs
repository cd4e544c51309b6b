//! The cache operations.

use crate::{
    Cache, Cpu, Matrix, NAME,
    cache::{LayerCache, Tensor},
};
use kivi_core::{
    Attention, CacheBackend, CanonicalLayer, Capabilities, Error, PoolSpec, Result, SequenceLayout,
    SequencePlan, StepPlan, expect_len, memory::MeasuredBytes,
};

impl CacheBackend for Cpu {
    type Buffer = Matrix;
    type Cache = Cache;

    fn capabilities(&self) -> Capabilities {
        let threads = self.threads();
        let plural = if threads == 1 { "" } else { "s" };
        Capabilities::new(NAME, format!("{threads} thread{plural}, {}", self.isa), true)
            .with_key_bias()
    }

    fn upload(&self, rows: usize, width: usize, data: &[f32]) -> Result<Matrix> {
        expect_len("upload", "data", data.len(), rows * width)?;
        let mut matrix = self.matrix(rows, width)?;
        matrix.data.copy_from_slice(data);
        Ok(matrix)
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
        cache.begin_step(plan)
    }

    fn append(
        &self,
        cache: &mut Cache,
        layer: usize,
        plan: &StepPlan,
        keys: &Matrix,
        values: &Matrix,
    ) -> Result<()> {
        let group = cache.layer("append", layer).map(|_| cache.spec.group_of(layer))?;
        let layer = cache.layer_mut("append", layer)?;
        let width = layer.geometry.width();
        keys.expect("append", plan.rows, width)?;
        values.expect("append", plan.rows, width)?;
        let mut saturated = 0;
        for sequence in &plan.sequences {
            saturated += append_sequence(layer, group, sequence, keys, values)?;
        }
        cache.saturated += saturated;
        Ok(())
    }

    fn quantize(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        let group = cache.layer("quantize", layer).map(|_| cache.spec.group_of(layer))?;
        let layer = cache.layer_mut("quantize", layer)?;
        plan.sequences
            .iter()
            .try_for_each(|sequence| self.quantize_sequence(layer, group, sequence))
    }

    fn attend(
        &self,
        cache: &Cache,
        layer: usize,
        plan: &StepPlan,
        attention: &Attention,
        queries: &Matrix,
    ) -> Result<Matrix> {
        let group = cache.layer("attend", layer).map(|_| cache.spec.group_of(layer))?;
        let layer = cache.layer("attend", layer)?;
        attention.validate(&layer.spec)?;
        let width = attention.query_heads * layer.geometry.head_dim;
        queries.expect("attend", plan.rows, width)?;
        self.attend_step(layer, group, plan, attention, queries)
    }

    fn release(&self, cache: &mut Cache, layer: usize, plan: &StepPlan) -> Result<()> {
        let layer = cache.layer_mut("release", layer)?;
        for sequence in &plan.sequences {
            let slot = layer.slot_mut("release", sequence.before.slot)?;
            slot.release(sequence.kept, sequence.capacity);
        }
        Ok(())
    }

    fn copy_slot(&self, cache: &mut Cache, from: usize, to: &SequenceLayout) -> Result<()> {
        to.check("copy slot", &cache.spec)?;
        for layer in &mut cache.layers {
            // A sequence that has not made a step yet has no slot.
            let copy = layer.slots.get(from).and_then(Option::as_ref);
            let copy = copy.map(|slot| slot.copy_for(to));
            if layer.slots.len() <= to.slot {
                layer.slots.resize_with(to.slot + 1, || None);
            }
            layer.slots[to.slot] = copy;
        }
        Ok(())
    }

    fn export(
        &self,
        cache: &Cache,
        layer: usize,
        layout: &SequenceLayout,
    ) -> Result<CanonicalLayer> {
        layout.check("export", &cache.spec)?;
        let group = cache.layer("export", layer).map(|_| cache.spec.group_of(layer))?;
        cache.layer("export", layer)?.export(group, layout)
    }

    fn import(
        &self,
        cache: &mut Cache,
        layer: usize,
        layout: &SequenceLayout,
        contents: &CanonicalLayer,
    ) -> Result<()> {
        let spec = &cache.layer("import", layer)?.spec;
        contents.check(&cache.spec, spec, layout)?;
        let group = cache.spec.group_of(layer);
        cache.layer_mut("import", layer)?.import(group, layout, contents)
    }

    fn measure(&self, cache: &Cache) -> MeasuredBytes {
        cache.measure()
    }

    fn saturated(&self, cache: &Cache) -> u64 {
        cache.saturated
    }
}

/// Stores the rows of one sequence in full precision: sinks and residual in the slot, uncompressed
/// formats in pages. Returns how many elements were saturated.
fn append_sequence(
    layer: &mut LayerCache,
    group: usize,
    sequence: &SequencePlan,
    keys: &Matrix,
    values: &Matrix,
) -> Result<u64> {
    let (g, format) = (layer.geometry, layer.spec.format);
    let table = &sequence.before.tables[group];
    let tiles = g.page_tokens / g.group;
    layer.slot_mut("append", sequence.before.slot)?.make_room();
    let mut saturated = 0;
    for (row, position) in sequence.rows.clone().zip(sequence.positions()) {
        let (key, value) = (keys.row(row), values.row(row));
        let heads = || key.chunks_exact(g.head_dim).zip(value.chunks_exact(g.head_dim)).enumerate();
        let slot = layer.slot_mut("append", sequence.before.slot)?;
        if position < g.sinks {
            for (head, (key, value)) in heads() {
                let at = head * g.head_dim * g.sinks + position;
                saturated += slot.sinks.keys.write(at, g.sinks, key);
                let at = g.value_index(g.sinks, head, position);
                saturated += slot.sinks.values.write(at, 1, value);
            }
            slot.filled_sinks = position + 1;
            continue;
        }
        if format.keys.bits.is_some() {
            for (head, (key, _)) in heads() {
                let at = slot.key_index(head, position);
                saturated += slot.ring.keys.write(at, g.group, key);
            }
        }
        slot.live.keys.end = position + 1;
        if format.values.bits.is_some() {
            for (head, (_, value)) in heads() {
                let at = slot.value_index(head, position);
                saturated += slot.ring.values.write(at, 1, value);
            }
        }
        slot.live.values.end = position + 1;
        if format.keys.bits.is_some() && format.values.bits.is_some() {
            continue;
        }
        let (index, token) = g.locate(position);
        let page = table.get(index).copied();
        let page = page.ok_or_else(|| Error::request("append", format!("no page {index}")))?;
        let page = layer.page_mut("append", page)?;
        if let Tensor::Full(floats) = &mut page.keys {
            for (head, (key, _)) in heads() {
                saturated += floats.write(g.key_index(tiles, head, token), g.group, key);
            }
            page.filled.keys = token + 1;
        }
        if let Tensor::Full(floats) = &mut page.values {
            for (head, (_, value)) in heads() {
                saturated += floats.write(g.value_index(g.page_tokens, head, token), 1, value);
            }
            page.filled.values = token + 1;
        }
    }
    Ok(saturated)
}
