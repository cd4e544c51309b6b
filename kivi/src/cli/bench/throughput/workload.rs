//! The requests: prompts, lengths and arrivals, all from one seed.

use super::lengths::{self, Lengths};
use crate::cli::{bench::options::count, eval::text::read_tokens};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use kivi::models::tokenizer::Tokenizer;
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use rand_distr::{Distribution, Exp};
use serde_json::{Value, json};
use std::{path::PathBuf, time::Duration};

/// Options of the requests.
#[derive(Args, Clone, Debug)]
pub(super) struct WorkloadOptions {
    /// How many requests are answered.
    #[arg(long, env = "KIVI_REQUESTS", value_parser = count::<1, 1_000_000>, default_value_t = 64, value_name = "N")]
    requests: usize,
    /// Tokens of every prompt [default: drawn, 161 on average].
    #[arg(long, env = "KIVI_INPUT", value_parser = count::<1, 16_777_216>, value_name = "N", requires = "output", conflicts_with = "lengths")]
    input: Option<usize>,
    /// Tokens of every answer [default: drawn, 338 on average].
    #[arg(long, env = "KIVI_OUTPUT", value_parser = count::<1, 16_777_216>, value_name = "N", requires = "input", conflicts_with = "lengths")]
    output: Option<usize>,
    /// Lengths from a file: on each line tokens of a prompt and of its answer, as two numbers or as
    /// {"input": N, "output": N}. Requests take them in turn.
    #[arg(long, env = "KIVI_LENGTHS", value_name = "FILE")]
    lengths: Option<PathBuf>,
    /// Requests that come in a second, at random times (a Poisson process) [default: all at once].
    #[arg(long, env = "KIVI_ARRIVALS", value_parser = rate, value_name = "RATE")]
    arrivals: Option<f64>,
    /// Common tokens in front of every prompt.
    #[arg(long, env = "KIVI_SHARED_PREFIX", value_parser = count::<0, 16_777_216>, default_value_t = 0, value_name = "N")]
    pub(super) shared_prefix: usize,
    /// A text that prompts are cut from [default: random tokens].
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Seed of lengths, prompts and arrivals.
    #[arg(long, env = "KIVI_SEED", default_value_t = 0, value_name = "N")]
    seed: u64,
}

/// A positive rate per second.
fn rate(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(rate) if (1e-3..=1e6).contains(&rate) => Ok(rate),
        _ => Err("not a number of requests per second from 0.001 to 1000000".into()),
    }
}

/// A request to come.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Planned {
    pub(super) prompt: Vec<u32>,
    /// Tokens of the answer.
    pub(super) output: usize,
    /// After the first one.
    pub(super) arrival: Duration,
}

impl Planned {
    /// Tokens of prompt and answer.
    pub(super) fn tokens(&self) -> usize {
        self.prompt.len() + self.output
    }
}

/// What is drawn, each from random numbers of its own: an option for one leaves the others alone.
#[derive(Clone, Copy)]
enum Draw {
    Lengths,
    Prompts,
    Arrivals,
}

impl WorkloadOptions {
    /// The requests, in the order of their arrival, for a model with a context of so many tokens.
    /// `forbidden` tokens are in no random prompt.
    pub(super) fn plan(
        &self,
        context: usize,
        vocabulary: usize,
        tokenizer: &Tokenizer,
        forbidden: &[u32],
    ) -> Result<Vec<Planned>> {
        let source = match &self.file {
            Some(path) => {
                let tokens = read_tokens(path, tokenizer)?;
                if tokens.is_empty() {
                    bail!("{} is empty", path.display());
                }
                Source::Text(tokens)
            }
            None => {
                let allowed = (0..vocabulary as u32).filter(|token| !forbidden.contains(token));
                Source::Random(allowed.collect())
            }
        };
        let lengths = self.all_lengths(context)?;
        let mut prompts = self.random(Draw::Prompts);
        let prefix = source.tokens(&mut prompts, self.shared_prefix);
        let arrivals = self.all_arrivals()?;
        let plan = lengths.into_iter().zip(arrivals).map(|(Lengths { input, output }, arrival)| {
            let mut prompt = prefix.clone();
            prompt.extend(source.tokens(&mut prompts, input));
            Planned { prompt, output, arrival }
        });
        Ok(plan.collect())
    }

    fn all_lengths(&self, context: usize) -> Result<Vec<Lengths>> {
        let prefix = self.shared_prefix;
        let Some(longest) = context.checked_sub(prefix).filter(|&longest| longest >= 2) else {
            bail!("a shared prefix of {prefix} tokens leaves no room in a context of {context}");
        };
        let some = match (&self.lengths, self.input, self.output) {
            (Some(path), ..) => lengths::read(path, longest)?,
            (None, Some(input), Some(output)) => {
                let lengths = Lengths { input, output };
                lengths
                    .check(longest)
                    .map_err(|reason| anyhow!("--input and --output: {reason}"))?;
                vec![lengths]
            }
            _ => return lengths::draw(&mut self.random(Draw::Lengths), self.requests, longest),
        };
        Ok(some.into_iter().cycle().take(self.requests).collect())
    }

