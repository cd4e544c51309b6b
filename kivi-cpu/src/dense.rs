//! The dense operations of a decoder.

use crate::{
    Cache, Cpu, Matrix, Weight,
    buffers::Buffer,
    isa::{Kernel, Simd, slices},
    linear::{Activations, GatedProduct, Product, Rectangle, run_all},
};
use kivi_core::{
    CacheBackend, DecoderBackend, Error, Result, Rope, RopeStyle, StepPlan, WeightData,
    WeightFormat, expect_len,
};
use rayon::prelude::*;

/// Rows of a gated MLP that are computed together: the two hidden matrices of a long prompt would
/// otherwise be the largest buffers of the process.
const MLP_ROWS: usize = 512;

impl Cpu {
    /// Applies `f` to every row of `x`, in parallel when there are many.
    fn for_each_row(&self, x: &mut Matrix, f: impl Fn(usize, &mut [f32]) + Sync) {
        let width = x.width.max(1);
        if x.rows < 16 {
            x.data.chunks_exact_mut(width).enumerate().for_each(|(row, x)| f(row, x));
        } else {
            let rows = x.data.par_chunks_exact_mut(width).enumerate();
            self.threads.install(|| rows.for_each(|(row, x)| f(row, x)));
        }
    }

    /// `x`, rounded to 8 bits if one of the weights takes that; to be used inside the pool.
    fn quantized(&self, x: &[f32], weights: &[&Weight]) -> Buffer {
        if weights.iter().any(|weight| weight.is_quantized()) {
            Activations::quantize(self.isa, x, &self.buffers)
        } else {
            Buffer::EMPTY
        }
    }
}

impl DecoderBackend for Cpu {
    type Weight = Weight;

    /// Every format keeps its values; [`Weight`] says how.
    fn kept_as(&self, format: WeightFormat) -> WeightFormat {
        format
    }

    fn load(&self, data: WeightData) -> Result<Weight> {
        self.threads.install(|| Weight::load(self.isa, data))
    }

    fn run<R: Send>(&self, step: impl FnOnce() -> R + Send) -> R {
        self.threads.install(step)
    }

    fn embed(&self, table: &Weight, tokens: &[u32]) -> Result<Matrix> {
        let mut out = self.matrix(tokens.len(), table.shape()[1])?;
        table.embed(tokens, &mut out.data)?;
        Ok(out)
    }

    fn rms_norm(&self, x: &Matrix, weight: &Weight, epsilon: f32) -> Result<Matrix> {
        let scale = weight.vector("rms norm", "weight", x.width)?;
        let mut out = self.matrix(x.rows, x.width)?;
        self.for_each_row(&mut out, |row, out| {
            self.isa.run(RmsNorm { x: x.row(row), scale, epsilon, out });
        });
        Ok(out)
    }

    fn linear(&self, x: &Matrix, weight: &Weight, bias: Option<&Weight>) -> Result<Matrix> {
        let [out] = self.linear_many(x, [(weight, bias)])?;
        Ok(out)
    }

    fn linear_many<const N: usize>(
        &self,
        x: &Matrix,
        layers: [(&Weight, Option<&Weight>); N],
    ) -> Result<[Matrix; N]> {
        let mut biases = [None; N];
        let mut outputs = [const { Matrix::EMPTY }; N];
        for ((weight, bias), (bias_row, out)) in
            layers.into_iter().zip(biases.iter_mut().zip(&mut outputs))
        {
            let [width, inputs] = weight.shape();
            expect_len("linear", "input width", x.width, inputs)?;
            *bias_row = bias.map(|bias| bias.vector("linear", "bias", width)).transpose()?;
            *out = self.matrix(x.rows, width)?;
        }
        self.threads.install(|| {
            let quantized = self.quantized(&x.data, &layers.map(|(weight, _)| weight));
            let activations = Activations::new(x.width, &x.data, &quantized);
            let mut layers = layers.into_iter().zip(biases);
            let mut products = outputs.each_mut().map(|out| {
                let ((weight, _), bias) = layers.next()?;
                let out = Rectangle::new(&mut out.data, out.width);
                Some(Product::new(self.isa, weight, activations, bias, out))
            });
            run_all(&mut products);
        });
        Ok(outputs)
    }

