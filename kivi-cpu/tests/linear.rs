//! Dense layers in every format and on every instruction set, against f64 on the dequantized weights.

use bytes::Bytes;
use kivi_core::{Error, WeightData, WeightFormat};
use kivi_cpu::{Isa, Weight};

/// A repeatable sequence (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Uniform in −1 … 1.
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, length: usize) -> Vec<f32> {
        (0..length).map(|_| self.uniform()).collect()
    }
}

/// Offsets of the f16 fields within a block.
fn halves(format: WeightFormat) -> &'static [usize] {
    match format {
        WeightFormat::F16 | WeightFormat::Q4_0 | WeightFormat::Q5_0 | WeightFormat::Q8_0 => &[0],
        WeightFormat::Q4_1 | WeightFormat::Q5_1 | WeightFormat::Q4K | WeightFormat::Q5K => &[0, 2],
        WeightFormat::Q2K => &[80, 82],
        WeightFormat::Q3K => &[108],
        WeightFormat::Q6K => &[208],
        _ => &[],
    }
}

/// A weight of random bits, its float fields of either sign and below 2 in magnitude.
fn weight(format: WeightFormat, shape: [usize; 2], random: &mut Random) -> WeightData {
    let length = format.tensor_bytes(shape).unwrap();
    let mut bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        for &offset in halves(format) {
            block[offset + 1] &= 0xbf;
        }
        if matches!(format, WeightFormat::F32 | WeightFormat::Bf16) {
            let top = block.len() - 1;
            block[top] = 0x3e | block[top] & 0x80;
        }
    }
    WeightData::new(format, shape, Bytes::from(bytes)).unwrap()
}

fn is_float(format: WeightFormat) -> bool {
    matches!(format, WeightFormat::F32 | WeightFormat::F16 | WeightFormat::Bf16)
}

/// Columns that make a full and a short run of every kind of block, or a tail of floats.
fn columns(format: WeightFormat) -> usize {
    match format.block_elements() {
        1 => 203,
        32 => 1024 + 96,
        _ => 1024 + 512,
    }
}

/// `x·wᵀ` in f64 and, for each result, the error allowed.
///
/// With `n` columns, floats: `n/8 + 4` roundings at most of partial sums no larger than `Σ|x·w|`.
/// Quantized: each activation is off by half a step, `max|x|/254`, of its block, and a little more
/// because the scale itself is rounded; then the sums in f32, whose terms, taken apart into code and
/// min, can be larger than the products; twice the columns is ample.
fn expected(data: &WeightData, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
    let [outputs, columns] = data.shape();
    let mut w = vec![0.0; columns];
    let (mut results, mut allowed) = (Vec::new(), Vec::new());
    let steps: Vec<f64> = x
        .chunks(32)
        .flat_map(|block| {
            let largest = block.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            block.iter().map(move |_| f64::from(largest) / 127.0)
        })
        .collect();
    for row in 0..x.len() / columns {
        let x = &x[row * columns..][..columns];
        let steps = &steps[row * columns..][..columns];
        for output in 0..outputs {
            data.dequantize_row(output, &mut w).unwrap();
            let products = x.iter().zip(&w).map(|(&x, &w)| f64::from(x) * f64::from(w));
            let magnitude: f64 = products.clone().map(f64::abs).sum();
            let epsilon = f64::from(f32::EPSILON);
            let error = if is_float(data.format()) {
                (columns as f64 / 8.0 + 4.0) * epsilon * magnitude
            } else {
                let half_steps: f64 =
                    w.iter().zip(steps).map(|(&w, step)| 0.501 * f64::from(w).abs() * step).sum();
                half_steps + 2.0 * columns as f64 * epsilon * magnitude
            };
            results.push(products.sum());
            allowed.push(error);
        }
    }
    (results, allowed)
}

fn forward(weight: &Weight, isa: Isa, x: &[f32], rows: usize, bias: Option<&[f32]>) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows * weight.data().shape()[0]];
    weight.forward(isa, x, rows, bias, &mut out).unwrap();
    out
}

fn in_pool<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(work)
}

#[test]
fn every_format_agrees_with_f64() {
    let mut random = Random(1);
    for format in WeightFormat::ALL {
        for outputs in [1, 5, 8, 19] {
            let columns = columns(format);
            let data = weight(format, [outputs, columns], &mut random);
            let bias = random.floats(outputs);
            for rows in [1, 2, 3, 7] {
                let x = random.floats(rows * columns);
                let (expected, allowed) = expected(&data, &x);
                for isa in Isa::available() {
                    let weight = Weight::new(data.clone()).unwrap();
                    let out = forward(&weight, isa, &x, rows, None);
                    for (i, (&out, &expected)) in out.iter().zip(&expected).enumerate() {
                        let error = (f64::from(out) - expected).abs();
                        let allowed = allowed[i];
                        assert!(
                            error <= allowed,
                            "{format} {outputs}x{columns}, {rows} rows, {isa}, element {i}: \
                             {out} instead of {expected}, error {error:e}, allowed {allowed:e}"
                        );
                    }
                    let biased = forward(&weight, isa, &x, rows, Some(&bias));
                    for (i, (&out, &biased)) in out.iter().zip(&biased).enumerate() {
                        assert_eq!(biased, out + bias[i % outputs], "{format}, {isa}");
                    }
                }
            }
        }
    }
}

