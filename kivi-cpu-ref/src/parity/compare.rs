//! Comparing a backend with the reference.

use super::{Case, Cut, RunResult, SequenceData, run};
use crate::CpuRef;
use kivi_core::{CacheBackend, Error, memory::MeasuredBytes};
use std::ops::AddAssign;

/// What a comparison found.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Cases compared.
    pub cases: usize,
    /// Cases the backend does not support.
    pub skipped: usize,
    /// Rows compared.
    pub rows: usize,
    /// The largest error as a share of what is tolerated.
    pub worst: f32,
}

impl AddAssign for Report {
    fn add_assign(&mut self, other: Self) {
        self.cases += other.cases;
        self.skipped += other.skipped;
        self.rows += other.rows;
        self.worst = self.worst.max(other.worst);
    }
}

/// Runs a case on a backend and on the reference.
///
/// `rounding` is how far, as a share of the largest of a group, the backend may round the numbers
/// that it multiplies codes with (`q∘s`, `p·s`): 0 if it multiplies in f32.
///
/// A case whose pool the backend refuses with [`Error::Unsupported`], or with key biases it has not, is
/// skipped: a line says so and the report counts it.
///
/// # Errors
/// A text that says what differs and where.
pub fn check<B: CacheBackend>(backend: &B, case: &Case, rounding: f32) -> Result<Report, String> {
    let pool = case.pool().map_err(|error| error.to_string())?;
    if let Err(reason @ Error::Unsupported { .. }) = backend.create_cache(&pool) {
        println!("skipped case {}: {reason}", case.seed);
        return Ok(Report { skipped: 1, ..Report::default() });
    }
    if case.key_bias.is_some() && !backend.capabilities().key_bias {
        println!("skipped case {}: no key biases", case.seed);
        return Ok(Report { skipped: 1, ..Report::default() });
    }
    let sequences = case.sequences.iter().enumerate();
    let data: Vec<_> =
        sequences.map(|(i, &sequence)| SequenceData::new(case, i, sequence)).collect();
    let expected = run(&CpuRef, case, &data, Cut::PLAIN).map_err(|e| format!("reference: {e}"))?;
    let found = run(backend, case, &data, case.cut).map_err(|error| error.to_string())?;
    compare_layers(&expected, &found)?;
    compare_bytes(case, &expected, "reference")?;
    compare_bytes(case, &found, "backend")?;
    compare_outputs(case, &data, &expected, &found, rounding)
}

/// The error of one output element that rounding explains, `u = 2⁻²⁴` being the unit roundoff of f32.
///
/// A logit is a sum of `D` products; with `q·(s∘c + z)` evaluated as `(q∘s)·c + q·z` its terms are
/// bounded by `|q_d| · 3 max_j |k_jd|`, so with `A` the sum of those bounds, times the scale, it is
/// off by at most `(D + 8)·u·A`. Weights are off by as much relative to themselves, plus a few units
/// for the exponential and one per term of the sums over `n` tokens; the reference is off by as much
/// again. That is the worst case, in which every rounding errs in the same direction; they do not,
/// so a twentieth of it is allowed (seen: a seventh of that).
///
/// A backend that rounds the factors of codes (`rounding`, see [`check`]) errs in a logit by `D` such
/// errors of at most `M = max_d |q_d| · max_j |k_jd|` times the rounding, since a scale times half
/// the largest code is half a range; and in the output by as much as the weights of a tile of at most
/// 128 tokens. The errors are independent: six standard deviations of a uniform distribution.
pub fn tolerance(
    head_dim: usize,
    tokens: usize,
    [logit_bound, largest_product]: [f32; 2],
    largest_value: f32,
    rounding: f32,
) -> f32 {
    const SHARE_OF_WORST_CASE: f32 = 0.05;
    let u = 2f32.powi(-24);
    // A group's reconstruction reaches at most three times the largest value, as for keys.
    let weights = (head_dim as f32 + 8.0) * logit_bound + tokens as f32 + 16.0;
    let six_sigma = |terms: f32| 6.0 * (terms / 3.0).sqrt() * rounding;
    let rounded = 2.0 * largest_product * six_sigma(head_dim as f32) + six_sigma(128.0);
    (SHARE_OF_WORST_CASE * 2.0 * 2.0 * weights * u + rounded) * 3.0 * largest_value
}

