//! Products as work that threads share.

use super::activations::{self, ActivationBlock, BLOCK};
use super::rectangle::Rectangle;
use super::weight::{Store, Weight};
use super::work::{self, Work, share_out};
use super::{float, quantized};
use crate::buffers::{Buffer, Buffers};
use crate::isa::{Isa, Kernel, LANES, Simd};
use std::sync::Arc;

/// Rows of activations, `[rows, columns]`, as they are and, for quantized weights, in 8 bits.
#[derive(Clone, Copy)]
pub(crate) struct Activations<'a> {
    columns: usize,
    floats: &'a [f32],
    /// Empty if no weight needs them.
    blocks: &'a [ActivationBlock],
}

impl<'a> Activations<'a> {
    /// Rows of `columns` elements, with their blocks of 8 bits in `quantized` if that was filled by
    /// [`quantize`](Self::quantize).
    pub(crate) fn new(columns: usize, floats: &'a [f32], quantized: &'a Buffer) -> Self {
        Self { columns, floats, blocks: bytemuck::cast_slice(quantized) }
    }

    /// Rounds rows to 8 bits, into a buffer. `columns` is a whole number of blocks.
    pub(crate) fn quantize(isa: Isa, x: &[f32], buffers: &Arc<Buffers>) -> Buffer {
        let mut out = buffers.take(x.len() / BLOCK * ActivationBlock::FLOATS);
        activations::quantize(isa, x, bytemuck::cast_slice_mut(&mut out));
        out
    }

    /// The rows `start … end − 1`.
    pub(crate) fn rows(self, start: usize, end: usize) -> Self {
        let cut = |per_row: usize, len: usize| {
            (start * per_row).min(len)..(end.saturating_mul(per_row)).min(len)
        };
        let blocks = self.columns / BLOCK;
        Self {
            columns: self.columns,
            floats: &self.floats[cut(self.columns, self.floats.len())],
            blocks: &self.blocks[cut(blocks, self.blocks.len())],
        }
    }
}

/// `out = x·wᵀ (+ bias)`, lengths checked.
pub(crate) struct Product<'a> {
    isa: Isa,
    weight: &'a Weight,
    x: Activations<'a>,
    bias: Option<&'a [f32]>,
    /// The first output that `out` covers.
    first: usize,
    out: Rectangle<'a>,
}

impl<'a> Product<'a> {
    /// All outputs of `weight` into `out`, `[rows, outputs]`.
    pub(crate) fn new(
        isa: Isa,
        weight: &'a Weight,
        x: Activations<'a>,
        bias: Option<&'a [f32]>,
        out: Rectangle<'a>,
    ) -> Self {
        Self { isa, weight, x, bias, first: 0, out }
    }

    /// The same product for a shorter while.
    fn reborrow(&mut self) -> Product<'_> {
        Product { out: self.out.reborrow(), ..*self }
    }

    /// Multiply-adds.
    fn cost(&self) -> usize {
        self.out.rows().saturating_mul(self.out.width()).saturating_mul(self.x.columns)
    }
}

impl Work for Product<'_> {
    fn size(&self) -> [usize; 2] {
        [self.out.rows(), self.out.width()]
    }

    fn split_rows(self, at: usize) -> (Self, Self) {
        let (x, rest) = (self.x.rows(0, at), self.x.rows(at, usize::MAX));
        let (out, out_rest) = self.out.split_rows(at);
        (Self { x, out, ..self }, Self { x: rest, out: out_rest, ..self })
    }

    fn split_outputs(self, at: usize) -> (Self, Self) {
        let (bias, bias_rest) = self.bias.map(|bias| bias.split_at(at)).unzip();
        let (out, out_rest) = self.out.split_columns(at);
        let first = self.first + at;
        (Self { bias, out, ..self }, Self { bias: bias_rest, first, out: out_rest, ..self })
    }

    fn run(self) {
        let Self { isa, weight, x, bias, first, out } = self;
        match &weight.store {
            Store::Floats { data, multiply } => {
                multiply(float::Input { isa, weight: data, first, x: x.floats, bias }, out);
            }
            Store::Panels { panels, kernels } => {
                let Activations { columns, blocks: x, .. } = x;
                let weight = panels;
                (kernels.multiply)(quantized::Input { isa, weight, columns, first, x, bias }, out);
            }
        }
    }
}

/// Does all products there are, sharing them out among the threads of the current rayon pool.
pub(crate) fn run_all(products: &mut [Option<Product<'_>>]) {
    match products {
        [] => {}
        [product] => {
            if let Some(product) = product.take() {
                let tasks = work::tasks(product.cost());
                share_out(product, tasks);
            }
        }
        _ => {
            let (a, b) = products.split_at_mut(products.len() / 2);
            rayon::join(|| run_all(a), || run_all(b));
        }
    }
}

/// `gate = silu(x·gateᵀ) ∘ (x·upᵀ)`: the first half of a gated MLP. Both products have the same shape
/// and no bias; that of `up` is left over.
pub(crate) struct GatedProduct<'a> {
    pub(crate) gate: Product<'a>,
    pub(crate) up: Product<'a>,
}

impl GatedProduct<'_> {
    /// Does it, sharing it out among the threads of the current rayon pool.
    pub(crate) fn run_shared(self) {
        let tasks = work::tasks(self.gate.cost().saturating_mul(2));
        share_out(self, tasks);
    }
}

impl Work for GatedProduct<'_> {
    fn size(&self) -> [usize; 2] {
        self.gate.size()
    }

    fn split_rows(self, at: usize) -> (Self, Self) {
        let (gate, gate_rest) = self.gate.split_rows(at);
        let (up, up_rest) = self.up.split_rows(at);
        (Self { gate, up }, Self { gate: gate_rest, up: up_rest })
    }

    fn split_outputs(self, at: usize) -> (Self, Self) {
        let (gate, gate_rest) = self.gate.split_outputs(at);
        let (up, up_rest) = self.up.split_outputs(at);
        (Self { gate, up }, Self { gate: gate_rest, up: up_rest })
    }

    fn run(mut self) {
        self.gate.reborrow().run();
        self.up.reborrow().run();
        let Self { gate: Product { isa, out: mut gate, .. }, up: Product { out: mut up, .. } } =
            self;
        for row in 0..gate.rows() {
            isa.run(SiluMul { gate: gate.row(row), up: up.row(row) });
        }
    }
}

/// `gate = silu(gate) ∘ up`.
struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let zero = simd.splat(0.0);
        for (gate, up) in self.gate.chunks_mut(LANES).zip(self.up.chunks(LANES)) {
            let mut g = [0.0; LANES];
            g[..gate.len()].copy_from_slice(gate);
            let mut e = [0.0; LANES];
            simd.store(simd.exp(simd.sub(zero, simd.load(&g))), &mut e);
            for ((gate, up), e) in gate.iter_mut().zip(up).zip(e) {
                *gate = *gate / (1.0 + e) * up;
            }
        }
    }
}
