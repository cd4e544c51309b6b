//! The CPU backend of kivi: the default, and the one every machine has.
//!
//! Attention reads the packed codes tile by tile; the dequantized cache never exists. Work is
//! spread over a pool of threads, and vector instructions are chosen at run time (see the `isa`
//! module and [`Isa`]). A row's result is bit-identical for any batch, any cut of the work into
//! steps and any number of threads: every sum has a fixed order that depends on positions only.

#[cfg(target_endian = "big")]
compile_error!("kivi-cpu reads model files and caches in place and needs a little-endian target");

mod attend;
mod buffers;
mod cache;
mod cache_backend;
mod canonical;
mod dense;
mod isa;
mod linear;
mod quantize;

pub use cache::Cache;
pub use isa::Isa;
pub use linear::Weight;

use buffers::{Buffer, Buffers};
use kivi_core::{Error, Result};
use std::sync::{Arc, Mutex};

/// Name on the command line and in errors.
const NAME: &str = "cpu";

/// More threads than any machine has cores are a slip of the keyboard, not a wish.
const MAX_THREADS: usize = 1024;

/// The CPU backend: an instruction set and a pool of threads.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    threads: Arc<rayon::ThreadPool>,
    buffers: Arc<Buffers>,
    /// Lists of the work of an attention step, for the next one.
    work: Arc<Mutex<attend::Work>>,
}

impl Cpu {
    /// A backend on `threads` threads, 0 for one per core, with the best instruction set of this
    /// processor or that of `KIVI_CPU_ISA`.
    ///
    /// # Errors
    /// When there are more than 1024 threads, they cannot be started, or the environment variable
    /// does not fit.
    pub fn new(threads: usize) -> Result<Self> {
        Self::with_isa(threads, Isa::detect()?)
    }

    /// A backend with a given instruction set.
    ///
    /// # Errors
    /// When there are more than 1024 threads or they cannot be started.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self> {
        if threads > MAX_THREADS {
            return Err(Error::config("threads", threads, format!("at most {MAX_THREADS}")));
        }
        let name = |index| format!("kivi-cpu-{index}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).thread_name(name).build();
        let source = |source: rayon::ThreadPoolBuildError| Error::Device {
            backend: NAME,
            operation: "start threads",
            source: Box::new(source),
        };
        let threads = Arc::new(pool.map_err(source)?);
        Ok(Self { isa, threads, buffers: Arc::default(), work: Arc::default() })
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.threads.current_num_threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// A matrix of any contents in recycled memory.
    fn matrix(&self, rows: usize, width: usize) -> Result<Matrix> {
        let len = rows.checked_mul(width);
        let too_large = || Error::request("allocate", format!("{rows} rows of {width} elements"));
        Ok(Matrix { rows, width, data: self.buffers.take(len.ok_or_else(too_large)?) })
    }
}

/// A matrix of f32, `[rows, width]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    rows: usize,
    width: usize,
    data: Buffer,
}

impl Matrix {
    const EMPTY: Self = Self { rows: 0, width: 0, data: Buffer::EMPTY };

    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.width..(row + 1) * self.width]
    }

    fn expect(&self, operation: &'static str, rows: usize, width: usize) -> Result<()> {
        kivi_core::expect_len(operation, "rows", self.rows, rows)?;
        kivi_core::expect_len(operation, "width", self.width, width)
    }
}
