//! The launches that the report is about.

use super::Recorder;
use cubecl::prelude::*;
use kivi_kernels::kernels::matrix::{self, MatrixAttention, MatrixConfig, ROWS};

/// A launch, and what to count in its kernels.
pub struct Problem {
    /// In the report; unique.
    pub name: String,
    /// Bits per code, of keys and values.
    pub bits: u32,
    /// Elements of a group.
    pub group_size: u32,
    /// The loops that unpack codes, in the order of the code: of the one kernel that has any.
    pub loops: &'static [&'static str],
    /// Runs the launch code; may launch several kernels.
    pub launch: Box<dyn Fn(&ComputeClient<Recorder>) -> Result<(), String>>,
}

/// All, in the order of the report.
pub fn problems() -> Vec<Problem> {
    let shapes = [(2, 128), (2, 64), (4, 128)];
    shapes.into_iter().map(|(bits, head_dim)| matrix(bits, head_dim)).collect()
}

/// Attention on matrix units: 8 kv heads, up to 8 query rows each, groups of 32, 4,096 tokens.
fn matrix(bits: usize, head_dim: usize) -> Problem {
    let config = MatrixConfig {
        key_bits: bits,
        value_bits: bits,
        group_size: 32,
        head_dim,
        kv_heads: 8,
        page_tokens: 64,
        split_tokens: 512,
        soft_cap: false,
    };
    let launch = move |client: &ComputeClient<Recorder>| {
        let words = |count: usize| client.empty(count * 4);
        let arena_words = config.page_words() * 64;
        let attention = MatrixAttention {
            sequences: 1,
            rows: ROWS,
            splits: 8,
            max_pages: 64,
            scale: 0.1,
            cap: 0.0,
            queries: words(8 * ROWS * head_dim),
            arena: words(arena_words),
            arena_words,
            pages: words(64),
            tokens: words(1),
            visible: words(2 * ROWS),
            sums: words(64 * ROWS * head_dim),
            extremes: words(128 * ROWS),
        };
        // SAFETY: the buffers have the shapes; nothing is read.
        unsafe { matrix::attend(client, &attention, config) }.map_err(str::to_owned)
    };
    Problem {
        name: format!("attend_matrix, {bits} bits, head_dim {head_dim}"),
        bits: bits as u32,
        group_size: 32,
        loops: &["keys", "values"],
        launch: Box::new(launch),
    }
}
