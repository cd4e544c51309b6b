//! Prefixes that others may begin with.
//!
//! An entry is a whole sequence of the pool, [compact](kivi_core::CacheState::fork_compact), that ends
//! where a segment of a prompt does. It owns its pages together with whoever else uses them, and alone
//! the full-precision tokens that a continuation sees: with `value_residual = window` the newest `R`
//! values, and the sinks. A continuation is a fork, so it equals a cold run bit for bit.

use kivi_core::{CacheConfig, PoolSpec, SequenceId};
use sha2::{Digest, Sha256};
use std::{cmp::Reverse, collections::HashMap};

/// Names the tokens from the start to the end of a segment, under one model and cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PrefixKey([u8; 32]);

impl PrefixKey {
    /// The key of nothing, under a model and a cache.
    pub(crate) fn root(model: [u8; 32], cache: &PoolSpec) -> Self {
        let cache = format!("{:?}{:?}", cache.config(), cache.layers());
        Self(Sha256::new().chain_update(model).chain_update(cache).finalize().into())
    }

    fn extend(&self, tokens: &[u32]) -> Self {
        let mut hash = Sha256::new();
        hash.update(self.0);
        for token in tokens {
            hash.update(token.to_le_bytes());
        }
        Self(hash.finalize().into())
    }

    /// One key for each segment that ends before the last token of a prompt: that one has to be
    /// computed in any case, for its logits.
    pub(crate) fn of_prompt(root: Self, config: &CacheConfig, prompt: &[u32]) -> Vec<Self> {
        Self::of_tokens(root, config, &prompt[..prompt.len().saturating_sub(1)])
    }

    /// One key for each whole segment.
    pub(crate) fn of_tokens(root: Self, config: &CacheConfig, tokens: &[u32]) -> Vec<Self> {
        let Some(segment) = config.segment_tokens() else { return Vec::new() };
        let (mut keys, mut key, mut start) = (Vec::new(), root, 0);
        let mut end = config.sink_length() + segment;
        while end <= tokens.len() {
            key = key.extend(&tokens[start..end]);
            keys.push(key);
            (start, end) = (end, end + segment);
        }
        keys
    }
}

#[derive(Debug)]
struct Entry {
    sequence: SequenceId,
    /// Its place among the keys of its prompt.
    depth: usize,
    last_used: u64,
}

/// The prefixes that are kept, the least recently used to be given up first.
#[derive(Debug, Default)]
pub(crate) struct PrefixIndex {
    entries: HashMap<PrefixKey, Entry>,
    clock: u64,
}

impl PrefixIndex {
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(crate) fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.entries.values().map(|entry| entry.sequence)
    }

    pub(crate) fn contains(&self, key: &PrefixKey) -> bool {
        self.entries.contains_key(key)
    }

    /// How many of a prompt's segments are there, and the sequence that holds them.
    pub(crate) fn longest(&self, keys: &[PrefixKey]) -> Option<(usize, SequenceId)> {
        let found = keys.iter().enumerate().rev();
        let mut found = found.filter_map(|(depth, key)| Some((depth, self.entries.get(key)?)));
        found.next().map(|(depth, entry)| (depth + 1, entry.sequence))
    }

    /// Notes that the first `segments` keys of a prompt were used.
    pub(crate) fn touch(&mut self, keys: &[PrefixKey], segments: usize) {
        self.clock += 1;
        for key in &keys[..segments] {
            if let Some(entry) = self.entries.get_mut(key) {
                entry.last_used = self.clock;
            }
        }
    }

    /// Adds the prefix that ends with segment `depth` of a prompt.
    pub(crate) fn insert(&mut self, key: PrefixKey, depth: usize, sequence: SequenceId) {
        self.clock += 1;
        let entry = Entry { sequence, depth, last_used: self.clock };
        self.entries.insert(key, entry);
    }

    /// Takes out the prefix that was not used for longest, of several the longest.
    pub(crate) fn evict(&mut self) -> Option<SequenceId> {
        let order = |entry: &Entry| (entry.last_used, Reverse(entry.depth));
        let (&key, _) = self.entries.iter().min_by_key(|(_, entry)| order(entry))?;
        self.entries.remove(&key).map(|entry| entry.sequence)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kivi_core::{CacheState, LayerSpec};

    fn config(sinks: usize) -> CacheConfig {
        let builder = CacheConfig::builder().residual_length(32).segment_tokens(Some(64));
        builder.sink_length(sinks).build().unwrap()
    }

    fn pool() -> PoolSpec {
        let config = config(0);
        PoolSpec::new(config.clone(), vec![LayerSpec::new(&config, 1, 64)], 8, 8).unwrap()
    }

    fn root(model: u8) -> PrefixKey {
        PrefixKey::root([model; 32], &pool())
    }

    #[test]
    fn a_key_names_everything_before_it() {
        let config = config(4);
        let keys = |tokens: &[u32]| PrefixKey::of_prompt(root(0), &config, tokens);
        let prompt: Vec<u32> = (0..300).collect();
        // Segments end at 68, 132, 196, 260.
        assert_eq!(keys(&prompt).len(), 4);
        assert_eq!(keys(&prompt[..69]).len(), 1);
        assert_eq!(keys(&prompt[..68]).len(), 0);
        assert_eq!(keys(&prompt[..200])[..], keys(&prompt)[..3]);
        let mut other = prompt.clone();
        other[70] = 1000;
        assert_eq!(keys(&other)[0], keys(&prompt)[0]);
        assert!((1..4).all(|i| keys(&other)[i] != keys(&prompt)[i]));
        let foreign = PrefixKey::of_prompt(root(1), &config, &prompt);
        assert!((0..4).all(|i| foreign[i] != keys(&prompt)[i]));
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut state = CacheState::new(pool());
        let mut sequence = || state.create_sequence().unwrap();
        let ids = [sequence(), sequence(), sequence()];
        let keys = [1, 2, 3].map(root);
        let mut index = PrefixIndex::default();
        for depth in 0..3 {
            index.insert(keys[depth], depth, ids[depth]);
        }
        assert_eq!(index.longest(&keys), Some((3, ids[2])));
        index.touch(&keys, 2);
        assert_eq!(index.evict(), Some(ids[2]));
        assert_eq!(index.longest(&keys), Some((2, ids[1])));
        // Both were used at once: the longer one.
        assert_eq!(index.evict(), Some(ids[1]));
        assert_eq!(index.evict(), Some(ids[0]));
        assert_eq!((index.evict(), index.len()), (None, 0));
    }
}
