//! `kivi eval gsm8k`.

use super::{
    metrics::last_number,
    suite::{Answer, Ask, Item, Line, Scores, Suite, SuiteOptions, read_lines},
};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Grade-school mathematics: worked examples, then a question whose answer is a number.
///
/// The file has GSM8K's format (arXiv 2110.14168), one JSON object per line with "question" and
/// "answer", the answer ending in "#### NUMBER". The first questions serve as examples and are not
/// asked. An answer is right if the number after its "####", or else its last number, is the file's.
#[derive(Args, Debug)]
pub(in crate::cli) struct Gsm8k {
    /// The questions, JSONL.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Worked examples before each question.
    #[arg(long, env = "KIVI_SHOTS", default_value_t = 5, value_name = "N")]
    shots: usize,
    /// Take the examples from the beginning of another file of the same format.
    #[arg(long, env = "KIVI_SHOTS_FILE", value_name = "FILE")]
    shots_file: Option<PathBuf>,
    /// Longest answer in tokens.
    #[arg(long, env = "KIVI_MAX_TOKENS", default_value_t = 256, value_name = "N")]
    max_tokens: usize,
    #[command(flatten)]
    suite: SuiteOptions,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    question: String,
    answer: String,
}

struct Questions {
    shots: Vec<Line<Row>>,
    rows: Vec<Line<Row>>,
    truths: Vec<f64>,
    max_tokens: usize,
}

impl Gsm8k {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let name = self.file.display();
        let mut rows: Vec<Line<Row>> = read_lines(&self.file)?;
        let shots = match &self.shots_file {
            Some(path) => {
                let all: Vec<Line<Row>> = read_lines(path)?;
                if all.len() < self.shots {
                    bail!("{} has {} examples, not {}", path.display(), all.len(), self.shots);
                }
                all[..self.shots].to_vec()
            }
            None if rows.len() <= self.shots => bail!(
                "{name} has {} questions: with {} as examples there is none left to ask",
                rows.len(),
                self.shots
            ),
            None => rows.drain(..self.shots).collect(),
        };
        let truth = |line: &Line<Row>| {
            let number = line.value.answer.rsplit_once("####").and_then(|(_, n)| last_number(n));
            number.ok_or_else(|| anyhow!("{name}, line {}: no number after ####", line.number))
        };
        let truths = rows.iter().map(truth).collect::<Result<_>>()?;
        self.suite.run(Questions { shots, rows, truths, max_tokens: self.max_tokens })
    }
}

impl Suite for Questions {
    fn name(&self) -> &'static str {
        "gsm8k"
    }

    fn settings(&self) -> Value {
        json!({ "shots": self.shots.len(), "max_tokens": self.max_tokens, "rows": self.rows.len() })
    }

    fn items(&mut self, _: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>> {
        let example =
            |Row { question, answer }: &Row| format!("Question: {question}\nAnswer: {answer}\n\n");
        let shots: String = self.shots.iter().map(|line| example(&line.value)).collect();
        let item = |line: &Line<Row>| Item {
            id: line.number.to_string(),
            group: "gsm8k".into(),
            prompt: format!("{shots}Question: {}\nAnswer:", line.value.question),
            ask: Ask::Generate {
                max_tokens: self.max_tokens,
                stop: vec!["Question:".into(), "\n\n".into()],
            },
            may_be_cut: false,
        };
        Ok(self.rows.iter().map(item).collect())
    }

    fn mark(&self, index: usize, answer: &Answer) -> Scores {
        let Answer::Text(text) = answer else { return Scores::new() };
        Scores::from([("correct".into(), correct(text, self.truths[index]))])
    }
}

/// Whether a text ends in this number.
fn correct(text: &str, truth: f64) -> f64 {
    let last = text.rsplit_once("####").map_or(text, |(_, last)| last);
    f64::from(u8::from(last_number(last) == Some(truth)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_after_the_mark_or_the_last_one_counts() {
        assert_eq!(correct("3 + 4 = 7\n#### 7", 7.0), 1.0);
        assert_eq!(correct("so she has $1,000.", 1000.0), 1.0);
        assert_eq!(correct("#### 7 and 8 apples", 7.0), 0.0);
        assert_eq!(correct("no idea", 0.0), 0.0);
    }
}
