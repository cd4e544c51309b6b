//! Dense layers: `y[r, o] = Σ_i x[r, i]·w[o, i] (+ bias[o])`.
//!
//! A weight stays as the file holds it, whatever its format; a view of the mapped file, not a copy.
//! Two kernels cover all formats. *Float* weights ([`float`]) are converted to f32 as they are read
//! and accumulated in f32. *Quantized* weights ([`quantized`]) are multiplied as integers: each
//! activation row is first rounded to 8 bits in blocks of 32 with a scale each ([`activations`]).
//!
//! A row's result is bit-identical for any number of rows and threads: the order in which a row's
//! products are added depends on the number of columns alone. It differs between instruction sets
//! in the rounding of `a·b + c` only.

mod activations;
mod float;
mod quantized;
mod tiles;

use crate::isa::Isa;
use kivi_core::blocks::{
    BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K, BlockQ6K,
    BlockQ8_0,
};
use kivi_core::{Error, Result, WeightData, WeightFormat, expect_len};

/// Arguments of one multiplication, lengths checked.
#[derive(Clone, Copy)]
struct Input<'a> {
    isa: Isa,
    /// `[outputs, columns]`
    weight: &'a WeightData,
    /// `[rows, columns]`
    x: &'a [f32],
    /// `[outputs]`
    bias: Option<&'a [f32]>,
}

/// Multiplies into `out`, `[rows, outputs]`.
type Multiply = fn(Input<'_>, &mut [f32]);

/// The weight of a linear layer or an embedding, `[outputs, columns]`, in the format of its file.
#[derive(Clone, Debug)]
pub struct Weight {
    data: WeightData,
    multiply: Multiply,
}

impl Weight {
    /// A weight that keeps the bytes of `data`; nothing is converted or copied.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a format without a kernel.
    pub fn new(data: WeightData) -> Result<Self> {
        let multiply = match data.format() {
            WeightFormat::F32 => float::multiply::<float::F32>,
            WeightFormat::F16 => float::multiply::<float::F16>,
            WeightFormat::Bf16 => float::multiply::<float::Bf16>,
            WeightFormat::Q4_0 => quantized::multiply::<BlockQ4_0, 8>,
            WeightFormat::Q4_1 => quantized::multiply::<BlockQ4_1, 8>,
            WeightFormat::Q5_0 => quantized::multiply::<BlockQ5_0, 8>,
            WeightFormat::Q5_1 => quantized::multiply::<BlockQ5_1, 8>,
            WeightFormat::Q8_0 => quantized::multiply::<BlockQ8_0, 8>,
            WeightFormat::Q2K => quantized::multiply::<BlockQ2K, 4>,
            WeightFormat::Q3K => quantized::multiply::<BlockQ3K, 4>,
            WeightFormat::Q4K => quantized::multiply::<BlockQ4K, 8>,
            WeightFormat::Q5K => quantized::multiply::<BlockQ5K, 8>,
            WeightFormat::Q6K => quantized::multiply::<BlockQ6K, 4>,
            other => {
                let what = format!("weights in {other}");
                return Err(Error::Unsupported { backend: "cpu", what });
            }
        };
        Ok(Self { data, multiply })
    }

    /// The tensor as the file holds it.
    pub fn data(&self) -> &WeightData {
        &self.data
    }

    /// Writes `x·wᵀ (+ bias)` to `out`.
    ///
    /// - `x`: `[rows, columns]`, row-major.
    /// - `bias`: `[outputs]`.
    /// - `out`: `[rows, outputs]`, row-major, overwritten.
    ///
    /// Products of float weights are accumulated in f32. With quantized weights the activations are
    /// rounded to 8 bits per block of 32 (`scale = max |x| / 127`), which costs a relative error of
    /// the result of about 5·10⁻³; a block that holds a NaN or an infinity makes the results of its
    /// row NaN.
    ///
    /// Large products are split over the current rayon pool. Call it from inside the pool
    /// (`rayon::ThreadPool::install`): from outside, every call pays a hand-over between threads.
    ///
    /// # Errors
    /// [`Error::InvalidShape`] when a length does not fit.
    pub fn forward(
        &self,
        isa: Isa,
        x: &[f32],
        rows: usize,
        bias: Option<&[f32]>,
        out: &mut [f32],
    ) -> Result<()> {
        const OPERATION: &str = "linear";
        let [outputs, columns] = self.data.shape();
        expect_len(OPERATION, "x", x.len(), elements(rows, columns)?)?;
        expect_len(OPERATION, "out", out.len(), elements(rows, outputs)?)?;
        if let Some(bias) = bias {
            expect_len(OPERATION, "bias", bias.len(), outputs)?;
        }
        if !out.is_empty() {
            (self.multiply)(Input { isa, weight: &self.data, x, bias }, out);
        }
        Ok(())
    }

    /// Writes the rows of an embedding table to `out`, `[tokens, columns]`.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when a token has no row, [`Error::InvalidShape`] when `out` has the
    /// wrong length. `out` may be partly written.
    pub fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let [_, columns] = self.data.shape();
        expect_len("embed", "out", out.len(), elements(tokens.len(), columns)?)?;
        if columns == 0 {
            return Ok(());
        }
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(columns)) {
            self.data.dequantize_row(token as usize, out)?;
        }
        Ok(())
    }
}

/// `rows·columns`, which must not overflow.
fn elements(rows: usize, columns: usize) -> Result<usize> {
    let too_many = || Error::request("linear", format!("{rows} rows of {columns} elements"));
    rows.checked_mul(columns).ok_or_else(too_many)
}
