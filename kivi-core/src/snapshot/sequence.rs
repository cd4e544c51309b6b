//! From a sequence of a cache to a snapshot and back.

use super::{ModelIdentity, Snapshot, SnapshotError, SnapshotHeader, from_position, hex};
use crate::{
    CacheBackend, CachePolicy, CacheState, CanonicalLayer, Error, KeyValue, LayerSpec, PoolSpec,
    Result, SequenceId,
};

impl Snapshot {
    /// A snapshot of a sequence; `tokens` are the ids of the tokens it holds.
    ///
    /// # Errors
    /// When the sequence is unknown or empty, has another number of tokens, is within a prompt
    /// segment or was truncated within its last `rollback_length` tokens; or when the backend cannot
    /// export it, because pages behind a sliding window were given up, say.
    pub fn of_sequence<B: CacheBackend>(
        backend: &B,
        (cache, state): (&B::Cache, &CacheState),
        sequence: SequenceId,
        model: &ModelIdentity,
        tokens: &[u32],
    ) -> Result<Self> {
        let layout = state.layout(sequence)?;
        let refuse = |reason| Err(Error::request("snapshot", reason));
        if tokens.len() != layout.tokens {
            let (given, held) = (tokens.len(), layout.tokens);
            return refuse(format!("{given} token ids for a sequence of {held} tokens"));
        }
        if tokens.is_empty() {
            return refuse("the sequence is empty".into());
        }
        let (pool, policy) = (state.spec(), state.policy());
        let (packed, kept) = (policy.packed(layout.tokens), policy.kept(layout.tokens));
        let packs = packs(pool);
        // What layers without codes say about them does not matter.
        for (what, packs, [found, expected]) in [
            ("keys quantized", packs.keys, [layout.packed.keys, packed.keys]),
            ("values quantized", packs.values, [layout.packed.values, packed.values]),
        ] {
            if packs && found != expected {
                return refuse(format!(
                    "the sequence is within a prompt segment: {what} up to {found}, and up to \
                     {expected} at its end"
                ));
            }
        }
        for (what, packs, [found, expected]) in [
            ("keys", packs.keys, [layout.kept.keys, kept.keys]),
            ("values", packs.values, [layout.kept.values, kept.values]),
        ] {
            if packs && found != expected {
                return refuse(format!(
                    "the sequence was truncated less than its rollback length of {} tokens ago: \
                     full-precision {what} are left from {found} on, not from {expected}",
                    pool.config().rollback_length()
                ));
            }
        }
        let layers = (0..pool.layers().len()).map(|layer| backend.export(cache, layer, &layout));
        let layers = layers.collect::<Result<Vec<_>>>()?;
        let header = SnapshotHeader {
            model: model.clone(),
            config: pool.config().clone(),
            layers: pool.layers().to_vec(),
            tokens: tokens.to_vec(),
            packed,
            kept,
        };
        Self::new(header, layers)
    }

    /// Checks that this snapshot can be restored, exactly, to a pool under a policy.
    ///
    /// Everything that changes the contents must be equal: the model, the formats, `G`, `R`, `S`, the
    /// value residual, the prompt segments. Pages may have any size, since the contents do not depend
    /// on them. `rollback_length` may be smaller than the snapshot's: some full-precision copies are
    /// then superfluous. It cannot be larger, for copies that are gone are not to be had from codes.
    ///
    /// # Errors
    /// [`SnapshotError::OtherModel`] and [`SnapshotError::OtherCache`], naming what differs.
    pub fn check(
        &self,
        model: &ModelIdentity,
        pool: &PoolSpec,
        policy: &dyn CachePolicy,
    ) -> Result<()> {
        check_model(&self.header.model, model)?;
        self.check_cache(pool)?;
        let (tokens, packs) = (self.tokens().len(), packs(pool));
        let (packed, kept) = (policy.packed(tokens), policy.kept(tokens));
        let ends = self.header.packed.zip(packed).zip(packs);
        let starts = self.header.kept.zip(kept).zip(packs);
        for (what, ((found, expected), packs)) in
            [("quantized keys up to", ends.keys), ("quantized values up to", ends.values)]
        {
            if packs {
                same_cache(what, found, expected)?;
            }
        }
        for ((found, expected), packs) in [starts.keys, starts.values] {
            if packs && found > expected {
                let length = |config: &crate::CacheConfig| config.rollback_length();
                let (found, expected) = (length(&self.header.config), length(pool.config()));
                return Err(other_cache("a rollback length of only", found, expected).into());
            }
        }
        Ok(())
    }

