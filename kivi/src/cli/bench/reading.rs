//! How fast this machine reads memory: the bound that attention is held against.

use rayon::prelude::*;
use std::{collections::BTreeMap, fs, hint::black_box, path::Path};

/// Assumed where the system does not say.
const ASSUMED_CACHE: usize = 32 << 20;

/// Bytes below which another thread costs more than it reads.
const MIN_SHARE: usize = 64 << 10;

/// Size of the last-level cache that some threads can use.
#[derive(Clone, Copy, Debug)]
pub(super) struct LastLevelCache {
    pub(super) bytes: usize,
    /// Whether that is what the system says.
    pub(super) known: bool,
}

impl LastLevelCache {
    /// Asks Linux. Cores may have several such caches; `threads` threads fill as many of them.
    pub(super) fn of_system(threads: usize) -> Self {
        match instances(Path::new("/sys/devices/system/cpu")) {
            Some(mut sizes) => {
                sizes.sort_unstable_by(|a, b| b.cmp(a));
                Self { bytes: sizes.iter().take(threads).sum(), known: true }
            }
            None => Self { bytes: ASSUMED_CACHE, known: false },
        }
    }
}

/// Sizes of all caches of the highest level, each once.
fn instances(cpus: &Path) -> Option<Vec<usize>> {
    // (level, which cores share it) → bytes
    let mut caches: BTreeMap<(u32, String), usize> = BTreeMap::new();
    for cpu in fs::read_dir(cpus).ok()?.flatten() {
        let Ok(indices) = fs::read_dir(cpu.path().join("cache")) else { continue };
        for index in indices.flatten() {
            let field = |name| fs::read_to_string(index.path().join(name)).ok();
            let parse = || {
                let level = field("level")?.trim().parse().ok()?;
                let size = field("size")?;
                let size: usize = size.trim().strip_suffix('K')?.parse().ok()?;
                Some(((level, field("shared_cpu_list")?), size.checked_mul(1024)?))
            };
            caches.extend(parse().filter(|&(_, size)| size > 0));
        }
    }
    let highest = caches.keys().map(|&(level, _)| level).max()?;
    Some(caches.iter().filter(|((level, _), _)| *level == highest).map(|(_, &size)| size).collect())
}

/// Memory to read through, in pieces of the same size.
#[derive(Debug)]
pub(super) struct Reading {
    words: Vec<u64>,
    piece: usize,
}

impl Reading {
    /// `pieces` pieces of `bytes` bytes, rounded up to whole words.
    pub(super) fn new(pieces: usize, bytes: usize) -> Self {
        let piece = bytes.div_ceil(8).max(1);
        // Written, so that every page is there.
        Self { words: vec![0x0123_4567_89AB_CDEF; pieces * piece], piece }
    }

    /// Reads one piece on all threads: each adds up its share of the words.
    pub(super) fn read(&self, piece: usize) -> u64 {
        let words = &self.words[piece * self.piece..(piece + 1) * self.piece];
        let share = words.len().div_ceil(rayon::current_num_threads()).max(MIN_SHARE / 8);
        let sum = |words: &[u64]| words.iter().copied().fold(0, u64::wrapping_add);
        black_box(words.par_chunks(share).map(sum).reduce(|| 0, u64::wrapping_add))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_of_a_piece_is_read() {
        let mut reading = Reading::new(3, 100_001);
        let words = 100_001usize.div_ceil(8);
        assert_eq!(reading.piece, words);
        for (i, word) in reading.words.iter_mut().enumerate() {
            *word = i as u64;
        }
        // Σ of n consecutive integers from a.
        let sum = |a: u64, n: u64| n * a + n * (n - 1) / 2;
        let n = words as u64;
        assert_eq!(reading.read(0), sum(0, n));
        assert_eq!(reading.read(2), sum(2 * n, n));
    }

    #[test]
    fn caches_are_counted_once() {
        let folder = tempfile::tempdir().unwrap();
        // Four cores with a level-1 cache each, pairs share a level-3 cache.
        for cpu in 0..4 {
            let pair = cpu / 2 * 2;
            for (index, level, size, shared) in
                [(0, 1, "32K", format!("{cpu}")), (3, 3, "2048K", format!("{pair}-{}", pair + 1))]
            {
                let path = folder.path().join(format!("cpu{cpu}/cache/index{index}"));
                fs::create_dir_all(&path).unwrap();
                fs::write(path.join("level"), format!("{level}\n")).unwrap();
                fs::write(path.join("size"), format!("{size}\n")).unwrap();
                fs::write(path.join("shared_cpu_list"), format!("{shared}\n")).unwrap();
            }
        }
        assert_eq!(instances(folder.path()), Some(vec![2 << 20, 2 << 20]));
        assert_eq!(instances(&folder.path().join("nowhere")), None);
    }
}
