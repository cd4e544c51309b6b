//! Options of the sampler.

use clap::Args;
use kivi::models::{config::GenerationDefaults, sampling::SamplerConfig};

/// Options of the sampler. Where one is not given, the model's own generation settings count.
#[derive(Args, Clone, Debug)]
pub(super) struct SamplingOptions {
    /// Temperature; 0 is greedy decoding [default: the model's, or 1 if another sampling option is
    /// given, or 0].
    #[arg(long, env = "KIVI_TEMP", allow_negative_numbers = true)]
    temp: Option<f32>,
    /// Sample from the K most likely tokens; 0 is off.
    #[arg(long, env = "KIVI_TOP_K")]
    top_k: Option<usize>,
    /// Sample from the smallest set of tokens that reach this probability; 1 is off.
    #[arg(long, env = "KIVI_TOP_P", allow_negative_numbers = true)]
    top_p: Option<f32>,
    /// Drop tokens less likely than this share of the most likely one; 0 is off.
    #[arg(long, env = "KIVI_MIN_P", allow_negative_numbers = true)]
    min_p: Option<f32>,
    /// Penalty on tokens seen lately; 1 is off.
    #[arg(long, env = "KIVI_REPETITION_PENALTY", allow_negative_numbers = true)]
    repetition_penalty: Option<f32>,
    /// How many of the newest tokens the penalty looks at.
    #[arg(long, env = "KIVI_REPETITION_WINDOW")]
    repetition_window: Option<usize>,
    /// Seed of the random numbers.
    #[arg(long, env = "KIVI_SEED")]
    seed: Option<u64>,
}

impl SamplingOptions {
    /// The options, completed by the model's settings.
    pub(super) fn config(&self, model: &GenerationDefaults) -> SamplerConfig {
        let plain = SamplerConfig::default();
        // Hugging Face decodes greedily unless the model says otherwise. An option that only means
        // something when tokens are sampled asks for sampling.
        let asked = self.top_k.is_some()
            || self.top_p.is_some()
            || self.min_p.is_some()
            || self.seed.is_some();
        let sampled = asked || model.do_sample == Some(true);
        let temperature = model.temperature.map_or(1.0, |t| t as f32);
        SamplerConfig {
            temperature: self.temp.unwrap_or(if sampled { temperature } else { 0.0 }),
            top_k: self.top_k.or(model.top_k).unwrap_or(plain.top_k),
            top_p: self.top_p.or(model.top_p.map(|p| p as f32)).unwrap_or(plain.top_p),
            min_p: self.min_p.or(model.min_p.map(|p| p as f32)).unwrap_or(plain.min_p),
            repetition_penalty: self
                .repetition_penalty
                .or(model.repetition_penalty.map(|p| p as f32))
                .unwrap_or(plain.repetition_penalty),
            repetition_window: self.repetition_window.unwrap_or(plain.repetition_window),
            seed: self.seed.unwrap_or(plain.seed),
        }
    }
}
