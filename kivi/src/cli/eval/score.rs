//! Scores of predictions, and of a cache against the uncompressed one.

/// Sums over the scored tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cli) struct Score {
    pub(in crate::cli) tokens: usize,
    /// Of `−ln p(token)`.
    pub(in crate::cli) negative_log_likelihood: f64,
    /// Of `KL(f16 ‖ this)`, in nats.
    pub(in crate::cli) divergence: f64,
    /// How often both have the same most likely token.
    pub(in crate::cli) same_top: usize,
}

impl Score {
    pub(in crate::cli) fn add(self, other: Self) -> Self {
        Self {
            tokens: self.tokens + other.tokens,
            negative_log_likelihood: self.negative_log_likelihood + other.negative_log_likelihood,
            divergence: self.divergence + other.divergence,
            same_top: self.same_top + other.same_top,
        }
    }

    /// Scores one token. `reference` are the logits over the f16 cache.
    pub(in crate::cli) fn of(logits: &[f32], reference: Option<&[f32]>, token: u32) -> Self {
        let total = log_sum_exp(logits);
        let mut score = Self { tokens: 1, ..Self::default() };
        score.negative_log_likelihood = total - f64::from(logits[token as usize]);
        if let Some(reference) = reference {
            let reference_total = log_sum_exp(reference);
            let term = |(&p, &q): (&f32, &f32)| {
                let (p, q) = (f64::from(p) - reference_total, f64::from(q) - total);
                p.exp() * (p - q)
            };
            score.divergence = reference.iter().zip(logits).map(term).sum();
            score.same_top = usize::from(argmax(reference) == argmax(logits));
        }
        score
    }
}

/// `ln Σ exp(x)`.
pub(in crate::cli) fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&x| f64::from((x - largest).exp())).sum();
    f64::from(largest) + sum.ln()
}

/// The first of the largest.
pub(in crate::cli) fn argmax(logits: &[f32]) -> Option<usize> {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
    best.map(|(index, _)| index)
}

/// A relative error `‖x − y‖ / ‖y‖` over everything that was added.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cli) struct RelativeError {
    difference: f64,
    reference: f64,
}

impl RelativeError {
    /// Adds elements and what they should be.
    pub(in crate::cli) fn add(&mut self, found: &[f32], expected: &[f32]) {
        for (&x, &y) in found.iter().zip(expected) {
            self.difference += f64::from(x - y).powi(2);
            self.reference += f64::from(y).powi(2);
        }
    }

    pub(in crate::cli) fn merge(&mut self, other: Self) {
        self.difference += other.difference;
        self.reference += other.reference;
    }

    /// `‖x − y‖ / ‖y‖`; 0 where nothing was added, or nothing but zeros.
    pub(in crate::cli) fn get(self) -> f64 {
        if self.difference == 0.0 { 0.0 } else { (self.difference / self.reference).sqrt() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scores_of_known_distributions() {
        // Uniform over four tokens: −ln ¼. Logits ln 3 and 0 are probabilities ¾ and ¼.
        let uniform = Score::of(&[1.0; 4], Some(&[1.0; 4]), 2);
        assert!((uniform.negative_log_likelihood - 4f64.ln()).abs() < 1e-7);
        assert!(uniform.divergence.abs() < 1e-9 && uniform.same_top == 1);
        let skewed = [3f32.ln(), 0.0];
        let score = Score::of(&[0.0, 0.0], Some(&skewed), 1);
        // KL(¾, ¼ ‖ ½, ½) = ¾ ln 1.5 + ¼ ln 0.5
        let expected = 0.75 * 1.5f64.ln() + 0.25 * 0.5f64.ln();
        assert!((score.divergence - expected).abs() < 1e-7);
    }

    #[test]
    fn relative_errors_add_up_as_squares() {
        let mut error = RelativeError::default();
        assert_eq!(error.get(), 0.0);
        error.add(&[3.0], &[0.0]);
        error.add(&[4.0, 1.0], &[4.0, 4.0]);
        // √(9 + 0 + 9) / √(0 + 16 + 16)
        assert!((error.get() - (18f64 / 32.0).sqrt()).abs() < 1e-12);
    }
}
