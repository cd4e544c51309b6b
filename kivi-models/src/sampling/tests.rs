//! Distributions worked out by hand; `ln` of small fractions makes the probabilities exact enough.

use super::*;

/// Logits of the probabilities 1/2, 1/4, 1/8, 1/16, 1/16.
fn halves() -> Vec<f32> {
    [2.0, 4.0, 8.0, 16.0, 16.0].iter().map(|d: &f32| -d.ln()).collect()
}

fn config(temperature: f32) -> SamplerConfig {
    SamplerConfig { temperature, seed: 7, ..SamplerConfig::default() }
}

/// How often each token comes in `n` draws.
fn counts(config: SamplerConfig, logits: &[f32], history: &[u32], n: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(config).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..n {
        let id = sampler.sample(&mut logits.to_vec(), history).unwrap();
        counts[id as usize] += 1;
    }
    counts
}

/// Pearson's statistic against `expected` probabilities, and that nothing else was drawn.
fn assert_frequencies(counts: &[usize], expected: &[f64]) {
    let n: usize = counts.iter().sum();
    let mut chi2 = 0.0;
    for (&count, &p) in counts.iter().zip(expected) {
        if p == 0.0 {
            assert_eq!(count, 0, "{counts:?}");
        } else {
            let mean = p * n as f64;
            chi2 += (count as f64 - mean).powi(2) / mean;
        }
    }
    // 99.9 % quantile of chi-square with 4 degrees of freedom; fewer categories only lower it.
    assert!(chi2 < 18.47, "chi2 {chi2}: {counts:?} against {expected:?}");
}

#[test]
fn greedy_takes_the_lowest_of_equal_logits_and_no_random_number() {
    let mut sampler = Sampler::new(config(0.0)).unwrap();
    let before = sampler.rng.get_word_pos();
    assert_eq!(sampler.sample(&mut [1.0, 3.0, 3.0, -1.0], &[]).unwrap(), 1);
    assert_eq!(sampler.sample(&mut [f32::NEG_INFINITY, -5.0], &[]).unwrap(), 1);
    assert_eq!(sampler.rng.get_word_pos(), before);
}

#[test]
fn plain_sampling_follows_the_softmax() {
    let expected = [0.5, 0.25, 0.125, 0.0625, 0.0625];
    assert_frequencies(&counts(config(1.0), &halves(), &[], 20_000), &expected);
}

#[test]
fn temperature_raises_probabilities_to_its_reciprocal() {
    // Temperature 1/2 squares: 1/4, 1/16, 1/64, 1/256, 1/256 over their sum 86/256.
    let expected = [64.0, 16.0, 4.0, 1.0, 1.0].map(|w| w / 86.0);
    assert_frequencies(&counts(config(0.5), &halves(), &[], 20_000), &expected);
}

#[test]
fn top_k_cuts_ties_at_the_lower_id() {
    let config = SamplerConfig { top_k: 4, ..config(1.0) };
    let expected = [8.0, 4.0, 2.0, 1.0, 0.0].map(|w| w / 15.0);
    assert_frequencies(&counts(config, &halves(), &[], 20_000), &expected);
}

#[test]
fn top_p_keeps_the_token_that_reaches_it() {
    // 1/2 + 1/4 < 0.8 <= 1/2 + 1/4 + 1/8.
    let config = SamplerConfig { top_p: 0.8, ..config(1.0) };
    let expected = [4.0, 2.0, 1.0, 0.0, 0.0].map(|w| w / 7.0);
    assert_frequencies(&counts(config, &halves(), &[], 20_000), &expected);
}

