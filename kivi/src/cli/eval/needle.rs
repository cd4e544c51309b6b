//! `kivi eval passkey` and `kivi eval needle`.

use super::{
    suite::{Answer, Ask, Item, Scores, Suite, SuiteOptions, below},
    text::read_text,
};
use crate::cli::plot::HeatMap;
use anyhow::{Result, bail};
use clap::Args;
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf};

/// A number hidden at a random place of a monotonous text, to be repeated at its end.
///
/// Texts are made up: filler sentences, one of which names the number.
#[derive(Args, Debug)]
pub(in crate::cli) struct Passkey {
    /// Tokens of the text, about.
    #[arg(
        long,
        env = "KIVI_LENGTHS",
        value_delimiter = ',',
        default_value = "256,512,1024,2048",
        value_name = "N,…"
    )]
    lengths: Vec<usize>,
    /// Texts of each length.
    #[arg(long, env = "KIVI_TRIALS", default_value_t = 10, value_name = "N")]
    trials: usize,
    /// Digits of the number.
    #[arg(long, env = "KIVI_DIGITS", default_value_t = 5, value_name = "N")]
    digits: usize,
    #[command(flatten)]
    suite: SuiteOptions,
}

/// A fact hidden at every depth of texts of several lengths.
///
/// The text is that of --file, over and over, or the filler of `kivi eval passkey`; the fact is a
/// number that belongs to a city.
#[derive(Args, Debug)]
pub(in crate::cli) struct Needle {
    /// A text to hide the fact in, UTF-8.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Tokens of the text, about.
    #[arg(
        long,
        env = "KIVI_LENGTHS",
        value_delimiter = ',',
        default_value = "256,512,1024,2048,4096",
        value_name = "N,…"
    )]
    lengths: Vec<usize>,
    /// Where the fact stands, in percent of the text.
    #[arg(
        long,
        env = "KIVI_DEPTHS",
        value_delimiter = ',',
        default_value = "0,25,50,75,100",
        value_name = "PERCENT,…"
    )]
    depths: Vec<usize>,
    /// Texts of each length and depth.
    #[arg(long, env = "KIVI_TRIALS", default_value_t = 4, value_name = "N")]
    trials: usize,
    /// Digits of the number.
    #[arg(long, env = "KIVI_DIGITS", default_value_t = 5, value_name = "N")]
    digits: usize,
    /// Draw the success by depth and length, as .svg or .png.
    #[arg(long, env = "KIVI_PLOT", value_delimiter = ',', value_name = "FILE,…")]
    plot: Vec<PathBuf>,
    #[command(flatten)]
    suite: SuiteOptions,
}

/// What surrounds the needle where no text is given.
const FILLER: [&str; 4] = [
    "The road follows the river through the valley.",
    "Fields lie on both sides, green in spring and yellow in autumn.",
    "Nothing happens here that was not the same last year.",
    "A cart goes by, and the dust settles again.",
];

const CITIES: [&str; 8] =
    ["Lisbon", "Oslo", "Vienna", "Dublin", "Warsaw", "Athens", "Prague", "Helsinki"];

impl Passkey {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        check(&self.lengths, self.trials, self.digits)?;
        let random = self.suite.random();
        self.suite.run(Haystacks {
            name: "passkey",
            filler: FILLER.map(String::from).to_vec(),
            lengths: self.lengths,
            depths: Vec::new(),
            trials: self.trials,
            digits: self.digits,
            random,
            plot: Vec::new(),
            numbers: Vec::new(),
            source: String::new(),
        })
    }
}