    /// Adds the sequence to a pool. Nothing is changed when that fails.
    ///
    /// # Errors
    /// Those of [`Snapshot::check`], [`Error::PoolExhausted`] when it does not fit, and what the backend
    /// says.
    pub fn restore<B: CacheBackend>(
        &self,
        backend: &B,
        (cache, state): (&mut B::Cache, &mut CacheState),
        model: &ModelIdentity,
    ) -> Result<SequenceId> {
        self.check(model, state.spec(), state.policy().as_ref())?;
        let sequence = state.adopt_sequence(self.tokens().len())?;
        let layout = state.layout(sequence)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let spec = &self.header.layers[index];
            let imported = if layout.kept == self.header.kept {
                backend.import(cache, index, &layout, layer)
            } else {
                backend.import(cache, index, &layout, &with_copies_from(layer, spec, layout.kept))
            };
            if let Err(error) = imported {
                state.remove(sequence)?;
                return Err(error);
            }
        }
        Ok(sequence)
    }

    fn check_cache(&self, pool: &PoolSpec) -> std::result::Result<(), SnapshotError> {
        let (found, expected) = (&self.header.config, pool.config());
        same_cache("a group size of", found.group_size(), expected.group_size())?;
        same_cache("a residual length of", found.residual_length(), expected.residual_length())?;
        same_cache("a sink length of", found.sink_length(), expected.sink_length())?;
        let residual = |config: &crate::CacheConfig| format!("{:?}", config.value_residual());
        same_cache("the value residual", residual(found), residual(expected))?;
        let segment = |config: &crate::CacheConfig| match config.segment_tokens() {
            Some(tokens) => format!("{tokens} tokens"),
            None => "a whole prompt".to_owned(),
        };
        same_cache("prompt segments of", segment(found), segment(expected))?;
        same_cache("layers:", self.header.layers.len(), pool.layers().len())?;
        for (index, (found, expected)) in self.header.layers.iter().zip(pool.layers()).enumerate() {
            if found != expected {
                let what = format!("layer {index}:");
                return Err(other_cache(what, describe(found), describe(expected)));
            }
        }
        Ok(())
    }
}

/// Whether any layer quantizes keys, and whether any quantizes values.
fn packs(pool: &PoolSpec) -> KeyValue<bool> {
    let any = |of: fn(KeyValue<bool>) -> bool| pool.layers().iter().any(|layer| of(layer.packs()));
    KeyValue::new(any(|packs| packs.keys), any(|packs| packs.values))
}

fn check_model(
    found: &ModelIdentity,
    expected: &ModelIdentity,
) -> std::result::Result<(), SnapshotError> {
    let other = |what, found: String, expected: String| {
        Err(SnapshotError::OtherModel { what, found, expected })
    };
    if found.fingerprint != expected.fingerprint {
        let [found, expected] = [found, expected].map(|model| hex(&model.fingerprint));
        return other("fingerprint", found, expected);
    }
    let bits = |model: &ModelIdentity| -> (_, u32, Vec<u32>) {
        let frequencies = model.rope.frequencies.iter().map(|f| f.to_bits()).collect();
        (model.rope.style, model.rope.attention_factor.to_bits(), frequencies)
    };
    if bits(found) != bits(expected) {
        let [found, expected] = [found, expected].map(|model| {
            let rope = &model.rope;
            let slowest = rope.frequencies.last().copied().unwrap_or_default();
            format!(
                "{:?} over {} channels down to frequency {slowest:e}, scaled by {}",
                rope.style,
                rope.rotary_dim(),
                rope.attention_factor
            )
        });
        return other("rotary embedding", found, expected);
    }
    if found.key_bias_beside != expected.key_bias_beside {
        let [found, expected] = [found, expected].map(|model| {
            let beside = model.key_bias_beside.iter().filter(|&&beside| beside).count();
            format!("in {beside} of {} layers", model.key_bias_beside.len())
        });
        return other("key biases beside the cache", found, expected);
    }
    Ok(())
}

fn same_cache<T: PartialEq + ToString>(
    what: &str,
    found: T,
    expected: T,
) -> std::result::Result<(), SnapshotError> {
    if found == expected { Ok(()) } else { Err(other_cache(what, found, expected)) }
}

fn other_cache(
    what: impl Into<String>,
    found: impl ToString,
    expected: impl ToString,
) -> SnapshotError {
    let (found, expected) = (found.to_string(), expected.to_string());
    SnapshotError::OtherCache { what: what.into(), found, expected }
}

fn describe(layer: &LayerSpec) -> String {
    let window = layer.window.map_or(String::new(), |window| format!(" in a window of {window}"));
    format!(
        "{} kv heads of {}{window}, keys {}, values {}",
        layer.kv_heads, layer.head_dim, layer.format.keys, layer.format.values
    )
}

/// The layer with the full-precision copies of quantized tokens only from `kept` on.
fn with_copies_from(
    layer: &CanonicalLayer,
    spec: &LayerSpec,
    kept: KeyValue<usize>,
) -> CanonicalLayer {
    let packs = spec.packs();
    let from = |packs, tokens: &crate::FullTokens, first| match packs {
        true => from_position(tokens, first, spec.head_dim),
        false => tokens.clone(),
    };
    let full = KeyValue::new(
        from(packs.keys, &layer.full.keys, kept.keys),
        from(packs.values, &layer.full.values, kept.values),
    );
    CanonicalLayer { full, ..layer.clone() }
}
