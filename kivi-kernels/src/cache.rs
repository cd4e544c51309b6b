//! The memory of a pool on a device.

use crate::{
    Shape,
    launch::{Arena, Device, Words},
    memory::{GroupMemory, Run, push_run},
    step::StepLists,
};
use cubecl::{prelude::*, server::Handle};
use kivi_core::{Error, PoolSpec, Result, SequenceLayout, StepPlan, memory::MeasuredBytes};

/// The memory of a pool: an arena for each layer, and where things lie in it for each layer group.
#[derive(Debug)]
pub struct GpuCache {
    pub(crate) spec: PoolSpec,
    pub(crate) groups: Vec<GroupMemory>,
    /// By layer.
    pub(crate) arenas: Vec<Arena>,
    /// By layer group.
    pub(crate) steps: Vec<Step>,
    /// One word: how many elements were saturated.
    pub(crate) saturated: Handle,
}

/// A step on the device, for one layer group.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) tables: Words,
    pub(crate) tables_on_host: Vec<u32>,
    pub(crate) views_at: usize,
    pub(crate) places: Words,
    pub(crate) keys: Vec<u32>,
    pub(crate) values: Vec<u32>,
    /// What residuals move by when they shrink after the step.
    pub(crate) releases: Vec<Run>,
    pub(crate) rows: usize,
}

impl GpuCache {
    pub(crate) fn new<R: Runtime>(
        device: &Device<R>,
        spec: &PoolSpec,
        max_words: usize,
    ) -> Result<Self> {
        let groups: Result<Vec<_>> = (0..spec.group_count())
            .map(|group| {
                let layer = spec.group_layer(group);
                let shape = Shape::new(device.name, spec, layer)?;
                Ok(GroupMemory::new(shape, layer.clone(), max_words))
            })
            .collect();
        let arena = || Arena { handle: device.client.empty(4), words: 1 };
        Ok(Self {
            spec: spec.clone(),
            groups: groups?,
            arenas: spec.layers().iter().map(|_| arena()).collect(),
            steps: Vec::new(),
            saturated: device.client.create_from_slice(u32::as_bytes(&[0])),
        })
    }

    pub(crate) fn layer(
        &self,
        operation: &'static str,
        layer: usize,
    ) -> Result<(&Arena, &GroupMemory)> {
        let missing =
            || Error::request(operation, format!("layer {layer} of {}", self.arenas.len()));
        let arena = self.arenas.get(layer).ok_or_else(missing)?;
        Ok((arena, &self.groups[self.spec.group_of(layer)]))
    }

    /// The lists of the step that a layer is in.
    pub(crate) fn step(
        &self,
        operation: &'static str,
        layer: usize,
        plan: &StepPlan,
    ) -> Result<&Step> {
        let step = self.steps.get(self.spec.group_of(layer));
        step.filter(|step| step.rows == plan.rows).ok_or_else(|| {
            Error::request(operation, format!("no step of {} rows was begun", plan.rows))
        })
    }

    /// Gives every arena the size its group needs, then copies runs within the layers of each group.
    pub(crate) fn grow_and_copy<R: Runtime>(
        &mut self,
        device: &Device<R>,
        runs: &[Vec<Run>],
    ) -> Result<()> {
        for layer in 0..self.arenas.len() {
            let group = self.spec.group_of(layer);
            let words = self.groups[group].words;
            if words > self.arenas[layer].words {
                let new = Arena { handle: device.client.empty(4 * words), words };
                let old = std::mem::replace(&mut self.arenas[layer], new);
                let mut whole = Vec::new();
                push_run(&mut whole, 0, 0, old.words);
                device.copy_between(&old, &self.arenas[layer], &whole)?;
            }
            device.copy_within(&self.arenas[layer], &runs[group])?;
        }
        Ok(())
    }

    pub(crate) fn begin_step<R: Runtime>(
        &mut self,
        device: &Device<R>,
        plan: &StepPlan,
    ) -> Result<()> {
        const OPERATION: &str = "begin step";
        for sequence in &plan.sequences {
            sequence.before.check(OPERATION, &self.spec)?;
        }
        self.steps.clear();
        let (mut runs, mut steps) = (Vec::new(), Vec::new());
        for (group, memory) in self.groups.iter_mut().enumerate() {
            memory.retire();
            for freed in plan.freed.iter().filter(|freed| freed.group == group) {
                memory.free_page(freed.page);
            }
            for &slot in &plan.freed_slots {
                memory.free_slot(slot);
            }
            let mut moves = Vec::new();
            for sequence in &plan.sequences {
                memory.make_room(device.name, group, &sequence.before, &mut moves)?;
            }
            for copy in plan.copies.iter().filter(|copy| copy.group == group) {
                let to = memory.require_page(device.name, copy.to)?;
                let from = memory.page(copy.from);
                let from = from
                    .ok_or_else(|| Error::request(OPERATION, format!("no page {}", copy.from.0)))?;
                push_run(&mut moves, from, to, memory.shape.page_words());
            }
            runs.push(moves);

            let lists = StepLists::new(memory, group, plan)?;
            let mut releases = Vec::new();
            for sequence in &plan.sequences {
                let after = (sequence.kept, sequence.tokens_after());
                let slot = sequence.before.slot;
                memory.require_slot(device.name, slot, sequence.capacity, after, &mut releases)?;
                let packed = sequence.quantize.clone();
                let packed = sequence
                    .before
                    .packed
                    .zip(kivi_core::KeyValue::new(packed.keys.end, packed.values.end));
                let packed = packed.map(|(before, end)| before.max(end));
                memory.note(group, &sequence.before, (packed, sequence.kept), after.1);
            }
            steps.push(Step {
                tables: device.words(&lists.tables),
                tables_on_host: lists.tables,
                views_at: lists.views_at,
                places: device.words(&lists.places),
                keys: lists.keys,
                values: lists.values,
                releases,
                rows: plan.rows,
            });
        }
        self.grow_and_copy(device, &runs)?;
        self.steps = steps;
        Ok(())
    }

    /// Makes a slot the copy of another one.
    pub(crate) fn copy_slot<R: Runtime>(
        &mut self,
        device: &Device<R>,
        from: usize,
        to: &SequenceLayout,
    ) -> Result<()> {
        to.check("copy slot", &self.spec)?;
        let mut runs = Vec::new();
        for memory in &mut self.groups {
            let mut own = Vec::new();
            if memory.slot(from).is_some() {
                memory.copy_slot(device.name, from, to, &mut own)?;
            }
            runs.push(own);
        }
        self.grow_and_copy(device, &runs)
    }

    /// Makes room for an adopted sequence and notes what it holds.
    pub(crate) fn adopt<R: Runtime>(
        &mut self,
        device: &Device<R>,
        layout: &SequenceLayout,
    ) -> Result<()> {
        let mut runs = Vec::new();
        for (group, memory) in self.groups.iter_mut().enumerate() {
            let mut own = Vec::new();
            memory.make_room(device.name, group, layout, &mut own)?;
            memory.note(group, layout, (layout.packed, layout.kept), layout.tokens);
            runs.push(own);
        }
        self.grow_and_copy(device, &runs)
    }

    pub(crate) fn measure(&self) -> MeasuredBytes {
        let mut total = MeasuredBytes::default();
        for layer in 0..self.arenas.len() {
            let own = self.groups[self.spec.group_of(layer)].measure(&self.spec);
            total.codes += own.codes;
            total.scales_and_zeros += own.scales_and_zeros;
            total.channel_masks += own.channel_masks;
            total.full_precision += own.full_precision;
            total.allocated += own.allocated;
        }
        total
    }
}
