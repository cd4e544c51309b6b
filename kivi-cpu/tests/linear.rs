//! Dense layers in every format and on every instruction set, against f64 on the dequantized weights.

use bytes::Bytes;
use kivi_core::{CacheBackend, DecoderBackend, Error, WeightData, WeightFormat};
use kivi_cpu::{Cpu, Isa, Weight};

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

/// A backend on two threads.
fn cpu(isa: Isa) -> Cpu {
    Cpu::with_isa(2, isa).unwrap()
}

fn best() -> Cpu {
    cpu(Isa::detect().unwrap())
}

fn read(cpu: &Cpu, matrix: &<Cpu as CacheBackend>::Buffer) -> Vec<f32> {
    let [rows, width] = cpu.shape(matrix);
    let mut out = vec![f32::NAN; rows * width];
    cpu.read(matrix, &mut out).unwrap();
    out
}

/// `x·dataᵀ (+ bias)`.
fn linear(cpu: &Cpu, data: &WeightData, x: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
    let [outputs, columns] = data.shape();
    let weight = cpu.load(data.clone()).unwrap();
    let x = cpu.upload(x.len() / columns, columns, x).unwrap();
    let bias = bias.map(|bias| {
        let bytes = bias.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let data = WeightData::new(WeightFormat::F32, [1, outputs], bytes.into()).unwrap();
        cpu.load(data).unwrap()
    });
    read(cpu, &cpu.linear(&x, &weight, bias.as_ref()).unwrap())
}

