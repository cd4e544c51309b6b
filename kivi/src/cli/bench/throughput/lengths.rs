//! How long prompts and answers are.

use crate::cli::eval::text::read_text;
use anyhow::{Result, anyhow, bail};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, LogNormal};
use serde::Deserialize;
use std::path::Path;

/// Mean tokens of a prompt and of an answer of ShareGPT, as the paper has them (section 4.3).
pub(super) const MEAN: Lengths = Lengths { input: 161, output: 338 };

/// Standard deviations of the logarithms. The paper gives means only: a long tail of prompts and a
/// shorter one of answers is our choice.
pub(super) const SIGMA_INPUT: f64 = 1.0;
pub(super) const SIGMA_OUTPUT: f64 = 0.7;

/// Tokens of a prompt and of its answer.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(super) struct Lengths {
    pub(super) input: usize,
    pub(super) output: usize,
}

impl Lengths {
    /// Fails with what is wrong with it in a context of `longest` tokens.
    pub(super) fn check(self, longest: usize) -> Result<(), String> {
        let Self { input, output } = self;
        if input == 0 || output == 0 {
            return Err(format!("{input} and {output} tokens; each must be at least 1"));
        }
        if input > longest || output > longest - input {
            return Err(format!("{input} and {output} tokens are beyond a context of {longest}"));
        }
        Ok(())
    }
}

/// Draws lengths whose logarithms are normal; those beyond a context of `longest` tokens (at least
/// 2) are cut to it, answers first.
///
/// # Errors
/// Never for the constants above.
pub(super) fn draw(random: &mut ChaCha8Rng, count: usize, longest: usize) -> Result<Vec<Lengths>> {
    // The mean of a log-normal distribution is exp(μ + σ²/2).
    let distribution = |mean: usize, sigma: f64| {
        LogNormal::new((mean as f64).ln() - sigma * sigma / 2.0, sigma)
            .map_err(|error| anyhow!("lengths of mean {mean}: {error}"))
    };
    let inputs = distribution(MEAN.input, SIGMA_INPUT)?;
    let outputs = distribution(MEAN.output, SIGMA_OUTPUT)?;
    let mut draw = || {
        let output = (outputs.sample(random).round() as usize).clamp(1, longest - 1);
        let input = (inputs.sample(random).round() as usize).clamp(1, longest - output);
        Lengths { input, output }
    };
    Ok((0..count).map(|_| draw()).collect())
}

/// Reads lengths from a file: on each line two numbers, tokens of the prompt and of the answer, or
/// an object `{"input": 161, "output": 338}`. Blank lines are left out.
///
/// # Errors
/// With the line that is not such a pair or is beyond a context of `longest` tokens, and for a file
/// without any.
pub(super) fn read(path: &Path, longest: usize) -> Result<Vec<Lengths>> {
    parse(&path.display().to_string(), &read_text(path)?, longest)
}

fn parse(name: &str, text: &str, longest: usize) -> Result<Vec<Lengths>> {
    let lines = text.lines().zip(1..).filter(|(line, _)| !line.trim().is_empty());
    let lengths = lines.map(|(line, number)| {
        let lengths = parse_line(line);
        let checked = lengths.and_then(|lengths| lengths.check(longest).map(|()| lengths));
        checked.map_err(|reason| anyhow!("{name}, line {number}: {reason}"))
    });
    let lengths = lengths.collect::<Result<Vec<_>>>()?;
    if lengths.is_empty() {
        bail!("{name} is empty: there are no lengths at line 1");
    }
    Ok(lengths)
}

fn parse_line(line: &str) -> Result<Lengths, String> {
    if line.trim_start().starts_with('{') {
        return serde_json::from_str(line).map_err(|error| {
            let reason = error.to_string();
            // The parser sees one line, so only its column means something.
            let reason = reason.split(" at line ").next().unwrap_or_default();
            format!("column {}: {reason}", error.column())
        });
    }
    let numbers: Vec<_> = line.split_whitespace().map(str::parse).collect();
    match numbers[..] {
        [Ok(input), Ok(output)] => Ok(Lengths { input, output }),
        _ => Err(format!("{:?} is not two numbers of tokens, such as 161 338", line.trim())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    #[test]
    fn drawn_lengths_have_the_means_asked_for() {
        let mut random = ChaCha8Rng::seed_from_u64(1);
        let drawn = draw(&mut random, 100_000, 1 << 20).unwrap();
        let mean = |of: fn(&Lengths) -> usize| {
            drawn.iter().map(of).sum::<usize>() as f64 / drawn.len() as f64
        };
        // The standard error is 1.3 of the mean over √100000: 0.4 %.
        let (input, output) = (mean(|lengths| lengths.input), mean(|lengths| lengths.output));
        assert!((input / 161.0 - 1.0).abs() < 0.02, "{input}");
        assert!((output / 338.0 - 1.0).abs() < 0.02, "{output}");
        // Half of a log-normal distribution lies below exp(μ).
        let below = drawn.iter().filter(|lengths| (lengths.input as f64) < 161.0 / 0.5f64.exp());
        assert!((below.count() as f64 / 1e5 - 0.5).abs() < 0.01);
    }

    #[test]
    fn drawn_lengths_fit_the_context() {
        let mut random = ChaCha8Rng::seed_from_u64(2);
        for longest in [2, 50, 512] {
            for lengths in draw(&mut random, 1000, longest).unwrap() {
                lengths.check(longest).unwrap();
            }
        }
    }

    #[test]
    fn lines_are_two_numbers_or_an_object() {
        let text = "161 338\r\n\n  5\t7 \n{\"input\": 3, \"output\": 4}\n";
        let lengths = parse("f", text, 1000).unwrap();
        let pairs: Vec<_> = lengths.iter().map(|lengths| (lengths.input, lengths.output)).collect();
        assert_eq!(pairs, [(161, 338), (5, 7), (3, 4)]);
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (line, words) in [
            ("12", &["\"12\"", "two numbers"][..]),
            ("1 2 3", &["two numbers"]),
            ("-1 5", &["-1 5"]),
            ("a b", &["a b"]),
            ("99999999999999999999 1", &["99999999999999999999 1"]),
            ("0 5", &["0 and 5", "at least 1"]),
            ("5 0", &["5 and 0"]),
            ("600 401", &["600 and 401", "context of 1000"]),
            ("18446744073709551615 1", &["beyond a context"]),
            ("{\"input\": 3}", &["column", "`output`"]),
            ("{\"input\": 3, \"output\": 4, \"x\": 1}", &["`x`"]),
            ("{\"input\": -3, \"output\": 4}", &["column"]),
        ] {
            let error = parse("f.txt", &format!("1 1\n\n{line}\n2 2"), 1000).unwrap_err();
            let message = error.to_string();
            assert!(message.starts_with("f.txt, line 3: "), "{message}");
            assert!(words.iter().all(|word| message.contains(word)), "{message}");
        }
        assert!(parse("f.txt", "\n \n", 9).unwrap_err().to_string().contains("f.txt is empty"));
    }
}
