//! Choosing a level for each layer.

/// What every level costs and does.
#[derive(Clone, Debug, Default)]
pub(super) struct Sensitivity {
    /// Bits per element of each level.
    pub(super) bits: Vec<f64>,
    /// `[layers][levels]`: divergence with this level in this layer alone.
    pub(super) divergence: Vec<Vec<f64>>,
}

/// A level for every layer.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) levels: Vec<usize>,
    /// Bits per element, the mean over the layers.
    pub(super) bits: f64,
    /// The sum over the layers.
    pub(super) divergence: f64,
}

impl Sensitivity {
    fn choice(&self, levels: Vec<usize>) -> Choice {
        let bits = levels.iter().map(|&level| self.bits[level]).sum::<f64>() / levels.len() as f64;
        let terms = levels.iter().zip(&self.divergence).map(|(&level, row)| row[level]);
        Choice { bits, divergence: terms.sum(), levels }
    }

    /// Plans from the smallest to the most accurate: each takes the step of one layer to a larger
    /// level that lowers the divergence most per bit. With steps along the convex hull of every
    /// layer's levels these are the best plans of their sizes, up to the size of one step.
    pub(super) fn frontier(&self) -> Vec<Choice> {
        let smallest = |row: &Vec<f64>| {
            let order = |&a: &usize, &b: &usize| {
                self.bits[a].total_cmp(&self.bits[b]).then(row[a].total_cmp(&row[b]))
            };
            (0..self.bits.len()).min_by(order).unwrap_or_default()
        };
        let mut levels: Vec<usize> = self.divergence.iter().map(smallest).collect();
        let mut plans = vec![self.choice(levels.clone())];
        loop {
            let mut best: Option<(f64, usize, usize)> = None;
            for (layer, row) in self.divergence.iter().enumerate() {
                let now = levels[layer];
                for (level, &divergence) in row.iter().enumerate() {
                    let (bits, gain) = (self.bits[level] - self.bits[now], row[now] - divergence);
                    if bits <= 0.0 || gain <= 0.0 {
                        continue;
                    }
                    let rate = gain / bits;
                    if best.is_none_or(|(known, ..)| rate > known) {
                        best = Some((rate, layer, level));
                    }
                }
            }
            let Some((_, layer, level)) = best else { return plans };
            levels[layer] = level;
            plans.push(self.choice(levels.clone()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_go_where_they_help_most() {
        let sensitivity = Sensitivity {
            bits: vec![3.0, 4.0, 5.0],
            // The first layer does not care; the second gains 0.9, then 0.05; the third 0.1 for one
            // bit but 0.4 for two, which is more for each.
            divergence: vec![vec![0.01, 0.01, 0.01], vec![1.0, 0.1, 0.05], vec![0.5, 0.4, 0.1]],
        };
        let frontier = sensitivity.frontier();
        let levels: Vec<_> = frontier.iter().map(|choice| choice.levels.clone()).collect();
        assert_eq!(levels, [vec![0, 0, 0], vec![0, 1, 0], vec![0, 1, 2], vec![0, 2, 2]]);
        assert!((frontier[0].divergence - 1.51).abs() < 1e-12);
        assert!((frontier[2].bits - 4.0).abs() < 1e-12);
        let falls = |pair: &[Choice]| {
            pair[1].divergence < pair[0].divergence && pair[1].bits > pair[0].bits
        };
        assert!(frontier.windows(2).all(falls));
    }
}
