//! Rotation frequencies from a configuration.

use super::{RopeConfig, RopeScaling};
use kivi_core::Rope;
use std::f64::consts::TAU;

impl RopeConfig {
    /// The frequencies, scaled, as a backend takes them: computed in f64, rounded to f32 once.
    pub fn frequencies(&self) -> Rope {
        let pairs = self.rotary_dim / 2;
        let plain = |pair: usize| self.theta.powf(-2.0 * pair as f64 / self.rotary_dim as f64);
        let frequency = |pair: usize| {
            let f = plain(pair);
            match &self.scaling {
                RopeScaling::None => f,
                RopeScaling::Linear { factor } => f / factor,
                RopeScaling::Factors(factors) => {
                    f / factors.get(pair).copied().map_or(1.0, f64::from)
                }
                &RopeScaling::Llama3 {
                    factor,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context,
                } => {
                    // Turns of this pair within the original context.
                    let turns = original_context as f64 * f / TAU;
                    let smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - smooth) * f / factor + smooth * f
                }
            }
        };
        let frequencies = (0..pairs).map(|pair| frequency(pair) as f32).collect();
        Rope { style: self.style, frequencies, attention_factor: 1.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kivi_core::RopeStyle;

    fn frequencies(scaling: RopeScaling) -> Vec<f32> {
        let config =
            RopeConfig { theta: 10000.0, style: RopeStyle::Halves, scaling, rotary_dim: 8 };
        config.frequencies().frequencies
    }

    #[test]
    fn plain_and_linear() {
        assert_eq!(frequencies(RopeScaling::None), [1.0, 0.1, 0.01, 0.001]);
        let linear = frequencies(RopeScaling::Linear { factor: 4.0 });
        assert_eq!(linear, [0.25, 0.025, 0.0025, 0.00025]);
    }

    /// Llama 3.1's limits: short waves unchanged, long ones divided, in between a blend.
    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 1000,
        };
        let scaled = frequencies(scaling);
        // 159 and 16 turns in 1000 tokens: unchanged. 1.59 turns: blended. 0.159: divided.
        assert_eq!(scaled[..2], [1.0, 0.1]);
        let smooth = (1000.0 * 0.01 / TAU - 1.0) / 3.0;
        let blended = (1.0 - smooth) * 0.01 / 8.0 + smooth * 0.01;
        assert!((f64::from(scaled[2]) - blended).abs() < 1e-9);
        assert_eq!(scaled[3], 0.000125);
    }
}