impl Needle {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        check(&self.lengths, self.trials, self.digits)?;
        if self.depths.is_empty() || self.depths.iter().any(|&depth| depth > 100) {
            bail!("depths are percentages from 0 to 100");
        }
        for path in &self.plot {
            if !path.extension().is_some_and(|end| end == "svg" || end == "png") {
                bail!("a plot is an .svg or a .png file, not {}", path.display());
            }
        }
        let (filler, source) = match &self.file {
            None => (FILLER.map(String::from).to_vec(), String::new()),
            Some(path) => {
                let text = read_text(path)?;
                let sentences = text.split_inclusive(['.', '\n']).map(str::trim);
                let sentences: Vec<String> =
                    sentences.filter(|s| !s.is_empty()).map(String::from).collect();
                if sentences.is_empty() {
                    bail!("{} is empty", path.display());
                }
                (sentences, path.display().to_string())
            }
        };
        let random = self.suite.random();
        self.suite.run(Haystacks {
            name: "needle",
            filler,
            lengths: self.lengths,
            depths: self.depths,
            trials: self.trials,
            digits: self.digits,
            random,
            plot: self.plot,
            numbers: Vec::new(),
            source,
        })
    }
}

fn check(lengths: &[usize], trials: usize, digits: usize) -> Result<()> {
    if lengths.is_empty() || trials == 0 {
        bail!("there is nothing to do without a length and a trial");
    }
    if let Some(length) = lengths.iter().find(|&&length| length < 64) {
        bail!("a text of {length} tokens has no room for anything; give 64 or more");
    }
    if !(1..=18).contains(&digits) {
        bail!("a number has 1 to 18 digits, not {digits}");
    }
    Ok(())
}

struct Haystacks {
    name: &'static str,
    /// Sentences.
    filler: Vec<String>,
    lengths: Vec<usize>,
    /// Percentages; random for every text if there are none.
    depths: Vec<usize>,
    trials: usize,
    digits: usize,
    random: ChaCha8Rng,
    plot: Vec<PathBuf>,
    /// The hidden number of every item.
    numbers: Vec<String>,
    source: String,
}

impl Haystacks {
    fn number(&mut self) -> String {
        let digit = |random: &mut ChaCha8Rng, first: usize| first + below(random, 10 - first);
        // Without a zero in front.
        let digits = (0..self.digits).map(|i| digit(&mut self.random, usize::from(i == 0)));
        digits.map(|digit| digit.to_string()).collect()
    }

    /// As much filler as makes `length` tokens, beginning at sentence `start`.
    fn filler(
        &self,
        start: usize,
        length: usize,
        tokens: &dyn Fn(&str) -> Result<usize>,
    ) -> Result<Vec<&str>> {
        let mut sentences = Vec::new();
        let mut total = 0;
        for sentence in self.filler.iter().cycle().skip(start % self.filler.len()) {
            total += tokens(&format!(" {sentence}"))?.max(1);
            if total > length {
                break;
            }
            sentences.push(sentence.as_str());
        }
        Ok(sentences)
    }

    fn item(
        &mut self,
        length: usize,
        depth: Option<usize>,
        trial: usize,
        tokens: &dyn Fn(&str) -> Result<usize>,
    ) -> Result<Item> {
        let number = self.number();
        let city = CITIES[below(&mut self.random, CITIES.len())];
        let place = depth.unwrap_or_else(|| below(&mut self.random, 101));
        let start = below(&mut self.random, self.filler.len());
        let passkey = self.name == "passkey";
        let (intro, needle, question) = if passkey {
            (
                "Somewhere in this text there is a pass key. Find it and remember it.".to_string(),
                format!("The pass key is {number}. Remember it: {number} is the pass key."),
                "What is the pass key? The pass key is".to_string(),
            )
        } else {
            (
                "Read this text. A question about it follows.".to_string(),
                format!("The secret number of {city} is {number}."),
                format!("What is the secret number of {city}? The secret number of {city} is"),
            )
        };
        let around = tokens(&format!("{intro} {needle} {question}"))?;
        let filler = self.filler(start, length.saturating_sub(around), tokens)?;
        let (before, after) = filler.split_at(filler.len() * place / 100);
        let parts = [&before.join(" "), needle.as_str(), &after.join(" ")];
        let text = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
        let group = match depth {
            None => format!("length {length}"),
            Some(depth) => format!("length {length}, depth {depth}"),
        };
        let item = Item {
            id: format!("{group}, {trial}"),
            group,
            prompt: format!("{intro}\n\n{text}\n\n{question}"),
            // A number may take a token per digit, and some come before it.
            ask: Ask::Generate { max_tokens: self.digits + 8, stop: vec!["\n".into()] },
            may_be_cut: false,
        };
        self.numbers.push(number);
        Ok(item)
    }
}

