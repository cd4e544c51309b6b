//! Splits, on matrix units and without.

use super::cache::{Pages, Random, Shape, attend, client};
use cubecl::prelude::*;
use kivi_kernels::kernels::splits::{self, Routine, SplitAttention, SplitConfig};

const MATRIX: Routine = Routine::Matrix;
const PLANE: Routine = Routine::Plane;

/// Largest errors: of a logit beside the largest logit, and of an output beside the largest value.
struct Errors {
    logit: f64,
    output: f64,
}

/// What to run.
struct Case {
    routine: Routine,
    shape: Shape,
    /// Tokens of each sequence: whole groups.
    lengths: Vec<usize>,
    rows: usize,
    /// Queries are uniform within plus and minus this.
    query_size: f32,
    /// Row `r` sees only the token `window + 7·r`.
    window: Option<usize>,
    cap: Option<f32>,
    /// Tokens of a split.
    split: usize,
}

fn case(routine: Routine, shape: Shape, lengths: &[usize], rows: usize) -> Case {
    let lengths = lengths.to_vec();
    Case { routine, shape, lengths, rows, query_size: 1.0, window: None, cap: None, split: 512 }
}

fn run(case: Case) -> Option<Errors> {
    let Case { routine, shape, lengths, rows, query_size, window, cap, split: split_tokens } = case;
    let lengths = &lengths[..];
    let client = client()?;
    let mut random = Random::new(1);
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let config = SplitConfig {
        routine,
        rows: if routine == Routine::Matrix { 8 } else { rows },
        key_bits: shape.key_bits,
        value_bits: shape.value_bits,
        group_size: shape.group_size,
        head_dim: shape.head_dim,
        kv_heads: shape.kv_heads,
        page_tokens: shape.page_tokens,
        split_tokens,
        soft_cap: cap.is_some(),
    };
    let (heads, width) = (shape.kv_heads, shape.head_dim);
    let splits = longest.div_ceil(split_tokens);
    let max_pages = longest.div_ceil(shape.page_tokens) + 1;

    // One arena for all sequences.
    let mut arena = Vec::new();
    let mut table = vec![u32::MAX; lengths.len() * max_pages];
    let mut sequences = Vec::new();
    for (i, &tokens) in lengths.iter().enumerate() {
        let pages = Pages::random(shape, tokens, &mut random);
        for (j, base) in pages.table.iter().enumerate() {
            table[i * max_pages + j] = base + arena.len() as u32;
        }
        arena.extend_from_slice(&pages.arena);
        sequences.push(pages);
    }
    let count = lengths.len() * heads * rows * width;
    let queries: Vec<f32> = (0..count).map(|_| random.uniform(-query_size, query_size)).collect();
    let tokens: Vec<u32> = lengths.iter().map(|&tokens| tokens as u32).collect();
    // Rows see different stretches.
    let visible = |sequence: usize, row: usize| match window {
        Some(from) => (from + 7 * row, from + 7 * row + 1),
        None => (3 * row, lengths[sequence] - row),
    };
    let bounds: Vec<u32> = (0..lengths.len())
        .flat_map(|s| (0..rows).flat_map(move |r| [visible(s, r).0 as u32, visible(s, r).1 as u32]))
        .collect();
    let partials = lengths.len() * heads * splits * rows;
    let scale = 1.0 / (width as f32).sqrt();
    let attention = SplitAttention {
        sequences: lengths.len(),
        rows,
        splits,
        max_pages,
        scale,
        cap: cap.unwrap_or(0.0),
        queries: client.create_from_slice(f32::as_bytes(&queries)),
        arena: client.create_from_slice(u32::as_bytes(&arena)),
        arena_words: arena.len(),
        pages: client.create_from_slice(u32::as_bytes(&table)),
        tokens: client.create_from_slice(u32::as_bytes(&tokens)),
        visible: client.create_from_slice(u32::as_bytes(&bounds)),
        sums: client.empty(partials * width * 4),
        extremes: client.empty(partials * 8),
    };
    // SAFETY: the buffers have the shapes; page table entries of pages with tokens are pages.
    unsafe { splits::attend(&client, &attention, config) }.expect("the configuration is supported");
    cubecl::future::block_on(client.sync()).expect("the kernel runs");
    let sums = client.read_one(attention.sums).expect("sums");
    let sums = f32::from_bytes(&sums);
    let extremes = client.read_one(attention.extremes).expect("extremes");
    let extremes = f32::from_bytes(&extremes);

    let (mut worst, mut largest_logit) = (Errors { logit: 0.0, output: 0.0 }, 0.0_f64);
    let larger = |a: f64, b: f64| if b > a || b.is_nan() { b } else { a };
    for (s, pages) in sequences.iter().enumerate() {
        for head in 0..heads {
            for row in 0..rows {
                let at = ((s * heads + head) * rows + row) * width;
                let query = &queries[at..at + width];
                let (keys, cap) = (&pages.keys[head], cap.map(f64::from));
                let (logits, ..) = attend(query, scale.into(), cap, keys, &[], 0..lengths[s]);
                largest_logit = logits.iter().fold(largest_logit, |m, l| m.max(l.abs()));
            }
            let largest_value =
                pages.values[head].iter().flatten().fold(0.0_f64, |m, v| m.max(v.abs()));
            for split in 0..splits {
                for row in 0..rows {
                    let partial = ((s * heads + head) * splits + split) * rows + row;
                    let [max, total] = [extremes[2 * partial], extremes[2 * partial + 1]];
                    let (from, to) = visible(s, row);
                    let from = from.max(split * split_tokens);
                    let to = to.min((split + 1) * split_tokens).min(lengths[s]);
                    if from >= to {
                        assert_eq!(total, 0.0, "sequence {s}, split {split}, row {row}");
                        continue;
                    }
                    let at = ((s * heads + head) * rows + row) * width;
                    let (logits, sum, output) = attend(
                        &queries[at..at + width],
                        f64::from(scale),
                        cap.map(f64::from),
                        &pages.keys[head],
                        &pages.values[head],
                        from..to,
                    );
                    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let found = f64::from(max) + f64::from(total).ln();
                    worst.logit = larger(worst.logit, (found - highest - sum.ln()).abs());
                    for (channel, want) in output.iter().enumerate() {
                        let got = f64::from(sums[partial * width + channel] / total);
                        worst.output = larger(worst.output, (got - want).abs() / largest_value);
                    }
                }
            }
        }
    }
    worst.logit /= largest_logit;
    println!(
        "{routine:?}, {rows} rows, {}/{} bits, groups of {}, head_dim {width}: logits {:.1e}, outputs {:.1e}",
        shape.key_bits, shape.value_bits, shape.group_size, worst.logit, worst.output
    );
    Some(worst)
}