#[test]
fn top_p_sees_what_top_k_left() {
    // After top-k 2 the probabilities are 2/3 and 1/3, so 0.6 keeps one; of the whole it keeps two.
    let config = SamplerConfig { top_k: 2, top_p: 0.6, ..config(1.0) };
    assert_frequencies(&counts(config, &halves(), &[], 100), &[1.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn min_p_is_relative_to_the_most_likely_token() {
    // 0.2 of 1/2 is 0.1: 1/8 stays, 1/16 goes.
    let config = SamplerConfig { min_p: 0.2, ..config(1.0) };
    let expected = [4.0, 2.0, 1.0, 0.0, 0.0].map(|w| w / 7.0);
    assert_frequencies(&counts(config, &halves(), &[], 20_000), &expected);
}

#[test]
fn filters_judge_the_tempered_distribution() {
    // At temperature 1/2 the second token has 1/4 of the first's weight, below 0.3; at 1, 1/2.
    let config = SamplerConfig { min_p: 0.3, ..config(0.5) };
    assert_frequencies(&counts(config, &halves(), &[], 100), &[1.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn penalty_divides_positive_and_multiplies_negative_logits_once_per_token() {
    let config = SamplerConfig { repetition_penalty: 2.0, repetition_window: 3, ..config(0.0) };
    let mut sampler = Sampler::new(config).unwrap();
    let mut logits = [4.0, -1.0, 3.0, f32::NEG_INFINITY, 1.0];
    // Token 4 is outside the window, 99 outside the vocabulary, 0 in it twice.
    assert_eq!(sampler.sample(&mut logits, &[4, 0, 1, 0]).unwrap(), 2);
    assert_eq!(logits, [2.0, -2.0, 3.0, f32::NEG_INFINITY, 1.0]);
    assert_eq!(sampler.sample(&mut logits, &[3, 99, 3]).unwrap(), 2);
    assert_eq!(logits[3], f32::NEG_INFINITY);
}

#[test]
fn masked_tokens_are_never_drawn() {
    let mut logits = halves();
    logits[0] = f32::NEG_INFINITY;
    let expected = [0.0, 4.0, 2.0, 1.0, 1.0].map(|w| w / 8.0);
    assert_frequencies(&counts(config(1.0), &logits, &[], 20_000), &expected);
}

#[test]
fn extreme_logits_stay_finite() {
    let config = SamplerConfig { repetition_penalty: 10.0, ..config(1e-4) };
    let logits = [f32::MAX, f32::MIN, f32::MIN, 0.0];
    assert_eq!(counts(config, &logits, &[1, 2], 50), [50, 0, 0, 0]);
    let config = SamplerConfig { temperature: 1e4, top_p: 1e-30, ..self::config(1.0) };
    assert_eq!(counts(config, &[1.0, 1.0], &[], 50), [50, 0]);
}

#[test]
fn a_seed_gives_the_same_tokens_and_another_seed_others() {
    let logits = vec![0.0; 1000];
    let draw = |seed| {
        let mut sampler = Sampler::new(SamplerConfig { seed, ..config(1.0) }).unwrap();
        (0..20).map(|_| sampler.sample(&mut logits.clone(), &[]).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(draw(1), draw(1));
    assert_ne!(draw(1), draw(2));
    // First block of ChaCha8 under the all-zero key (3e00ef2f895f40d6…, the cipher's published test
    // vector): the little-endian word 0xd6405f892fef003e scaled to [0, 1000) is 836.
    assert_eq!(draw(0)[0], 836);
}

#[test]
fn work_buffers_are_reused() {
    let config = SamplerConfig { repetition_penalty: 1.1, top_p: 0.9, ..config(1.0) };
    let mut sampler = Sampler::new(config).unwrap();
    let mut logits = vec![0.5; 500];
    let history: Vec<u32> = (0..64).collect();
    sampler.sample(&mut logits, &history).unwrap();
    let before = (sampler.candidates.as_ptr(), sampler.recent.as_ptr());
    for _ in 0..10 {
        sampler.sample(&mut logits, &history).unwrap();
    }
    assert_eq!((sampler.candidates.as_ptr(), sampler.recent.as_ptr()), before);
}

#[test]
fn bad_logits_are_errors() {
    let mut sampler = Sampler::new(config(1.0)).unwrap();
    for (mut logits, message) in [
        (vec![], "invalid logits: none of 0 tokens is allowed"),
        (vec![0.0, f32::NAN], "invalid logits: the logit of token 1 is NaN"),
        (vec![f32::INFINITY, 0.0], "invalid logits: the logit of token 0 is inf"),
        (vec![f32::NEG_INFINITY; 3], "invalid logits: none of 3 tokens is allowed"),
    ] {
        assert_eq!(sampler.sample(&mut logits, &[]).unwrap_err().to_string(), message);
    }
}

#[test]
fn bad_options_are_errors() {
    for (config, message) in [
        (config(-1.0), "invalid sampling option: temperature is -1, allowed: 0 … 10000"),
        (config(f32::NAN), "invalid sampling option: temperature is NaN, allowed: 0 … 10000"),
        (
            SamplerConfig { top_p: 0.0, ..config(1.0) },
            "invalid sampling option: top_p is 0, allowed: above 0, at most 1 (1 is off)",
        ),
        (
            SamplerConfig { min_p: 1.5, ..config(1.0) },
            "invalid sampling option: min_p is 1.5, allowed: 0 … 1 (0 is off)",
        ),
        (
            SamplerConfig { repetition_penalty: 0.0, ..config(1.0) },
            "invalid sampling option: repetition_penalty is 0, allowed: above 0, at most 10000 (1 is off)",
        ),
    ] {
        assert_eq!(Sampler::new(config).unwrap_err().to_string(), message);
    }
}