    fn rotate_and_append(
        &self,
        cache: &mut Cache,
        layer: usize,
        plan: &StepPlan,
        rope: &Rope,
        angles: &Matrix,
        [queries, keys, values]: [&mut Matrix; 3],
    ) -> Result<()> {
        let head_dim = cache.layer("rotate", layer)?.geometry.head_dim;
        rope.validate(head_dim)?;
        angles.expect("rotate", plan.rows, rope.rotary_dim())?;
        for heads in [queries, &mut *keys] {
            if heads.rows != plan.rows || !heads.width.is_multiple_of(head_dim) {
                let reason = format!("a matrix of {:?} for {} rows", self.shape(heads), plan.rows);
                return Err(Error::request("rotate", reason));
            }
            self.for_each_row(heads, |row, heads| {
                for head in heads.chunks_exact_mut(head_dim) {
                    rotate(rope, angles.row(row), head);
                }
            });
        }
        self.append(cache, layer, plan, keys, values)
    }

    fn gated_mlp(&self, x: &Matrix, gate: &Weight, up: &Weight, down: &Weight) -> Result<Matrix> {
        const OPERATION: &str = "gated mlp";
        let [intermediate, inputs] = gate.shape();
        expect_len(OPERATION, "input width", x.width, inputs)?;
        expect_len(OPERATION, "columns of up", up.shape()[1], inputs)?;
        expect_len(OPERATION, "rows of up", up.shape()[0], intermediate)?;
        expect_len(OPERATION, "columns of down", down.shape()[1], intermediate)?;
        let mut out = self.matrix(x.rows, down.shape()[0])?;
        let rows = x.rows.min(MLP_ROWS);
        let mut hidden = self.matrix(rows, intermediate)?;
        let mut ups = self.matrix(rows, intermediate)?;
        self.threads.install(|| {
            let quantized = self.quantized(&x.data, &[gate, up]);
            let x = Activations::new(x.width, &x.data, &quantized);
            let mut rest = Rectangle::new(&mut out.data, out.width);
            for first in (0..out.rows).step_by(MLP_ROWS) {
                let (out, more) = rest.split_rows(MLP_ROWS);
                rest = more;
                let rows = out.rows();
                let x = x.rows(first, first + rows);
                let hidden = &mut hidden.data[..rows * intermediate];
                let ups = &mut ups.data[..rows * intermediate];
                let product = |weight, out| {
                    Product::new(self.isa, weight, x, None, Rectangle::new(out, intermediate))
                };
                GatedProduct { gate: product(gate, &mut *hidden), up: product(up, ups) }
                    .run_shared();
                let quantized = self.quantized(hidden, &[down]);
                let hidden = Activations::new(intermediate, hidden, &quantized);
                run_all(&mut [Some(Product::new(self.isa, down, hidden, None, out))]);
            }
        });
        Ok(out)
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) -> Result<()> {
        y.expect("add", x.rows, x.width)?;
        for (x, y) in x.data.iter_mut().zip(&*y.data) {
            *x += y;
        }
        Ok(())
    }

    fn select_rows(&self, x: &Matrix, rows: &[usize]) -> Result<Matrix> {
        let mut out = self.matrix(rows.len(), x.width)?;
        for (&row, out) in rows.iter().zip(out.data.chunks_exact_mut(x.width.max(1))) {
            if row >= x.rows {
                return Err(Error::request("select rows", format!("row {row} of {}", x.rows)));
            }
            out.copy_from_slice(x.row(row));
        }
        Ok(out)
    }
}

/// Rotates one head by the row's cosines and sines, `[2, rotary_dim / 2]`.
fn rotate(rope: &Rope, angles: &[f32], head: &mut [f32]) {
    let (cosines, sines) = angles.split_at(rope.frequencies.len());
    let turn = |a: &mut f32, b: &mut f32, cos: f32, sin: f32| {
        (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
    };
    match rope.style {
        RopeStyle::Halves => {
            let (first, rest) = head.split_at_mut(rope.frequencies.len());
            for (((a, b), &cos), &sin) in first.iter_mut().zip(rest).zip(cosines).zip(sines) {
                turn(a, b, cos, sin);
            }
        }
        RopeStyle::Interleaved => {
            for ((pair, &cos), &sin) in head.chunks_exact_mut(2).zip(cosines).zip(sines) {
                let [a, b] = pair else { return };
                turn(a, b, cos, sin);
            }
        }
    }
}

struct RmsNorm<'a> {
    x: &'a [f32],
    scale: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mean = slices::dot(simd, self.x, self.x) / self.x.len() as f32;
        let factor = 1.0 / (mean + self.epsilon).sqrt();
        for ((out, x), scale) in self.out.iter_mut().zip(self.x).zip(self.scale) {
            *out = x * (factor * scale);
        }
    }
}
