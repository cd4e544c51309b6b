//! The running state of attention over a part of a sequence.

use crate::isa::LANES;

/// For each query of a block: `Σ e^(logit − maximum) · v`, its denominator and the maximum.
#[derive(Clone, Debug, Default)]
pub(crate) struct Partial {
    maximum: Vec<f32>,
    denominator: Vec<f32>,
    /// `[queries, width]`, `width` the head_dim in whole vectors.
    sums: Vec<f32>,
    width: usize,
}

impl Partial {
    /// Nothing seen yet. Memory is kept.
    pub(super) fn reset(&mut self, queries: usize, width: usize) {
        let fill = |x: &mut Vec<f32>, length: usize, value: f32| {
            x.clear();
            x.resize(length, value);
        };
        fill(&mut self.maximum, queries, f32::NEG_INFINITY);
        fill(&mut self.denominator, queries, 0.0);
        fill(&mut self.sums, queries * width, 0.0);
        self.width = width;
    }

    /// A query's sums, in whole vectors.
    pub(super) fn sums_mut(&mut self, query: usize) -> &mut [[f32; LANES]] {
        self.sums[query * self.width..(query + 1) * self.width].as_chunks_mut().0
    }

    /// Two queries' sums, the first one before the second.
    pub(super) fn two_sums_mut(&mut self, a: usize, b: usize) -> [&mut [[f32; LANES]]; 2] {
        let (head, tail) = self.sums.split_at_mut(b * self.width);
        let a = &mut head[a * self.width..(a + 1) * self.width];
        [a, &mut tail[..self.width]].map(|sums| sums.as_chunks_mut().0)
    }

    /// Makes room for a weight of `largest`: rescales what was summed so far if it is the largest
    /// yet, and returns the maximum.
    pub(super) fn raise(&mut self, query: usize, largest: f32) -> f32 {
        let old = self.maximum[query];
        if largest > old {
            self.maximum[query] = largest;
            let factor = shrink(old, largest);
            self.denominator[query] *= factor;
            self.sums_mut(query).as_flattened_mut().iter_mut().for_each(|sum| *sum *= factor);
        }
        self.maximum[query]
    }

    pub(super) fn add_denominator(&mut self, query: usize, weights: f32) {
        self.denominator[query] += weights;
    }

    /// This part followed by `next`.
    pub(super) fn combine(&mut self, next: &Self) {
        for query in 0..self.maximum.len() {
            let maximum = self.raise(query, next.maximum[query]);
            let factor = shrink(next.maximum[query], maximum);
            self.denominator[query] += next.denominator[query] * factor;
            let range = query * self.width..(query + 1) * self.width;
            for (sum, next) in self.sums[range.clone()].iter_mut().zip(&next.sums[range]) {
                *sum += next * factor;
            }
        }
    }

    /// The attention output of one query, with a learned sink logit in the denominator.
    pub(super) fn finish(&self, query: usize, sink: Option<f32>, out: &mut [f32]) {
        let maximum = self.maximum[query];
        let mut denominator = self.denominator[query];
        let mut factor = 1.0;
        if let Some(sink) = sink {
            let largest = maximum.max(sink);
            factor = shrink(maximum, largest);
            denominator = denominator * factor + (sink - largest).exp();
        }
        for (out, sum) in out.iter_mut().zip(&self.sums[query * self.width..]) {
            *out = sum * factor / denominator;
        }
    }
}

/// `e^(old − new)`, and 0 for a part in which nothing was seen.
fn shrink(old: f32, new: f32) -> f32 {
    if old == f32::NEG_INFINITY { 0.0 } else { (old - new).exp() }
}
