//! The scalar reference of every kivi backend operation.
//!
//! It is the oracle of the parity tests, so it is written to be read beside the paper and to be
//! obviously correct: one loop per index, f32 arithmetic, tokens found by their position in a map.
//! It is never optimised. [`measure`](kivi_core::CacheBackend::measure) reports the bytes of the
//! formats it emulates, although it computes on f32.

mod attend;
mod cache;
mod cache_backend;
mod dense;
#[cfg(feature = "parity")]
pub mod parity;

pub use cache::Cache;
pub use dense::Weight;

/// The reference backend.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuRef;

/// Name on the command line and in errors.
const NAME: &str = "cpu-ref";

/// A matrix of f32, `[rows, width]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    width: usize,
    data: Vec<f32>,
}

impl Matrix {
    fn new(rows: usize, width: usize, data: Vec<f32>) -> Self {
        Self { rows, width, data }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.width..(row + 1) * self.width]
    }

    fn expect(&self, operation: &'static str, rows: usize, width: usize) -> kivi_core::Result<()> {
        kivi_core::expect_len(operation, "rows", self.rows, rows)?;
        kivi_core::expect_len(operation, "width", self.width, width)
    }
}