/// 8-bit activations cost well under a percent in the mean.
#[test]
fn mean_error_of_quantized_activations() {
    let mut random = Random(2);
    for format in WeightFormat::ALL.into_iter().filter(|&format| !is_float(format)) {
        let data = weight(format, [64, 1536], &mut random);
        let x = random.floats(4 * 1536);
        let (expected, _) = expected(&data, &x);
        let out = forward(&Weight::new(data).unwrap(), Isa::detect().unwrap(), &x, 4, None);
        let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
        let error = squares(&mut out.iter().zip(&expected).map(|(&a, b)| f64::from(a) - b));
        let relative = (error / squares(&mut expected.iter().copied())).sqrt();
        println!("{format}: {relative:.1e}");
        assert!(relative < 8e-3, "{format}: {relative:e}");
    }
}

#[test]
fn a_row_is_the_same_in_any_company_and_on_any_number_of_threads() {
    let mut random = Random(3);
    for format in WeightFormat::ALL {
        let (outputs, columns) = (531, columns(format));
        let weight = Weight::new(weight(format, [outputs, columns], &mut random)).unwrap();
        let x = random.floats(130 * columns);
        for isa in Isa::available() {
            let all = in_pool(3, || forward(&weight, isa, &x, 130, None));
            for (first, rows) in [(0, 1), (1, 2), (5, 3), (11, 7), (66, 64), (129, 1)] {
                let part = &x[first * columns..][..rows * columns];
                let out = in_pool(1 + rows % 2, || forward(&weight, isa, part, rows, None));
                let same = out == all[first * outputs..][..rows * outputs];
                assert!(same, "{format}, {isa}: {rows} rows from {first}");
            }
        }
    }
}

#[test]
fn instruction_sets_agree_up_to_rounding() {
    let mut random = Random(4);
    for format in WeightFormat::ALL {
        let columns = columns(format);
        let data = weight(format, [24, columns], &mut random);
        let x = random.floats(5 * columns);
        let magnitude: f32 = {
            let mut w = vec![0.0; columns];
            let norm = |row| {
                data.dequantize_row(row, &mut w).unwrap();
                w.iter().map(|w| w.abs()).sum::<f32>()
            };
            (0..24).map(norm).fold(0.0, f32::max)
        };
        let weight = Weight::new(data).unwrap();
        let mut results = Isa::available().map(|isa| forward(&weight, isa, &x, 5, None));
        let portable = results.next().unwrap();
        for other in results {
            for (a, b) in portable.iter().zip(other) {
                assert!((a - b).abs() <= 2e-6 * magnitude, "{format}: {a} and {b}");
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_are_not_hidden() {
    let mut random = Random(5);
    for format in WeightFormat::ALL {
        let columns = columns(format);
        let weight = Weight::new(weight(format, [9, columns], &mut random)).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.floats(3 * columns);
            x[columns + columns / 2] = bad;
            for isa in Isa::available() {
                let out = forward(&weight, isa, &x, 3, None);
                let finite: Vec<bool> =
                    out.chunks(9).map(|row| row.iter().any(|y| y.is_finite())).collect();
                assert_eq!(finite, [true, false, true], "{format}, {isa}, {bad}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors_and_empty_ones_are_not() {
    let isa = Isa::detect().unwrap();
    for format in WeightFormat::ALL {
        let columns = format.block_elements();
        let weight_of = |shape| Weight::new(weight(format, shape, &mut Random(6))).unwrap();
        let layer = weight_of([3, columns]);
        let x = vec![1.0; 2 * columns];
        let refused = |x: &[f32], rows, bias, out: &mut [f32]| {
            let result = layer.forward(isa, x, rows, bias, out);
            matches!(result, Err(Error::InvalidShape { .. } | Error::InvalidRequest { .. }))
        };
        assert!(refused(&x[1..], 2, None, &mut [0.0; 6]));
        assert!(refused(&x, 2, None, &mut [0.0; 5]));
        assert!(refused(&x, 2, Some(&[0.0; 4]), &mut [0.0; 6]));
        assert!(refused(&x, usize::MAX, None, &mut [0.0; 6]));
        layer.forward(isa, &[], 0, None, &mut []).unwrap();
        weight_of([0, columns]).forward(isa, &x, 2, Some(&[]), &mut []).unwrap();
        let mut out = [9.0; 6];
        weight_of([3, 0]).forward(isa, &[], 2, Some(&[1.0, 2.0, 3.0]), &mut out).unwrap();
        assert_eq!(out, [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
    }
}

#[test]
fn embedding_is_the_dequantized_row() {
    for format in WeightFormat::ALL {
        let columns = columns(format);
        let data = weight(format, [4, columns], &mut Random(7));
        let table = Weight::new(data.clone()).unwrap();
        let mut out = vec![0.0; 3 * columns];
        table.embed(&[2, 0, 2], &mut out).unwrap();
        let mut row = vec![0.0; columns];
        for (token, out) in [2, 0, 2].into_iter().zip(out.chunks(columns)) {
            data.dequantize_row(token, &mut row).unwrap();
            assert_eq!(out, row, "{format}");
        }
        assert!(matches!(table.embed(&[0, 4, 1], &mut out), Err(Error::InvalidRequest { .. })));
        assert!(matches!(table.embed(&[0], &mut out), Err(Error::InvalidShape { .. })));
    }
}