fn compare_layers(expected: &RunResult, found: &RunResult) -> Result<(), String> {
    if expected.layers.len() != found.layers.len() {
        return Err("different pages were given up".into());
    }
    for (sequence, (a, b)) in expected.layers.iter().zip(&found.layers).enumerate() {
        let different = |what: &str| Err(format!("sequence {sequence}: {what} differ"));
        match (&a.packed_keys, &b.packed_keys) {
            (Some(a), Some(b)) if a.codes != b.codes => return different("key codes"),
            (Some(a), Some(b)) if bits(&a.scales) != bits(&b.scales) => {
                return different("key scales");
            }
            (Some(a), Some(b)) if bits(&a.zeros) != bits(&b.zeros) => {
                return different("key zeros");
            }
            (Some(a), Some(b)) => match (&a.promoted, &b.promoted) {
                (Some(a), Some(b)) if (a.count, &a.mask) != (b.count, &b.mask) => {
                    return different("masks of promoted channels");
                }
                (Some(a), Some(b)) if a.lo != b.lo => return different("lower key codes"),
                (Some(_), Some(_)) | (None, None) => {}
                _ => return different("promoted channels"),
            },
            (None, None) => {}
            _ => return different("key formats"),
        }
        match (&a.packed_values, &b.packed_values) {
            (Some(a), Some(b)) if a.codes != b.codes => return different("value codes"),
            (Some(a), Some(b)) if bits(&a.scales) != bits(&b.scales) => {
                return different("value scales");
            }
            (Some(a), Some(b)) if bits(&a.zeros) != bits(&b.zeros) => {
                return different("value zeros");
            }
            (Some(_), Some(_)) | (None, None) => {}
            _ => return different("value formats"),
        }
        if a.full != b.full || a.sinks != b.sinks {
            return different("full-precision tokens");
        }
    }
    Ok(())
}

fn bits(x: &[impl Copy + Into<f32>]) -> Vec<u32> {
    x.iter().map(|&x| x.into().to_bits()).collect()
}

/// The memory model's prediction, to the byte. Pages that a window gave up stay allocated.
fn compare_bytes(case: &Case, result: &RunResult, who: &str) -> Result<(), String> {
    let mut measured = result.measured;
    let predicted = MeasuredBytes::from(result.predicted);
    if case.window.is_some() {
        measured.allocated = measured.allocated.min(predicted.allocated);
    }
    if measured == predicted {
        return Ok(());
    }
    Err(format!("{who}: {measured:?} measured, {predicted:?} predicted"))
}

fn compare_outputs(
    case: &Case,
    data: &[SequenceData],
    expected: &RunResult,
    found: &RunResult,
    rounding: f32,
) -> Result<Report, String> {
    let (head_dim, width) = (case.head_dim, case.kv_heads * case.head_dim);
    let heads = case.kv_heads * case.head_group;
    let scale = case.attention().scale;
    let mut report = Report { cases: 1, ..Report::default() };
    for (sequence, (a, b)) in expected.outputs.iter().zip(&found.outputs).enumerate() {
        if a.len() != b.len() {
            return Err(format!("sequence {sequence}: {} outputs, not {}", b.len(), a.len()));
        }
        let data = &data[sequence];
        let column_max = |x: &[f32], channel: usize| {
            x.iter().skip(channel).step_by(width).fold(0f32, |max, x| max.max(x.abs()))
        };
        let largest: Vec<f32> = (0..width).map(|channel| column_max(&data.keys, channel)).collect();
        let largest_value = data.values.iter().fold(0f32, |max, x| max.max(x.abs()));
        for (vector, (a, b)) in a.chunks(head_dim).zip(b.chunks(head_dim)).enumerate() {
            let (token, head) = (vector / heads, vector % heads);
            let kv_head = head / case.head_group;
            let query = &data.queries[vector * head_dim..][..head_dim];
            let bounds = &largest[kv_head * head_dim..][..head_dim];
            let products = query.iter().zip(bounds).map(|(q, k)| (q * k * scale).abs());
            let bound: f32 = products.clone().map(|product| 3.0 * product).sum();
            // A rotated pair of a bias is at most √2 of its elements long; it is multiplied in f32.
            let element = case.key_bias.unwrap_or(0.0) / (head_dim as f32).sqrt();
            let queries = query.iter().map(|q| q.abs()).sum::<f32>();
            let bias = queries * element * std::f32::consts::SQRT_2 * scale.abs();
            let bounds = [bound + bias, products.fold(0.0, f32::max)];
            let allowed = tolerance(head_dim, token + 1, bounds, largest_value, rounding);
            for (channel, (a, b)) in a.iter().zip(b).enumerate() {
                let error = (a - b).abs();
                if error.is_nan() || error > allowed {
                    return Err(format!(
                        "sequence {sequence}, token {token}, head {head}, channel {channel}: {b}, \
                         expected {a} within {allowed:e}"
                    ));
                }
                if allowed > 0.0 {
                    report.worst = report.worst.max(error / allowed);
                }
            }
            report.rows += usize::from(head == 0);
        }
    }
    Ok(report)
}
