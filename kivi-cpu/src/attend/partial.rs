//! The running state of attention over a part of a sequence.

/// For each query of a block: `Σ e^(logit − maximum) · v`, its denominator and the maximum.
#[derive(Clone, Debug, Default)]
pub(super) struct Partial {
    pub(super) maximum: Vec<f32>,
    pub(super) denominator: Vec<f32>,
    /// `[queries, width]`, `width` at least `head_dim`.
    pub(super) sums: Vec<f32>,
    pub(super) width: usize,
}

impl Partial {
    /// Nothing seen yet.
    pub(super) fn empty(queries: usize, width: usize) -> Self {
        Self {
            maximum: vec![f32::NEG_INFINITY; queries],
            denominator: vec![0.0; queries],
            sums: vec![0.0; queries * width],
            width,
        }
    }

    pub(super) fn sums_mut(&mut self, query: usize) -> &mut [f32] {
        &mut self.sums[query * self.width..(query + 1) * self.width]
    }

    /// Raises the maximum of a query to at least `largest` and returns the factor by which
    /// everything summed so far has shrunk.
    pub(super) fn raise(&mut self, query: usize, largest: f32) -> f32 {
        let old = self.maximum[query];
        let new = old.max(largest);
        self.maximum[query] = new;
        shrink(old, new)
    }

    /// This part followed by `next`.
    pub(super) fn combine(mut self, next: &Self) -> Self {
        for query in 0..self.maximum.len() {
            let factor = self.raise(query, next.maximum[query]);
            let other = shrink(next.maximum[query], self.maximum[query]);
            self.denominator[query] =
                self.denominator[query] * factor + next.denominator[query] * other;
            let range = query * self.width..(query + 1) * self.width;
            for (sum, next) in self.sums[range.clone()].iter_mut().zip(&next.sums[range]) {
                *sum = *sum * factor + next * other;
            }
        }
        self
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
