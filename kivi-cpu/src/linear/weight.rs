//! Weights as this backend keeps them.

use super::panels::{self, Panels};
use super::{float, quantized};
use crate::isa::Isa;
use kivi_core::blocks::{
    Block, BlockQ2K, BlockQ3K, BlockQ4_0, BlockQ4_1, BlockQ4K, BlockQ5_0, BlockQ5_1, BlockQ5K,
    BlockQ6K, BlockQ8_0,
};
use kivi_core::{Error, Result, WeightData, WeightFormat, expect_len};

use super::rectangle::Rectangle;

/// The weight of a linear layer, an embedding or a norm, `[outputs, columns]`.
///
/// Floats are a view of the file, quantized weights a rearranged copy with the same values; then
/// nothing of the file is held.
pub struct Weight {
    format: WeightFormat,
    shape: [usize; 2],
    pub(super) store: Store,
    /// The values, if there is a single row: a bias or the weight of a norm.
    vector: Box<[f32]>,
}

/// Where the elements are, and the functions of their format.
pub(super) enum Store {
    Floats { data: WeightData, multiply: fn(float::Input<'_>, Rectangle<'_>) },
    Panels { panels: Panels, kernels: Kernels },
}

/// What can be done with panels of one format.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    pack: fn(Isa, &WeightData) -> Panels,
    dequantize: fn(&Panels, usize, &mut [f32]),
    pub(super) multiply: fn(quantized::Input<'_>, Rectangle<'_>),
}

impl Kernels {
    fn of<B: Block>() -> Self {
        Self {
            pack: Panels::pack::<B>,
            dequantize: panels::dequantize::<B>,
            multiply: quantized::multiply::<B>,
        }
    }
}

impl Weight {
    /// Takes a weight; call it inside the rayon pool that is to do the work.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a format without a kernel.
    pub(crate) fn load(isa: Isa, data: WeightData) -> Result<Self> {
        let (format, shape) = (data.format(), data.shape());
        let mut vector = Box::default();
        if let [1, columns] = shape {
            vector = vec![0.0; columns].into_boxed_slice();
            data.dequantize_row(0, &mut vector)?;
        }
        let floats = |multiply| Ok(Store::Floats { data: data.clone(), multiply });
        let packed =
            |kernels: Kernels| Ok(Store::Panels { panels: (kernels.pack)(isa, &data), kernels });
        let store = match format {
            WeightFormat::F32 => floats(float::multiply::<float::F32>),
            WeightFormat::F16 => floats(float::multiply::<float::F16>),
            WeightFormat::Bf16 => floats(float::multiply::<float::Bf16>),
            WeightFormat::Q4_0 => packed(Kernels::of::<BlockQ4_0>()),
            WeightFormat::Q4_1 => packed(Kernels::of::<BlockQ4_1>()),
            WeightFormat::Q5_0 => packed(Kernels::of::<BlockQ5_0>()),
            WeightFormat::Q5_1 => packed(Kernels::of::<BlockQ5_1>()),
            WeightFormat::Q8_0 => packed(Kernels::of::<BlockQ8_0>()),
            WeightFormat::Q2K => packed(Kernels::of::<BlockQ2K>()),
            WeightFormat::Q3K => packed(Kernels::of::<BlockQ3K>()),
            WeightFormat::Q4K => packed(Kernels::of::<BlockQ4K>()),
            WeightFormat::Q5K => packed(Kernels::of::<BlockQ5K>()),
            WeightFormat::Q6K => packed(Kernels::of::<BlockQ6K>()),
            other => {
                let what = format!("weights in {other}");
                Err(Error::Unsupported { backend: crate::NAME, what })
            }
        }?;
        Ok(Self { format, shape, store, vector })
    }

    /// The element format.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// `[outputs, columns]`.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Bytes of the elements as they are kept; floats are a view of the file.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Floats { data, .. } => data.bytes().len(),
            Store::Panels { panels, .. } => panels.bytes(),
        }
    }

    /// Whether products with this weight take activations of 8 bits.
    pub(crate) fn is_quantized(&self) -> bool {
        matches!(self.store, Store::Panels { .. })
    }

    /// The values of a weight `[1, len]`.
    ///
    /// # Errors
    /// [`Error::InvalidShape`] when it has another shape.
    pub(crate) fn vector(
        &self,
        operation: &'static str,
        what: &'static str,
        len: usize,
    ) -> Result<&[f32]> {
        expect_len(operation, what, self.shape[1], len)?;
        expect_len(operation, "rows of the vector", self.shape[0], 1)?;
        Ok(&self.vector)
    }

    /// Writes the rows of an embedding table to `out`, `[tokens, columns]`.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] when a token has no row; `out` may be partly written then.
    pub(crate) fn embed(&self, tokens: &[u32], out: &mut [f32]) -> Result<()> {
        let [rows, columns] = self.shape;
        for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(columns.max(1))) {
            let row = token as usize;
            match &self.store {
                _ if row >= rows => {
                    return Err(Error::request("embed", format!("token {token} of {rows}")));
                }
                Store::Floats { data, .. } => data.dequantize_row(row, out)?,
                Store::Panels { panels, kernels } => (kernels.dequantize)(panels, row, out),
            }
        }
        Ok(())
    }
}

/// Format, shape and size: the elements would fill the terminal.
impl std::fmt::Debug for Weight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Weight")
            .field("format", &self.format)
            .field("shape", &self.shape)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
