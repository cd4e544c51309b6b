//! The full-precision tokens of one sequence: its sinks, and a ring for the residual.

use super::{Floats, Geometry};
use kivi_core::{KeyValue, LayerSpec, SequenceLayout, StoreDtype, memory::MeasuredBytes};
use std::ops::Range;

/// The full-precision tokens of one sequence in one layer.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Keys `[kv_heads, head_dim, S]`, values `[kv_heads, S, head_dim]`.
    pub(crate) sinks: KeyValue<Floats>,
    /// Position `j` lies at `(j − S) mod capacity`. Keys `[kv_heads, capacity / G, head_dim, G]`,
    /// values `[kv_heads, capacity, head_dim]`. Uncompressed formats leave it empty.
    pub(crate) ring: KeyValue<Floats>,
    /// Tokens the ring has room for.
    pub(crate) capacity: KeyValue<usize>,
    /// Tokens it must have room for in this step; see [`make_room`](Self::make_room).
    room: KeyValue<usize>,
    /// Positions in the ring.
    pub(crate) live: KeyValue<Range<usize>>,
    pub(crate) filled_sinks: usize,
    store: KeyValue<StoreDtype>,
    uses_ring: KeyValue<bool>,
    geometry: Geometry,
}

impl Slot {
    pub(super) fn new(spec: &LayerSpec, geometry: &Geometry) -> Self {
        let store = spec.format.map(|format| format.store);
        Self {
            sinks: store.map(|store| Floats::zeroed(store, geometry.sinks * geometry.width())),
            ring: store.map(|store| Floats::zeroed(store, 0)),
            capacity: KeyValue::both(0),
            room: KeyValue::both(0),
            live: KeyValue::both(geometry.sinks..geometry.sinks),
            filled_sinks: 0,
            store,
            uses_ring: spec.packs(),
            geometry: *geometry,
        }
    }

    /// A copy for a fork.
    pub(crate) fn copy_for(&self, layout: &SequenceLayout) -> Self {
        let mut copy = self.clone();
        copy.prepare(layout);
        copy.make_room();
        copy
    }

    /// Brings the slot to the state before a step: drops what a truncation took back.
    pub(super) fn prepare(&mut self, layout: &SequenceLayout) {
        let live = |kept: usize| kept..layout.tokens.max(kept);
        self.live = layout.kept.map(live);
        self.filled_sinks = layout.tokens.min(self.geometry.sinks);
        self.room = self.in_use(layout.capacity);
    }

    /// Whether the rings have the capacity of the step.
    pub(crate) fn has_room(&self) -> bool {
        self.capacity == self.room
    }

    /// Forgets what does not outlive a step.
    pub(crate) fn release(&mut self, kept: KeyValue<usize>, capacity: KeyValue<usize>) {
        self.live = kept.zip(self.live.clone()).map(|(kept, live)| kept..live.end.max(kept));
        self.room = self.in_use(capacity);
        self.make_room();
    }

    /// Index of the ring's element `(head, position, channel 0)` of keys; channels are `G` apart.
    pub(crate) fn key_index(&self, head: usize, position: usize) -> usize {
        let token = (position - self.geometry.sinks) % self.capacity.keys;
        self.geometry.key_index(self.capacity.keys / self.geometry.group, head, token)
    }

    /// Index of the ring's element `(head, position, channel 0)` of values.
    pub(crate) fn value_index(&self, head: usize, position: usize) -> usize {
        let token = (position - self.geometry.sinks) % self.capacity.values;
        self.geometry.value_index(self.capacity.values, head, token)
    }

    /// A capacity for the rings that are used.
    fn in_use(&self, capacity: KeyValue<usize>) -> KeyValue<usize> {
        capacity.zip(self.uses_ring).map(|(capacity, uses)| if uses { capacity } else { 0 })
    }

    /// Gives the rings the capacity of the step and moves the live tokens there. Not before new tokens
    /// come: layers are computed one after the other, and a long prompt would lie in the rings of all
    /// of them at once.
    pub(crate) fn make_room(&mut self) {
        if self.has_room() {
            return;
        }
        let capacity = self.room;
        let Geometry { kv_heads, head_dim, group, .. } = self.geometry;
        let mut old = self.clone_empty(capacity);
        std::mem::swap(self, &mut old);
        if capacity.keys > 0 && old.capacity.keys > 0 {
            // Whole tiles: the live keys start at a group boundary.
            for start in old.live.keys.clone().step_by(group) {
                for head in 0..kv_heads {
                    let (to, from) = (self.key_index(head, start), old.key_index(head, start));
                    self.ring.keys.copy_from(to, &old.ring.keys, from, head_dim * group);
                }
            }
        }
        if capacity.values > 0 && old.capacity.values > 0 {
            for position in old.live.values.clone() {
                for head in 0..kv_heads {
                    let (to, from) =
                        (self.value_index(head, position), old.value_index(head, position));
                    self.ring.values.copy_from(to, &old.ring.values, from, head_dim);
                }
            }
        }
        self.sinks = old.sinks;
    }

    /// The same slot with new, empty rings and without its sinks.
    fn clone_empty(&self, capacity: KeyValue<usize>) -> Self {
        let width = self.geometry.width();
        let rings = self.store.zip(capacity);
        Self {
            sinks: self.store.map(|store| Floats::zeroed(store, 0)),
            ring: rings.map(|(store, capacity)| Floats::zeroed(store, capacity * width)),
            capacity,
            live: self.live.clone(),
            ..*self
        }
    }

    pub(super) fn measure(&self, total: &mut MeasuredBytes) {
        let token = self.store.map(|store| store.bytes() * self.geometry.width());
        for (floats, token, held) in [
            (&self.sinks.keys, token.keys, self.filled_sinks),
            (&self.sinks.values, token.values, self.filled_sinks),
            (
                &self.ring.keys,
                token.keys,
                if self.uses_ring.keys { self.live.keys.len() } else { 0 },
            ),
            (
                &self.ring.values,
                token.values,
                if self.uses_ring.values { self.live.values.len() } else { 0 },
            ),
        ] {
            total.allocated += floats.bytes();
            total.full_precision += token * held;
        }
    }
}
