//! Sharing a product out among threads.

/// Weight rows are taken in panels of this many; work is cut between panels.
pub(super) const PANEL: usize = 16;

/// Activation rows taken together, at most: few enough that they stay in the second-level cache.
const TILE_ROWS: usize = 128;

/// Multiply-adds below which a task is not worth handing to another thread (a few µs).
const MIN_TASK: usize = 1 << 16;

/// Tasks per thread, so that a delayed thread does not delay the others.
const TASKS_PER_THREAD: usize = 4;

/// Something that fills a matrix `[rows, outputs]` and can be cut.
pub(super) trait Work: Send + Sized {
    /// `[rows, outputs]`.
    fn size(&self) -> [usize; 2];
    /// What makes the rows before `at`, and the rest.
    fn split_rows(self, at: usize) -> (Self, Self);
    /// What makes the outputs before `at`, a multiple of [`PANEL`], and the rest.
    fn split_outputs(self, at: usize) -> (Self, Self);
    /// Does it, on this thread.
    fn run(self);
}

/// How many tasks to make of a number of multiply-adds.
pub(super) fn tasks(products: usize) -> usize {
    let threads = rayon::current_num_threads();
    if threads == 1 { 1 } else { (products / MIN_TASK).clamp(1, TASKS_PER_THREAD * threads) }
}

/// Does `work`, cut into tiles of at most [`TILE_ROWS`] rows and at least `tasks` pieces if it has
/// as many panels. The pieces are stack-allocated jobs of the current rayon pool.
pub(super) fn share_out<W: Work>(work: W, tasks: usize) {
    let [rows, outputs] = work.size();
    let panels = outputs.div_ceil(PANEL);
    if rows > TILE_ROWS {
        let tiles = rows.div_ceil(TILE_ROWS);
        let (a, b) = work.split_rows(tiles / 2 * TILE_ROWS);
        let first = (tasks * (tiles / 2)).div_ceil(tiles);
        rayon::join(|| share_out(a, first), || share_out(b, tasks.saturating_sub(first)));
    } else if tasks > 1 && panels > 1 {
        let first = tasks / 2;
        let (a, b) = work.split_outputs((panels * first).div_ceil(tasks) * PANEL);
        rayon::join(|| share_out(a, first), || share_out(b, tasks - first));
    } else if panels > 0 && rows > 0 {
        work.run();
    }
}