fn shape(bits: usize, head_dim: usize, group_size: usize) -> Shape {
    Shape {
        key_bits: bits,
        value_bits: bits,
        group_size,
        head_dim,
        kv_heads: 2,
        page_tokens: 128,
        magnitude: (1.0, 1.0),
        outliers: 1.0,
    }
}

/// The bound of the project on logits; outputs weigh rounded weights, 2^-11 each, and errors of
/// logits of a few units.
fn check(case: Case) {
    let Some(errors) = run(case) else { return };
    assert!(errors.logit <= 1e-3, "logits: {:e}", errors.logit);
    assert!(errors.output <= 1e-3, "outputs: {:e}", errors.output);
}

#[test]
fn matrix_two_bits() {
    check(case(MATRIX, shape(2, 128, 32), &[1120, 96], 8));
    let pages_of_a_group = Shape { page_tokens: 32, ..shape(2, 64, 32) };
    check(case(MATRIX, pages_of_a_group, &[544], 3));
}

#[test]
fn matrix_other_shapes() {
    check(case(MATRIX, shape(4, 128, 64), &[640], 2));
    check(case(MATRIX, shape(8, 128, 32), &[256], 1));
    check(case(MATRIX, shape(2, 80, 32), &[256], 4));
    check(case(MATRIX, shape(2, 96, 128), &[384], 4));
    check(case(MATRIX, shape(2, 256, 32), &[256], 4));
    let mixed = Shape { key_bits: 4, value_bits: 2, ..shape(2, 64, 32) };
    check(case(MATRIX, mixed, &[128], 8));
}

#[test]
fn plane() {
    check(case(PLANE, shape(2, 128, 32), &[1120, 96], 1));
    check(case(PLANE, shape(2, 64, 32), &[544], 2));
    check(case(PLANE, shape(2, 256, 32), &[256], 1));
    check(case(PLANE, shape(4, 128, 64), &[640], 2));
    check(case(PLANE, shape(4, 64, 128), &[256], 1));
    let mixed = Shape { key_bits: 4, value_bits: 2, ..shape(2, 128, 32) };
    check(case(PLANE, mixed, &[128], 2));
}

/// Each row sees one token: the maximum is its logit.
#[test]
fn single_logits() {
    for window in [0, 301, 610] {
        for (routine, rows) in [(MATRIX, 8), (PLANE, 2)] {
            let all = case(routine, shape(2, 128, 32), &[1120], rows);
            check(Case { window: Some(window), query_size: 4.0, ..all });
        }
    }
}

/// Scales from small to nearly the largest f16: nothing overflows, nothing is lost.
#[test]
fn magnitudes() {
    for magnitude in [(2e-3, 2e-3), (1.0, 3e4), (3e4, 1.0)] {
        let shape = Shape { magnitude, ..shape(2, 128, 32) };
        for routine in [MATRIX, PLANE] {
            let case = case(routine, shape, &[256], 1);
            check(Case { query_size: 1.0 / magnitude.0, ..case });
        }
    }
}

/// A few channels are fifty times larger than the rest, as those of real keys.
#[test]
fn outliers() {
    for routine in [MATRIX, PLANE] {
        let shape = Shape { outliers: 50.0, magnitude: (0.05, 1.0), ..shape(2, 128, 32) };
        check(case(routine, shape, &[512], 1));
    }
}

#[test]
fn shorter_splits() {
    for routine in [MATRIX, PLANE] {
        let case = case(routine, shape(2, 128, 32), &[352], 1);
        check(Case { split: 256, ..case });
    }
}

#[test]
fn soft_cap() {
    for routine in [MATRIX, PLANE] {
        let case = case(routine, shape(2, 64, 32), &[256], 1);
        check(Case { cap: Some(5.0), query_size: 3.0, ..case });
    }
}