#[test]
fn every_format_agrees_with_f64() {
    let mut random = Random(1);
    for format in WeightFormat::ALL {
        let few = if is_float(format) { 5 } else { format.block_elements() };
        for (outputs, columns) in [1, 5, 8, 19]
            .into_iter()
            .flat_map(|outputs| [columns(format), few].map(|columns| (outputs, columns)))
        {
            let data = weight(format, [outputs, columns], &mut random);
            let bias = random.floats(outputs);
            for rows in [1, 2, 3, 7] {
                let x = random.floats(rows * columns);
                let (expected, allowed) = expected(&data, &x);
                for isa in Isa::available() {
                    let out = linear(&cpu(isa), &data, &x, None);
                    for (i, (&out, &expected)) in out.iter().zip(&expected).enumerate() {
                        let error = (f64::from(out) - expected).abs();
                        let allowed = allowed[i];
                        assert!(
                            error <= allowed,
                            "{format} {outputs}x{columns}, {rows} rows, {isa}, element {i}: \
                             {out} instead of {expected}, error {error:e}, allowed {allowed:e}"
                        );
                    }
                    let biased = linear(&cpu(isa), &data, &x, Some(&bias));
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
        let out = linear(&best(), &data, &x, None);
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
        let data = weight(format, [outputs, columns], &mut random);
        let x = random.floats(130 * columns);
        for isa in Isa::available() {
            let linear = |threads: usize, x: &[f32]| {
                linear(&Cpu::with_isa(threads, isa).unwrap(), &data, x, None)
            };
            let all = linear(3, &x);
            for (first, rows) in [(0, 1), (1, 2), (5, 3), (11, 7), (66, 64), (129, 1)] {
                let part = &x[first * columns..][..rows * columns];
                let out = linear(1 + rows % 2, part);
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
        let mut results = Isa::available().map(|isa| linear(&cpu(isa), &data, &x, None));
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
        let data = weight(format, [9, columns], &mut random);
        for bad in [f32::NAN, f32::INFINITY] {
            let mut x = random.floats(3 * columns);
            x[columns + columns / 2] = bad;
            for isa in Isa::available() {
                let out = linear(&cpu(isa), &data, &x, None);
                let finite: Vec<bool> =
                    out.chunks(9).map(|row| row.iter().any(|y| y.is_finite())).collect();
                assert_eq!(finite, [true, false, true], "{format}, {isa}, {bad}");
            }
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_errors_and_empty_ones_are_not() {
    let cpu = best();
    let load = |format, shape| cpu.load(weight(format, shape, &mut Random(6))).unwrap();
    let matrix = |rows, width: usize| cpu.upload(rows, width, &vec![1.0; rows * width]).unwrap();
    let vector = |values: &[f32]| {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<u8>>();
        let shape = [1, values.len()];
        cpu.load(WeightData::new(WeightFormat::F32, shape, bytes.into()).unwrap()).unwrap()
    };
    for format in WeightFormat::ALL {
        let columns = format.block_elements();
        let layer = load(format, [3, columns]);
        let refused = |x, bias: Option<&Weight>| {
            matches!(cpu.linear(&x, &layer, bias), Err(Error::InvalidShape { .. }))
        };
        assert!(refused(matrix(2, columns + 1), None));
        assert!(refused(matrix(2, columns), Some(&vector(&[0.0; 4]))));
        assert!(refused(matrix(2, columns), Some(&load(WeightFormat::F32, [3, 1]))));
        let out = cpu.linear(&matrix(0, columns), &layer, None).unwrap();
        assert_eq!(cpu.shape(&out), [0, 3]);
        let empty = load(format, [0, columns]);
        let out = cpu.linear(&matrix(2, columns), &empty, Some(&vector(&[]))).unwrap();
        assert_eq!(cpu.shape(&out), [2, 0]);
        let narrow = load(format, [3, 0]);
        let out = cpu.linear(&matrix(2, 0), &narrow, Some(&vector(&[1.0, 2.0, 3.0]))).unwrap();
        assert_eq!(read(&cpu, &out), [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]);
        let gated = |gate, up, down| {
            let [gate, up, down] = [gate, up, down].map(|shape| load(format, shape));
            matches!(
                cpu.gated_mlp(&matrix(1, columns), &gate, &up, &down),
                Err(Error::InvalidShape { .. })
            )
        };
        let (wide, other) = ([columns, columns], [columns + 1, columns]);
        assert!(gated(wide, other, wide) && gated(other, wide, wide) && gated(other, other, wide));
        assert!(!gated(wide, wide, wide));
    }
}

/// Rearranging the rows at load loses nothing: the table gives back the values of the file.
#[test]
fn embedding_is_the_dequantized_row() {
    for format in WeightFormat::ALL {
        let few = if is_float(format) { 5 } else { format.block_elements() };
        for (rows, columns) in [(1, columns(format)), (8, few), (19, columns(format)), (21, few)] {
            let data = weight(format, [rows, columns], &mut Random(7));
            let mut expected = vec![0.0; rows * columns];
            for (row, expected) in expected.chunks_mut(columns).enumerate() {
                data.dequantize_row(row, expected).unwrap();
            }
            for isa in Isa::available() {
                let cpu = cpu(isa);
                let table = cpu.load(data.clone()).unwrap();
                let all: Vec<u32> = (0..rows as u32).collect();
                let found = read(&cpu, &cpu.embed(&table, &all).unwrap());
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let same = bits(&found) == bits(&expected);
                assert!(same, "{format}, {rows}x{columns}, {isa}");
                let twice = cpu.embed(&table, &[0, 0]).unwrap();
                assert!(bits(&read(&cpu, &twice)[columns..]) == bits(&expected[..columns]));
                let refused = cpu.embed(&table, &[0, rows as u32]);
                assert!(matches!(refused, Err(Error::InvalidRequest { .. })));
            }
        }
    }
}

/// What is computed in one go equals what is computed one by one, bit for bit.
#[test]
fn layers_in_company_are_the_same() {
    let mut random = Random(8);
    let mut formats = WeightFormat::ALL.into_iter().cycle();
    for _ in WeightFormat::ALL {
        // Neighbours in the list: floats and integers, sub-blocks of 16 and of 32, mixed.
        let mut load = |outputs| {
            let format = formats.next().unwrap();
            weight(format, [outputs, 512], &mut random)
        };
        let data = [load(40), load(531), load(7)];
        let mut random = Random(9);
        let (one, many) = (best(), Cpu::with_isa(3, Isa::detect().unwrap()).unwrap());
        for rows in [1, 5, 131] {
            let x = random.floats(rows * 512);
            let weights = data.each_ref().map(|data| many.load(data.clone()).unwrap());
            let [a, b, c] = weights.each_ref();
            let input = many.upload(rows, 512, &x).unwrap();
            let found = many.linear_many(&input, [(a, None), (b, None), (c, None)]).unwrap();
            for (data, found) in data.iter().zip(found) {
                assert_eq!(read(&many, &found), linear(&one, data, &x, None), "{rows} rows");
            }
        }
    }
}

/// The gated MLP is the composition of its parts, bit for bit, for any number of rows.
#[test]
fn gated_mlp_is_made_of_linear_layers() {
    let mut random = Random(10);
    let formats = [WeightFormat::Q4_1, WeightFormat::F16, WeightFormat::Q6K, WeightFormat::Q8_0];
    for format in formats {
        let (width, intermediate) = (256, 768);
        let gate = weight(format, [intermediate, width], &mut random);
        let up = weight(WeightFormat::Q4K, [intermediate, width], &mut random);
        let down = weight(format, [width, intermediate], &mut random);
        let cpu = best();
        let x = random.floats(600 * width);
        let input = cpu.upload(600, width, &x).unwrap();
        let [a, b, c] = [&gate, &up, &down].map(|data| cpu.load(data.clone()).unwrap());
        let found = read(&cpu, &cpu.gated_mlp(&input, &a, &b, &c).unwrap());

        let (gates, ups) = (linear(&cpu, &gate, &x, None), linear(&cpu, &up, &x, None));
        let silu = |x: f32| f64::from(x) / (1.0 + (-f64::from(x)).exp());
        let hidden: Vec<f32> =
            gates.iter().zip(&ups).map(|(&g, &u)| (silu(g) * f64::from(u)) as f32).collect();
        let expected = linear(&cpu, &down, &hidden, None);
        let largest = expected.iter().fold(0.0f32, |a, x| a.max(x.abs()));
        for (i, (a, b)) in found.iter().zip(&expected).enumerate() {
            // An activation on the edge between two codes may go either way.
            assert!((a - b).abs() <= 5e-3 * largest, "{format}, element {i}: {a}, not {b}");
        }
        for row in [0, 511, 512, 599] {
            let one = cpu.upload(1, width, &x[row * width..][..width]).unwrap();
            let alone = read(&cpu, &cpu.gated_mlp(&one, &a, &b, &c).unwrap());
            assert_eq!(alone, found[row * width..][..width], "{format}, row {row}");
        }
    }
}
