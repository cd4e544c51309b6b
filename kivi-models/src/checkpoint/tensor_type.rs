//! Element types of GGUF tensors.

use crate::{Error, Result};
use kivi_core::WeightFormat;

/// Element type of a tensor in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorType {
    /// One that weights can have.
    Weight(WeightFormat),
    /// One that this crate can list but not compute with.
    Other {
        /// Name as GGUF tools print it.
        name: &'static str,
        /// Elements per block.
        block_elements: u64,
        /// Bytes per block.
        block_bytes: u64,
    },
}

impl TensorType {
    /// The type with the number `code` in `ggml.h`. Sizes of the types without a [`WeightFormat`]:
    /// `GGML_QUANT_SIZES` of the Python package `gguf` 0.19.
    ///
    /// # Errors
    /// [`Error::UnsupportedFeature`], naming `tensor`, for a number not listed here: without its
    /// size the tensor cannot even be skipped safely.
    pub(super) fn from_code(code: u32, tensor: &str) -> Result<Self> {
        use WeightFormat as F;
        let other =
            |name, block_elements, block_bytes| Self::Other { name, block_elements, block_bytes };
        Ok(match code {
            0 => Self::Weight(F::F32),
            1 => Self::Weight(F::F16),
            2 => Self::Weight(F::Q4_0),
            3 => Self::Weight(F::Q4_1),
            6 => Self::Weight(F::Q5_0),
            7 => Self::Weight(F::Q5_1),
            8 => Self::Weight(F::Q8_0),
            9 => other("Q8_1", 32, 40),
            10 => Self::Weight(F::Q2K),
            11 => Self::Weight(F::Q3K),
            12 => Self::Weight(F::Q4K),
            13 => Self::Weight(F::Q5K),
            14 => Self::Weight(F::Q6K),
            15 => other("Q8_K", 256, 292),
            16 => other("IQ2_XXS", 256, 66),
            17 => other("IQ2_XS", 256, 74),
            18 => other("IQ3_XXS", 256, 98),
            19 => other("IQ1_S", 256, 50),
            20 => other("IQ4_NL", 32, 18),
            21 => other("IQ3_S", 256, 110),
            22 => other("IQ2_S", 256, 82),
            23 => other("IQ4_XS", 256, 136),
            24 => other("I8", 1, 1),
            25 => other("I16", 1, 2),
            26 => other("I32", 1, 4),
            27 => other("I64", 1, 8),
            28 => other("F64", 1, 8),
            29 => other("IQ1_M", 256, 56),
            30 => Self::Weight(F::Bf16),
            34 => other("TQ1_0", 256, 54),
            35 => other("TQ2_0", 256, 66),
            39 => other("MXFP4", 32, 17),
            40 => other("NVFP4", 64, 36),
            41 => other("Q1_0", 128, 18),
            _ => {
                return Err(Error::unsupported(
                    format!("tensor {tensor} of ggml type {code}"),
                    weight_formats(),
                ));
            }
        })
    }

    /// Name as GGUF tools print it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Weight(format) => format.name(),
            Self::Other { name, .. } => name,
        }
    }

    /// Elements and bytes of one block; the fastest dimension is a whole number of blocks.
    pub(super) fn block(self) -> (u64, u64) {
        match self {
            Self::Weight(format) => (format.block_elements() as u64, format.block_bytes() as u64),
            Self::Other { block_elements, block_bytes, .. } => (block_elements, block_bytes),
        }
    }
}

/// The names of the formats that weights can have.
pub(super) fn weight_formats() -> String {
    WeightFormat::ALL.map(WeightFormat::name).join(", ")
}
