//! The values of a weight tensor: the definition every backend's kernels are held against.

use super::blocks::{
    Block, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K,
    BlockQ6K, BlockQ8_0, STRETCH,
};
use super::{WeightData, WeightFormat};
use crate::{Error, Result, expect_len};
use half::{bf16, f16};

impl WeightData {
    /// Writes the values of row `row` to `out`, `[columns]`.
    ///
    /// Quantized values are `scale·(code − offset) + min` in f32, each operation rounded on its own,
    /// in the order ggml and the Python package `gguf` use, so that the bits agree with theirs.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when there is no such row, [`Error::InvalidShape`] when `out` is
    /// not as long as a row.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        const OPERATION: &str = "dequantize row";
        let [rows, columns] = self.shape;
        if row >= rows {
            return Err(Error::request(OPERATION, format!("row {row} of a tensor of {rows} rows")));
        }
        expect_len(OPERATION, "out", out.len(), columns)?;
        let bytes = self.row(row);
        match self.format {
            WeightFormat::F32 => floats(bytes, out, f32::from_le_bytes),
            WeightFormat::F16 => floats(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
            WeightFormat::Bf16 => floats(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
            WeightFormat::Q4_0 => blocks::<BlockQ4_0>(bytes, out),
            WeightFormat::Q4_1 => blocks::<BlockQ4_1>(bytes, out),
            WeightFormat::Q5_0 => blocks::<BlockQ5_0>(bytes, out),
            WeightFormat::Q5_1 => blocks::<BlockQ5_1>(bytes, out),
            WeightFormat::Q8_0 => blocks::<BlockQ8_0>(bytes, out),
            WeightFormat::Q2K => blocks::<BlockQ2K>(bytes, out),
            WeightFormat::Q3K => blocks::<BlockQ3K>(bytes, out),
            WeightFormat::Q4K => blocks::<BlockQ4K>(bytes, out),
            WeightFormat::Q5K => blocks::<BlockQ5K>(bytes, out),
            WeightFormat::Q6K => blocks::<BlockQ6K>(bytes, out),
        }
        Ok(())
    }
}

/// Elements of `N` bytes each.
fn floats<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
    let (elements, _) = bytes.as_chunks::<N>();
    for (out, &element) in out.iter_mut().zip(elements) {
        *out = value(element);
    }
}

/// Quantized blocks, 32 elements at a time.
fn blocks<B: Block>(bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(size_of::<B>()).map(bytemuck::from_bytes::<B>);
    for (block, out) in blocks.zip(out.chunks_exact_mut(B::FORMAT.block_elements())) {
        let [scale, min] = block.header().map(|bits| f16::from_bits(bits).to_f32());
        for (stretch, out) in out.chunks_exact_mut(STRETCH).enumerate() {
            let codes = block.codes(stretch);
            let subs = out.chunks_exact_mut(B::SUB_BLOCK).zip(codes.chunks_exact(B::SUB_BLOCK));
            for (i, (out, codes)) in subs.enumerate() {
                let (scale, min) = block.affine(scale, min, STRETCH / B::SUB_BLOCK * stretch + i);
                for (out, &code) in out.iter_mut().zip(codes) {
                    *out = value::<B>(code, scale, min);
                }
            }
        }
    }
}

/// Value of one code; formats without a min skip the addition, which would turn −0 into 0.
fn value<B: Block>(code: u8, scale: f32, min: f32) -> f32 {
    let scaled = scale * (f32::from(code) - f32::from(B::OFFSET));
    if B::OFFSET == 0 { scaled + min } else { scaled }
}
