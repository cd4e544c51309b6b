//! The launches that the report is about.

use super::{Masks, Recorder};
use cubecl::prelude::*;
use kivi_kernels::kernels::splits::{self, Routine, SplitAttention, SplitConfig};

/// Launch code of `kivi-kernels`; may launch several kernels.
pub type Launch = Box<dyn Fn(&ComputeClient<Recorder>) -> Result<(), String>>;

/// A launch, and what to count in its kernels.
pub struct Problem {
    /// In the report; unique.
    pub name: String,
    /// Bits per code, of keys and values.
    pub bits: u32,
    /// Elements of a group.
    pub group_size: u32,
    /// How codes are taken out of words.
    pub masks: Masks,
    /// Codes that a thread unpacks in one launch, all loops together; 0 without any.
    pub codes_per_thread: u32,
    /// The loops that unpack codes, in the order of the code: of the one kernel that has any.
    pub loops: &'static [&'static str],
    /// Launches.
    pub launch: Launch,
}

/// All, in the order of the report.
pub fn problems() -> Vec<Problem> {
    let cases = [
        (Routine::Matrix, 8, 2, 128),
        (Routine::Matrix, 8, 2, 64),
        (Routine::Matrix, 8, 4, 128),
        (Routine::Plane, 1, 2, 128),
        (Routine::Plane, 1, 2, 64),
        (Routine::Plane, 2, 2, 128),
    ];
    cases.map(|(routine, rows, bits, head_dim)| split(routine, rows, bits, head_dim)).into()
}

/// Attention over packed pages: 8 kv heads, groups of 32, 4,096 tokens.
fn split(routine: Routine, rows: usize, bits: usize, head_dim: usize) -> Problem {
    let config = SplitConfig {
        routine,
        rows,
        key_bits: bits,
        value_bits: bits,
        group_size: 32,
        head_dim,
        kv_heads: 8,
        page_tokens: 64,
        split_tokens: 512,
        soft_cap: false,
    };
    let name = match routine {
        Routine::Matrix => "matrix units",
        Routine::Plane => "pairs of halves",
    };
    let launch = move |client: &ComputeClient<Recorder>| {
        let words = |count: usize| client.empty(count * 4);
        let arena_words = config.page_words() * 64;
        let attention = SplitAttention {
            sequences: 1,
            rows,
            splits: 8,
            max_pages: 64,
            scale: 0.1,
            cap: 0.0,
            queries: words(8 * rows * head_dim),
            arena: words(arena_words),
            arena_words,
            pages: words(64),
            tokens: words(1),
            visible: words(2 * rows),
            sums: words(64 * rows * head_dim),
            extremes: words(128 * rows),
        };
        // SAFETY: the buffers have the shapes; nothing is read.
        unsafe { splits::attend(client, &attention, config) }.map_err(str::to_owned)
    };
    Problem {
        name: format!("{name}, rows: {rows}, bits: {bits}, head_dim: {head_dim}"),
        bits: bits as u32,
        group_size: 32,
        masks: Masks::Pairs,
        // Keys and values of a split; a warp per 32 channels.
        codes_per_thread: 2 * 512,
        loops: &["keys", "values"],
        launch: Box::new(launch),
    }
}
