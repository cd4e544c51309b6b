//! Weight tensors as a model file holds them.

pub mod blocks;
mod dequantize;

use crate::{Error, Result};
use bytes::Bytes;

/// Element format of a weight tensor.
///
/// The quantized formats are those of GGUF files; [`blocks`] and [`WeightData::dequantize_row`] are
/// their definition here, after ggml's `ggml-quants.c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[allow(missing_docs)] // the names are the documentation
pub enum WeightFormat {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2K,
    Q3K,
    Q4K,
    Q5K,
    Q6K,
}

impl WeightFormat {
    /// Every format, in the order of the declaration.
    pub const ALL: [Self; 13] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Name as GGUF tools print it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
            Self::Q5_0 => "Q5_0",
            Self::Q5_1 => "Q5_1",
            Self::Q8_0 => "Q8_0",
            Self::Q2K => "Q2_K",
            Self::Q3K => "Q3_K",
            Self::Q4K => "Q4_K",
            Self::Q5K => "Q5_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Elements that share one block; a row holds a whole number of blocks.
    pub const fn block_elements(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 | Self::Q8_0 => 32,
            Self::Q2K | Self::Q3K | Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q8_0 => 34,
            Self::Q2K => 84,
            Self::Q3K => 110,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a tensor of `rows` rows of `columns` elements, or `None` if a row is not a whole
    /// number of blocks or the size does not fit in memory.
    pub fn tensor_bytes(self, [rows, columns]: [usize; 2]) -> Option<usize> {
        if !columns.is_multiple_of(self.block_elements()) {
            return None;
        }
        (columns / self.block_elements()).checked_mul(self.block_bytes())?.checked_mul(rows)
    }
}

impl std::fmt::Display for WeightFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// One weight tensor: a reference-counted view into the mapped file, never a copy.
///
/// A vector (norm weight, bias) has the shape `[1, n]`.
#[derive(Clone, Debug)]
pub struct WeightData {
    format: WeightFormat,
    shape: [usize; 2],
    bytes: Bytes,
}

impl WeightData {
    /// A tensor of `shape = [rows, columns]`, row-major, little-endian; a linear layer maps
    /// `columns` inputs to `rows` outputs.
    ///
    /// # Errors
    /// [`Error::InvalidWeight`] when `bytes` is not exactly as long as the shape says or a row is
    /// not a whole number of blocks.
    pub fn new(format: WeightFormat, shape: [usize; 2], bytes: Bytes) -> Result<Self> {
        let fail = |reason| Error::InvalidWeight { format: format.name(), shape, reason };
        let expected = format.tensor_bytes(shape).ok_or_else(|| {
            fail(format!("rows must be whole blocks of {}", format.block_elements()))
        })?;
        if bytes.len() != expected {
            return Err(fail(format!("{} bytes, expected {expected}", bytes.len())));
        }
        Ok(Self { format, shape, bytes })
    }

    /// Element format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// `[rows, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// All bytes, row after row.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// If `row` is not smaller than the number of rows.
    pub fn row(&self, row: usize) -> &[u8] {
        let bytes = self.bytes.len() / self.shape[0];
        &self.bytes[row * bytes..(row + 1) * bytes]
    }
}
