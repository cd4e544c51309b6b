//! The dense operations of a decoder, on weights dequantized to f32.

use crate::{Cache, CpuRef, Matrix};
use kivi_core::{
    CacheBackend, DecoderBackend, Error, Result, Rope, StepPlan, WeightData, WeightFormat,
    expect_len,
};

/// A weight as f32, `[rows, columns]`.
#[derive(Clone, Debug)]
pub struct Weight {
    matrix: Matrix,
}

impl DecoderBackend for CpuRef {
    type Weight = Weight;

    fn kept_as(&self, _: WeightFormat) -> WeightFormat {
        WeightFormat::F32
    }

    fn load(&self, data: WeightData) -> Result<Weight> {
        let [rows, columns] = data.shape();
        let mut matrix = Matrix::new(rows, columns, vec![0.0; rows * columns]);
        for row in 0..rows {
            data.dequantize_row(row, matrix.row_mut(row))?;
        }
        Ok(Weight { matrix })
    }

    fn embed(&self, table: &Weight, tokens: &[u32]) -> Result<Matrix> {
        let rows: Vec<usize> = tokens.iter().map(|&token| token as usize).collect();
        self.select_rows(&table.matrix, &rows)
    }

    fn rms_norm(&self, x: &Matrix, weight: &Weight, epsilon: f32) -> Result<Matrix> {
        weight.matrix.expect("rms norm", 1, x.width)?;
        let mut out = x.clone();
        for row in 0..x.rows {
            let mean = x.row(row).iter().map(|x| x * x).sum::<f32>() / x.width as f32;
            let scale = 1.0 / (mean + epsilon).sqrt();
            for (x, w) in out.row_mut(row).iter_mut().zip(weight.matrix.row(0)) {
                *x *= scale * w;
            }
        }
        Ok(out)
    }

    fn linear(&self, x: &Matrix, weight: &Weight, bias: Option<&Weight>) -> Result<Matrix> {
        let weight = &weight.matrix;
        expect_len("linear", "input width", x.width, weight.width)?;
        if let Some(bias) = bias {
            bias.matrix.expect("linear", 1, weight.rows)?;
        }
        let mut out = Matrix::new(x.rows, weight.rows, vec![0.0; x.rows * weight.rows]);
        for row in 0..x.rows {
            for o in 0..weight.rows {
                let products = x.row(row).iter().zip(weight.row(o)).map(|(x, w)| x * w);
                let bias = bias.map_or(0.0, |bias| bias.matrix.data[o]);
                out.row_mut(row)[o] = products.sum::<f32>() + bias;
            }
        }
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
        cache.expect_layer("rotate", layer)?;
        let head_dim = cache.layers[layer].spec.head_dim;
        rope.validate(head_dim)?;
        angles.expect("rotate", plan.rows, rope.rotary_dim())?;
        let pairs = rope.frequencies.len();
        for heads in [queries, &mut *keys] {
            if heads.rows != plan.rows || !heads.width.is_multiple_of(head_dim) {
                return Err(Error::request("rotate", format!("{:?}", self.shape(heads))));
            }
            for row in 0..plan.rows {
                for head in heads.row_mut(row).chunks_exact_mut(head_dim) {
                    for i in 0..pairs {
                        let (cos, sin) = (angles.row(row)[i], angles.row(row)[pairs + i]);
                        let (first, second) = rope.pair(i);
                        let (a, b) = (head[first], head[second]);
                        head[first] = a * cos - b * sin;
                        head[second] = b * cos + a * sin;
                    }
                }
            }
        }
        self.append(cache, layer, plan, keys, values)
    }

    fn gated_mlp(&self, x: &Matrix, gate: &Weight, up: &Weight, down: &Weight) -> Result<Matrix> {
        let mut hidden = self.linear(x, gate, None)?;
        let up = self.linear(x, up, None)?;
        expect_len("gated mlp", "up projection", up.width, hidden.width)?;
        for (g, u) in hidden.data.iter_mut().zip(&up.data) {
            // silu(g) = g · sigmoid(g)
            *g = *g / (1.0 + (-*g).exp()) * u;
        }
        self.linear(&hidden, down, None)
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
        Ok(Matrix::new(rows.len(), x.width, data))
    }
}
