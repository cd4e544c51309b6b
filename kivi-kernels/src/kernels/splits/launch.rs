//! The host's side.

use super::{SplitConfig, attend_split};
use cubecl::prelude::*;
use cubecl::server::Handle;

/// What one launch of attention reads and writes. Buffers are contiguous.
#[derive(Clone, Debug)]
pub struct SplitAttention {
    /// Sequences of the batch.
    pub sequences: usize,
    /// Query rows per kv head: query heads of a head group times query tokens; at most
    /// [`SplitConfig::rows`].
    pub rows: usize,
    /// Splits of the longest sequence.
    pub splits: usize,
    /// Entries per sequence in the page table.
    pub max_pages: usize,
    /// What logits are multiplied with.
    pub scale: f32,
    /// The cap of logits, if [`SplitConfig::soft_cap`].
    pub cap: f32,
    /// `[sequences, kv_heads, rows, head_dim]`, f32.
    pub queries: Handle,
    /// Pages of the layer; see [`SplitConfig`].
    pub arena: Handle,
    /// Words in `arena`.
    pub arena_words: usize,
    /// `[sequences, max_pages]`, u32: the word in `arena` where a page begins.
    pub pages: Handle,
    /// `[sequences]`, u32: tokens whose keys and values are both packed, whole groups.
    pub tokens: Handle,
    /// `[sequences, rows, 2]`, u32: the first token a row sees, and the one after the last.
    pub visible: Handle,
    /// `[sequences, kv_heads, splits, rows, head_dim]`, f32, written: `Σ exp(l − max)·v`.
    pub sums: Handle,
    /// `[sequences, kv_heads, splits, rows, 2]`, f32, written: `max l` and `Σ exp(l − max)`.
    pub extremes: Handle,
}

/// Launches flash decoding of all splits: one cube per split, kv head and sequence.
///
/// A row that sees nothing in a split gets the denominator 0 there; its sums are not written.
///
/// # Errors
///
/// What the configuration or the problem may be instead. The device must have planes of 32 and,
/// for [`Routine::Matrix`](super::Routine::Matrix), `mma.m16n8k16` of f16 with f32 sums (`features().matmul.mma`).
///
/// # Safety
///
/// The buffers have the shapes above, and for every sequence the first `⌈tokens / page_tokens⌉`
/// entries of its row of `pages` are beginnings of whole pages within `arena`, multiples of 4.
pub unsafe fn attend<R: Runtime>(
    client: &ComputeClient<R>,
    attention: &SplitAttention,
    config: SplitConfig,
) -> Result<(), &'static str> {
    if let Some(refusal) = config.refusal() {
        return Err(refusal);
    }
    let SplitAttention { sequences, rows, splits, max_pages, .. } = *attention;
    let to_u32 = |count: usize| u32::try_from(count).map_err(|_| "sizes below 2^32");
    if rows == 0 || rows > config.rows {
        return Err("as many query rows as it is compiled for, or fewer");
    }
    let cubes = CubeCount::Static(to_u32(splits)?, to_u32(config.kv_heads)?, to_u32(sequences)?);
    let dim = CubeDim::new_2d(32, to_u32(config.warps())?);
    let (rows_u32, max_pages_u32) = (to_u32(rows)?, to_u32(max_pages)?);

    let fourth = |words: usize| words / 4;
    let query_words = sequences * config.kv_heads * rows * config.head_dim;
    let partials = sequences * config.kv_heads * splits * rows;
    // SAFETY: lengths are those of the shapes, which the caller vouches for; `Handle` keeps its
    // allocation alive, and the kernel only reads the arena that is bound twice.
    unsafe {
        let array = |handle: &Handle, length| ArrayArg::from_raw_parts(handle.clone(), length);
        attend_split::launch_unchecked::<R>(
            client,
            cubes,
            dim,
            array(&attention.queries, fourth(query_words)),
            array(&attention.arena, fourth(attention.arena_words)),
            array(&attention.arena, attention.arena_words),
            array(&attention.pages, sequences * max_pages),
            array(&attention.tokens, sequences),
            array(&attention.visible, sequences * rows * 2),
            array(&attention.sums, fourth(partials * config.head_dim)),
            array(&attention.extremes, partials * 2),
            rows_u32,
            max_pages_u32,
            attention.scale,
            attention.cap,
            config,
        );
    }
    Ok(())
}
