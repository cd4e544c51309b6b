//! Dense layers of SmolLM2-135M's shapes, single rows (decoding) and many (prefill).
//!
//! `cargo bench -p kivi-cpu --bench linear [-- FILTER]`, under `KIVI_CPU_ISA` if set, on one thread per
//! core. Each case is
//! compared with f64 on the dequantized weights before it is timed. Throughput is in multiply-adds.

use bytes::Bytes;
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kivi_core::{CacheBackend, DecoderBackend, WeightData, WeightFormat};
use kivi_cpu::Cpu;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// A repeatable sequence (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Roughly normal, variance 1.
    fn normal(&mut self) -> f32 {
        let sum: u32 = (0..4).map(|_| (self.next() >> 48) as u32).sum();
        (sum as f32 / 65536.0 - 2.0) * 1.732
    }
}

/// A weight of random codes with moderate scales.
fn weight(format: WeightFormat, shape: [usize; 2], random: &mut Random) -> WeightData {
    let length = format.tensor_bytes(shape).expect("whole blocks");
    let mut bytes: Vec<u8> = (0..length).map(|_| random.next() as u8).collect();
    // The f16 fields of a block, by offset; 0x2400 … 0x27ff is 0.016 … 0.031.
    let halves: &[usize] = match format {
        WeightFormat::Q4_0 | WeightFormat::Q8_0 => &[0],
        WeightFormat::Q4_1 | WeightFormat::Q4K => &[0, 2],
        WeightFormat::Q6K => &[208],
        WeightFormat::F16 => &[0],
        WeightFormat::F32 => {
            for element in bytes.as_chunks_mut().0 {
                *element = random.normal().to_le_bytes();
            }
            &[]
        }
        other => panic!("no generator for {other}"),
    };
    for block in bytes.chunks_exact_mut(format.block_bytes()) {
        for &offset in halves {
            block[offset + 1] = 0x24 | block[offset + 1] & 0x83;
        }
    }
    WeightData::new(format, shape, Bytes::from(bytes)).expect("the length fits")
}

/// Compares the first and last row with f64; the error is relative to the norm of the row.
fn check(weight: &WeightData, x: &[f32], rows: usize, out: &[f32]) {
    let [outputs, columns] = weight.shape();
    let mut values = vec![0.0; columns];
    for row in [0, rows - 1] {
        let (mut error, mut norm) = (0.0, 0.0);
        for output in 0..outputs {
            weight.dequantize_row(output, &mut values).expect("the row exists");
            let x = &x[row * columns..][..columns];
            let expected: f64 =
                x.iter().zip(&values).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            error += (expected - f64::from(out[row * outputs + output])).powi(2);
            norm += expected.powi(2);
        }
        let relative = (error / norm).sqrt();
        assert!(relative < 1.5e-2, "{}, row {row}: error {relative:e}", weight.format());
    }
}

fn linear(criterion: &mut Criterion) {
    let cpu = Cpu::new(0).expect("KIVI_CPU_ISA names an instruction set of this machine");
    let mut random = Random(1);
    let mut group = criterion.benchmark_group(format!("linear/{}", cpu.isa()));
    group.sample_size(20).warm_up_time(Duration::from_millis(200));
    group.measurement_time(Duration::from_secs(1));
    let shapes = [[576, 576], [1536, 576], [576, 1536]];
    let decode = shapes.into_iter().map(|shape| (WeightFormat::Q4_1, shape, 1));
    let batch = [[1536, 576], [576, 1536]]
        .into_iter()
        .flat_map(|shape| [12, 160, 2048].map(|rows| (WeightFormat::Q4_1, shape, rows)));
    let formats = [
        WeightFormat::Q4_0,
        WeightFormat::Q8_0,
        WeightFormat::Q4K,
        WeightFormat::Q6K,
        WeightFormat::F16,
        WeightFormat::F32,
    ];
    let formats =
        formats.into_iter().flat_map(|format| [1, 512].map(|rows| (format, [1536, 1536], rows)));
    let logits = [1, 4].map(|rows| (WeightFormat::Q8_0, [49152, 576], rows));
    // All layers at once: more than a last-level cache.
    let model = [1, 2, 4, 8].map(|rows| (WeightFormat::Q4_1, [184_320, 576], rows));
    for (format, shape, rows) in decode.chain(batch).chain(formats).chain(logits).chain(model) {
        let data = weight(format, shape, &mut random);
        let weight = cpu.load(data.clone()).expect("a supported format");
        let [outputs, columns] = shape;
        let x: Vec<f32> = (0..rows * columns).map(|_| random.normal()).collect();
        let input = cpu.upload(rows, columns, &x).expect("the lengths fit");
        let linear = || cpu.linear(&input, &weight, None).expect("the shapes fit");
        let mut out = vec![0.0; rows * outputs];
        cpu.read(&linear(), &mut out).expect("the lengths fit");
        check(&data, &x, rows, &out);
        group.throughput(Throughput::Elements((rows * outputs * columns) as u64));
        let id = BenchmarkId::new(format.name(), format!("{outputs}x{columns}/{rows}"));
        group.bench_function(id, |bencher| {
            // As a model calls it.
            bencher.iter_custom(|iterations| {
                cpu.run(|| {
                    let start = Instant::now();
                    for _ in 0..iterations {
                        black_box(linear());
                    }
                    start.elapsed()
                })
            });
        });
    }
    group.finish();
}

criterion_group!(benches, linear);
criterion_main!(benches);