impl Suite for Haystacks {
    fn name(&self) -> &'static str {
        self.name
    }

    fn settings(&self) -> Value {
        json!({
            "lengths": self.lengths,
            "depths": self.depths,
            "trials": self.trials,
            "digits": self.digits,
            "text": self.source,
        })
    }

    fn items(&mut self, tokens: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>> {
        let depths: Vec<Option<usize>> = match self.depths.is_empty() {
            true => vec![None],
            false => self.depths.iter().copied().map(Some).collect(),
        };
        let mut items = Vec::new();
        for length in self.lengths.clone() {
            for &depth in &depths {
                for trial in 0..self.trials {
                    items.push(self.item(length, depth, trial, tokens)?);
                }
            }
        }
        Ok(items)
    }

    fn mark(&self, index: usize, answer: &Answer) -> Scores {
        let Answer::Text(text) = answer else { return Scores::new() };
        Scores::from([("found".into(), found(text, &self.numbers[index]))])
    }

    fn plot(&self, groups: &BTreeMap<String, Scores>) -> Result<()> {
        for path in &self.plot {
            let value = |length: usize, depth: usize| {
                let scores = groups.get(&format!("length {length}, depth {depth}"));
                scores.and_then(|scores| scores.get("found")).copied().unwrap_or(f64::NAN)
            };
            let map = HeatMap {
                title: "Needles found, %",
                x: "tokens",
                y: "depth, %",
                columns: self.lengths.iter().map(usize::to_string).collect(),
                rows: self.depths.iter().map(usize::to_string).collect(),
                values: self
                    .depths
                    .iter()
                    .map(|&depth| self.lengths.iter().map(|&length| value(length, depth)).collect())
                    .collect(),
                range: (0.0, 1.0),
                percent: true,
            };
            map.save(path)?;
        }
        Ok(())
    }
}

/// Whether the first number of a text is this one.
fn found(text: &str, number: &str) -> f64 {
    let digits = text.trim_start_matches(|c: char| !c.is_ascii_digit());
    let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
    f64::from(u8::from(&digits[..end] == number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand_chacha::rand_core::SeedableRng;

    fn haystacks(depths: Vec<usize>) -> Haystacks {
        Haystacks {
            name: "needle",
            filler: FILLER.map(String::from).to_vec(),
            lengths: vec![100, 200],
            depths,
            trials: 2,
            digits: 5,
            random: ChaCha8Rng::seed_from_u64(7),
            plot: Vec::new(),
            numbers: Vec::new(),
            source: String::new(),
        }
    }

    fn words(text: &str) -> Result<usize> {
        Ok(text.split_whitespace().count())
    }

    #[test]
    fn texts_have_their_length_and_hide_the_number_at_its_depth() {
        let mut stacks = haystacks(vec![0, 50, 100]);
        let items = stacks.items(&words).unwrap();
        assert_eq!(items.len(), 12);
        for (index, item) in items.iter().enumerate() {
            let length = if index < 6 { 100 } else { 200 };
            let count = words(&item.prompt).unwrap();
            // Less than a sentence is missing.
            assert!(count <= length && count > length - 15, "{count} of {length}");
            let number = &stacks.numbers[index];
            assert_eq!(item.prompt.matches(number.as_str()).count(), 1);
            let depth = [0.0, 0.5, 1.0][index / 2 % 3];
            let at = item.prompt.find(number.as_str()).unwrap() as f64 / item.prompt.len() as f64;
            assert!((at - depth).abs() < 0.35, "{at} for {depth}");
        }
        let again = haystacks(vec![0, 50, 100]).items(&words).unwrap();
        assert_eq!(items[3].prompt, again[3].prompt);
    }

    #[test]
    fn the_first_number_counts() {
        assert_eq!(found(" 12345.", "12345"), 1.0);
        assert_eq!(found("the number 12345", "12345"), 1.0);
        assert_eq!(found(" 123456", "12345"), 0.0);
        assert_eq!(found("1 12345", "12345"), 0.0);
        assert_eq!(found("none", "12345"), 0.0);
    }
}
