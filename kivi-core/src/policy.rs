//! Which tokens a sequence keeps, and at which precision.

use crate::{CacheConfig, KeyValue, LayerSpec, ValueResidual};
use std::{fmt::Debug, ops::Range};

/// Decides, from the number of tokens alone, what is quantized and what may be forgotten.
///
/// Everything a query sees follows from these answers, so they must be pure: the same arguments,
/// the same answer. With `S` sinks, `packed` and `kept` must not decrease with `tokens`, must obey
/// `S ≤ kept ≤ packed ≤ max(S, tokens)`, and for keys be whole groups after the sinks; the state
/// machine refuses a policy that breaks this.
pub trait CachePolicy: Debug + Send + Sync {
    /// With `tokens` tokens in the cache and no open segment: the first position after the sinks
    /// that is *not* quantized.
    fn packed(&self, tokens: usize) -> KeyValue<usize>;

    /// The first position whose full-precision copy is kept; at most [`CachePolicy::packed`].
    fn kept(&self, tokens: usize) -> KeyValue<usize>;

    /// Full-precision tokens after the sinks that a sequence needs room for while it is generated
    /// token by token. The room for keys is rounded up to whole groups.
    fn residual_capacity(&self) -> KeyValue<usize>;

    /// Whether a layer still needs the page that holds the positions `page` when `tokens` tokens
    /// are in the cache. A page that is given up is never seen by a query again.
    fn needs_page(&self, layer: &LayerSpec, page: Range<usize>, tokens: usize) -> bool;
}

/// The policy of the paper (Algorithm 1): key blocks of `R`, a sliding window of `R` values, sinks
/// in full precision; pages behind a layer's window are given up.
#[derive(Clone, Debug)]
pub struct KiviPolicy {
    residual_length: usize,
    sink_length: usize,
    value_residual: ValueResidual,
    rollback_length: usize,
}

impl KiviPolicy {
    /// The policy of a configuration.
    pub fn new(config: &CacheConfig) -> Self {
        Self {
            residual_length: config.residual_length(),
            sink_length: config.sink_length(),
            value_residual: config.value_residual(),
            rollback_length: config.rollback_length(),
        }
    }

    /// Keys `S ≤ j < S + ⌊(n−S)/R⌋·R`; values `S ≤ j < n − R`, or like the keys.
    fn boundary(&self, tokens: usize) -> KeyValue<usize> {
        let (s, r) = (self.sink_length, self.residual_length);
        let keys = s + tokens.saturating_sub(s) / r * r;
        let values = match self.value_residual {
            ValueResidual::Window => tokens.saturating_sub(r).max(s),
            ValueResidual::Block => keys,
        };
        KeyValue::new(keys, values)
    }
}

impl CachePolicy for KiviPolicy {
    fn packed(&self, tokens: usize) -> KeyValue<usize> {
        self.boundary(tokens)
    }

    fn kept(&self, tokens: usize) -> KeyValue<usize> {
        // What the state `rollback_length` tokens ago had not yet quantized.
        self.boundary(tokens.saturating_sub(self.rollback_length))
    }

    fn residual_capacity(&self) -> KeyValue<usize> {
        let tokens = self.residual_length + self.rollback_length;
        let values = match self.value_residual {
            ValueResidual::Window => tokens + 1,
            ValueResidual::Block => tokens,
        };
        KeyValue::new(tokens, values)
    }

    fn needs_page(&self, layer: &LayerSpec, page: Range<usize>, tokens: usize) -> bool {
        // The next query may be as early as `tokens − rollback_length`.
        let next = tokens.saturating_sub(self.rollback_length);
        layer.window.is_none_or(|window| page.end + window > next + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(sinks: usize, mode: ValueResidual, rollback: usize) -> KiviPolicy {
        let config = CacheConfig::builder()
            .sink_length(sinks)
            .value_residual(mode)
            .rollback_length(rollback)
            .build()
            .unwrap();
        KiviPolicy::new(&config)
    }

    /// The authors' code with R = 128: a prompt of T keys keeps T mod R, of values min(T, R).
    #[test]
    fn boundaries_of_the_paper() {
        let p = policy(0, ValueResidual::Window, 0);
        for (tokens, keys, values) in [
            (0, 0, 0),
            (1, 0, 0),
            (127, 0, 0),
            (128, 128, 0),
            (129, 128, 1),
            (255, 128, 127),
            (256, 256, 128),
            (1000, 896, 872),
        ] {
            assert_eq!(p.packed(tokens), KeyValue::new(keys, values), "{tokens} tokens");
        }
    }

    #[test]
    fn sinks_shift_the_blocks() {
        let p = policy(4, ValueResidual::Window, 0);
        assert_eq!(p.packed(3), KeyValue::both(4));
        assert_eq!(p.packed(131), KeyValue::new(4, 4));
        assert_eq!(p.packed(132), KeyValue::new(132, 4));
        assert_eq!(p.packed(133), KeyValue::new(132, 5));
    }

    #[test]
    fn block_mode_quantizes_values_with_keys() {
        let p = policy(0, ValueResidual::Block, 0);
        assert_eq!(p.packed(300), KeyValue::both(256));
    }

    #[test]
    fn copies_lag_by_the_rollback_length() {
        let p = policy(0, ValueResidual::Window, 8);
        assert_eq!(p.kept(130), KeyValue::new(0, 0));
        assert_eq!(p.kept(136), KeyValue::new(128, 0));
        assert_eq!(p.kept(300), KeyValue::new(256, 164));
        let capacity = p.residual_capacity();
        for tokens in 0..2000 {
            let held = p.kept(tokens).map(|first| tokens + 1 - first);
            assert!(held.keys <= capacity.keys && held.values <= capacity.values, "{tokens}");
        }
    }
}
