//! The dense operations of a decoder.

use crate::{
    Cache, Cpu, Matrix, Weight,
    isa::{Kernel, LANES, Simd, slices},
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

    fn gated_rows(
        &self,
        x: &Matrix,
        [gate, up, down]: [&Weight; 3],
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let mut hidden = self.linear(x, gate, None)?;
        let up = self.linear(x, up, None)?;
        expect_len("gated mlp", "up projection", up.width, hidden.width)?;
        self.for_each_row(&mut hidden, |row, gate| self.isa.run(SiluMul { gate, up: up.row(row) }));
        out.extend(self.linear(&hidden, down, None)?.data);
        Ok(())
    }
}

impl DecoderBackend for Cpu {
    type Weight = Weight;

    fn kept_as(&self, format: WeightFormat) -> WeightFormat {
        format
    }

    fn load(&self, data: WeightData) -> Result<Weight> {
        Weight::new(data)
    }

    fn embed(&self, table: &Weight, tokens: &[u32]) -> Result<Matrix> {
        let mut out = Matrix::zeroed(tokens.len(), table.data().shape()[1]);
        table.embed(tokens, &mut out.data)?;
        Ok(out)
    }

    fn rms_norm(&self, x: &Matrix, weight: &Weight, epsilon: f32) -> Result<Matrix> {
        expect_len("rms norm", "weight rows", weight.data().shape()[0], 1)?;
        expect_len("rms norm", "weight", weight.data().shape()[1], x.width)?;
        let mut scale = vec![0.0; x.width];
        weight.data().dequantize_row(0, &mut scale)?;
        let mut out = x.clone();
        self.for_each_row(&mut out, |_, row| {
            self.isa.run(RmsNorm { row, scale: &scale, epsilon });
        });
        Ok(out)
    }

    fn linear(&self, x: &Matrix, weight: &Weight, bias: Option<&Weight>) -> Result<Matrix> {
        let [outputs, inputs] = weight.data().shape();
        expect_len("linear", "input width", x.width, inputs)?;
        let mut bias_row = None;
        if let Some(bias) = bias {
            expect_len("linear", "bias rows", bias.data().shape()[0], 1)?;
            let mut row = vec![0.0; outputs];
            bias.data().dequantize_row(0, &mut row)?;
            bias_row = Some(row);
        }
        let mut out = Matrix::zeroed(x.rows, outputs);
        let bias = bias_row.as_deref();
        self.threads.install(|| weight.forward(self.isa, &x.data, x.rows, bias, &mut out.data))?;
        Ok(out)
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
        let width = down.data().shape()[0];
        let mut data = Vec::with_capacity(x.rows * width);
        for first in (0..x.rows).step_by(MLP_ROWS) {
            let rows = MLP_ROWS.min(x.rows - first);
            if rows == x.rows {
                self.gated_rows(x, [gate, up, down], &mut data)?;
            } else {
                let part = x.data[first * x.width..(first + rows) * x.width].to_vec();
                let part = Matrix { rows, width: x.width, data: part };
                self.gated_rows(&part, [gate, up, down], &mut data)?;
            }
        }
        Ok(Matrix { rows: x.rows, width, data })
    }

    fn add(&self, x: &mut Matrix, y: &Matrix) -> Result<()> {
        y.expect("add", x.rows, x.width)?;
        for (x, y) in x.data.iter_mut().zip(&y.data) {
            *x += y;
        }
        Ok(())
    }

    fn select_rows(&self, x: &Matrix, rows: &[usize]) -> Result<Matrix> {
        let mut data = Vec::with_capacity(rows.len() * x.width);
        for &row in rows {
            if row >= x.rows {
                return Err(Error::request("select rows", format!("row {row} of {}", x.rows)));
            }
            data.extend_from_slice(x.row(row));
        }
        Ok(Matrix { rows: rows.len(), width: x.width, data })
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
    row: &'a mut [f32],
    scale: &'a [f32],
    epsilon: f32,
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mean = slices::dot(simd, self.row, self.row) / self.row.len() as f32;
        let factor = 1.0 / (mean + self.epsilon).sqrt();
        for (x, scale) in self.row.iter_mut().zip(self.scale) {
            *x *= factor * scale;
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
