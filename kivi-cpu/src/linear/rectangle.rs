//! Cutting `[rows, outputs]` into tiles of work.

use rayon::prelude::*;
use std::ops::Range;

/// Activation rows of a tile, at most: enough that unpacking a weight costs little beside its use,
/// few enough that their activations stay in the second-level cache.
pub(super) const TILE_ROWS: usize = 128;

/// Weight rows are taken in panels of this many; tiles are cut between panels.
pub(super) const PANEL: usize = 8;

/// Multiply-adds below which a task is not worth handing to another thread (about 5 µs).
const MIN_TASK: usize = 1 << 17;

/// Tasks per thread, so that a delayed thread does not delay the others.
const TASKS_PER_THREAD: usize = 4;

/// The outputs `outputs` of the rows `rows`.
pub(super) struct Tile<'a> {
    /// At most [`TILE_ROWS`].
    pub(super) rows: Range<usize>,
    /// Starts at a multiple of [`PANEL`].
    pub(super) outputs: Range<usize>,
    /// `[rows][outputs]`, to be overwritten.
    pub(super) out: Vec<&'a mut [f32]>,
}

/// Calls `work` for tiles that cover `out`, `[rows, outputs]` and not empty, in parallel when there
/// is enough to do. An element of `out` costs `columns` multiply-adds.
pub(super) fn for_each_tile(
    out: &mut [f32],
    outputs: usize,
    columns: usize,
    work: impl Fn(Tile<'_>) + Send + Sync,
) {
    let threads = rayon::current_num_threads();
    let products = out.len().saturating_mul(columns);
    let tasks =
        if threads == 1 { 1 } else { (products / MIN_TASK).min(TASKS_PER_THREAD * threads) };
    let mut tiles = cut(out, outputs, tasks.max(1));
    if tasks <= 1 {
        tiles.into_iter().for_each(work);
    } else {
        tiles.par_drain(..).with_max_len(1).for_each(work);
    }
}

/// Cuts `out` into chunks of [`TILE_ROWS`] rows, and these between panels into as many tiles as it
/// takes to have `tasks` in all.
fn cut(out: &mut [f32], outputs: usize, tasks: usize) -> Vec<Tile<'_>> {
    let row_chunks = out.len().div_ceil(outputs * TILE_ROWS);
    let panels = outputs.div_ceil(PANEL);
    let width = PANEL * panels.div_ceil(tasks.div_ceil(row_chunks));
    let mut tiles = Vec::with_capacity(row_chunks * outputs.div_ceil(width));
    for (chunk, out) in out.chunks_mut(outputs * TILE_ROWS).enumerate() {
        let first = chunk * TILE_ROWS;
        let rows = first..first + out.len() / outputs;
        let chunk_tiles = tiles.len();
        for start in (0..outputs).step_by(width) {
            let outputs = start..outputs.min(start + width);
            tiles.push(Tile { rows: rows.clone(), outputs, out: Vec::with_capacity(rows.len()) });
        }
        for row in out.chunks_mut(outputs) {
            for (tile, part) in tiles[chunk_tiles..].iter_mut().zip(row.chunks_mut(width)) {
                tile.out.push(part);
            }
        }
    }
    tiles
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_element_once() {
        for (rows, outputs) in [(1, 1), (1, 576), (3, 7), (127, 17), (128, 8), (300, 65)] {
            for tasks in [1, 2, 5, 8, 1000] {
                let mut out = vec![0.0; rows * outputs];
                for tile in cut(&mut out, outputs, tasks) {
                    assert!(tile.rows.len() <= TILE_ROWS && tile.outputs.start % PANEL == 0);
                    assert_eq!(tile.out.len(), tile.rows.len());
                    for (row, part) in tile.rows.zip(tile.out) {
                        assert_eq!(part.len(), tile.outputs.len());
                        for (output, element) in tile.outputs.clone().zip(part) {
                            *element += (row * outputs + output) as f32 + 1.0;
                        }
                    }
                }
                let once = out.iter().enumerate().all(|(i, &x)| x == i as f32 + 1.0);
                assert!(once, "{rows} rows, {outputs} outputs, {tasks} tasks");
            }
        }
    }
}