    fn all_arrivals(&self) -> Result<Vec<Duration>> {
        let Some(rate) = self.arrivals else { return Ok(vec![Duration::ZERO; self.requests]) };
        let intervals =
            Exp::new(rate).map_err(|error| anyhow!("{rate} requests per second: {error}"))?;
        let (mut random, mut now) = (self.random(Draw::Arrivals), 0.0);
        let mut next = |index: usize| {
            if index > 0 {
                now += intervals.sample(&mut random);
            }
            Duration::from_secs_f64(now)
        };
        Ok((0..self.requests).map(&mut next).collect())
    }

    fn random(&self, what: Draw) -> ChaCha8Rng {
        let mut random = ChaCha8Rng::seed_from_u64(self.seed);
        random.set_stream(what as u64);
        random
    }

    /// What was asked for, for the report.
    pub(super) fn describe(&self) -> Value {
        let lengths = match (&self.lengths, self.input) {
            (Some(path), _) => json!(path.display().to_string()),
            (None, Some(_)) => json!("fixed"),
            _ => json!({
                "distribution": "log-normal",
                "mean_input": lengths::MEAN.input,
                "mean_output": lengths::MEAN.output,
                "sigma_input": lengths::SIGMA_INPUT,
                "sigma_output": lengths::SIGMA_OUTPUT,
            }),
        };
        json!({
            "requests": self.requests,
            "lengths": lengths,
            "arrivals_per_second": self.arrivals,
            "shared_prefix": self.shared_prefix,
            "prompts": self.file.as_ref().map(|path| path.display().to_string()),
            "seed": self.seed,
        })
    }
}

/// Where the tokens of prompts are from.
enum Source {
    /// A text, which goes round.
    Text(Vec<u32>),
    /// All that may occur, equally likely.
    Random(Vec<u32>),
}

impl Source {
    fn tokens(&self, random: &mut ChaCha8Rng, count: usize) -> Vec<u32> {
        let mut below = |bound: usize| (random.next_u64() % bound.max(1) as u64) as usize;
        match self {
            Self::Text(text) => {
                let start = below(text.len());
                text[start..].iter().chain(text.iter().cycle()).copied().take(count).collect()
            }
            Self::Random(tokens) => {
                (0..count).filter_map(|_| tokens.get(below(tokens.len())).copied()).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> WorkloadOptions {
        WorkloadOptions {
            requests: 4000,
            input: None,
            output: None,
            lengths: None,
            arrivals: Some(8.0),
            shared_prefix: 0,
            file: None,
            seed: 7,
        }
    }

    #[test]
    fn requests_arrive_at_the_rate_asked_for() {
        let arrivals = options().all_arrivals().unwrap();
        assert_eq!(arrivals[0], Duration::ZERO);
        assert!(arrivals.is_sorted());
        // 3999 intervals of 1/8 s: the standard error of their sum is 1/√3999 = 1.6 %.
        let rate = 3999.0 / arrivals[3999].as_secs_f64();
        assert!((rate / 8.0 - 1.0).abs() < 0.05, "{rate}");
        // The share of intervals longer than the mean is 1/e.
        let longer = arrivals.windows(2).filter(|pair| (pair[1] - pair[0]).as_secs_f64() > 0.125);
        assert!((longer.count() as f64 / 3999.0 - (-1f64).exp()).abs() < 0.03);
        let at_once = WorkloadOptions { arrivals: None, ..options() }.all_arrivals().unwrap();
        assert!(at_once.iter().all(Duration::is_zero) && at_once.len() == 4000);
    }

    #[test]
    fn an_option_changes_only_what_it_is_about() {
        let plain = options().all_lengths(4096).unwrap();
        assert_eq!(
            WorkloadOptions { arrivals: None, ..options() }.all_lengths(4096).unwrap(),
            plain
        );
        assert_ne!(WorkloadOptions { seed: 8, ..options() }.all_lengths(4096).unwrap(), plain);
        let fixed = WorkloadOptions { input: Some(5), output: Some(9), requests: 3, ..options() };
        assert_eq!(fixed.all_lengths(14).unwrap(), [Lengths { input: 5, output: 9 }; 3]);
        let message = fixed.all_lengths(13).unwrap_err().to_string();
        assert_eq!(message, "--input and --output: 5 and 9 tokens are beyond a context of 13");
        let prefix = WorkloadOptions { shared_prefix: 511, ..options() };
        let message = prefix.all_lengths(512).unwrap_err().to_string();
        assert!(message.contains("511") && message.contains("512"), "{message}");
    }

    #[test]
    fn texts_go_round_and_random_tokens_are_allowed_ones() {
        let mut random = options().random(Draw::Prompts);
        let text = Source::Text((0..10).collect()).tokens(&mut random, 25);
        assert!(text.len() == 25 && text.windows(2).all(|pair| pair[1] == (pair[0] + 1) % 10));
        let tokens = Source::Random(vec![3, 5]).tokens(&mut random, 100);
        assert!(tokens.contains(&3) && tokens.contains(&5) && tokens.len() == 100);
        assert!(tokens.iter().all(|token| [3, 5].contains(token)));
    }
}
