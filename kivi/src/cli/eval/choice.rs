//! `kivi eval choice`.

use super::{
    suite::{Answer, Ask, Item, Line, Scores, Suite, SuiteOptions, read_lines},
    text::read_text,
};
use anyhow::{Result, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Multiple choice by log-likelihood.
///
/// One JSON object per line: {"question": "…", "choices": ["…", …], "answer": INDEX}, or TruthfulQA's
/// format (arXiv 2109.07958) with "mc1_targets" and "mc2_targets", each {"choices": […], "labels":
/// [0 or 1, …]}. mc1 is whether the most likely choice is right, mc2 the probability of the right
/// choices among all; acc and acc_norm are mc1 of the simple format, by the likelihood of a choice
/// and by the same divided by its bytes.
#[derive(Args, Debug)]
pub(in crate::cli) struct Choice {
    /// The questions, JSONL.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// A text to put before every question, such as some examples.
    #[arg(long, env = "KIVI_PREFIX_FILE", value_name = "FILE")]
    prefix_file: Option<PathBuf>,
    #[command(flatten)]
    suite: SuiteOptions,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    question: String,
    choices: Option<Vec<String>>,
    answer: Option<usize>,
    mc1_targets: Option<Targets>,
    mc2_targets: Option<Targets>,
}

#[derive(Clone, Debug, Deserialize)]
struct Targets {
    choices: Vec<String>,
    labels: Vec<u8>,
}

/// How the choices of an item are marked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Simple,
    Mc1,
    Mc2,
}

struct Set {
    id: String,
    prompt: String,
    kind: Kind,
    choices: Vec<String>,
    right: Vec<bool>,
}

impl Choice {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let prefix = self.prefix_file.as_deref().map(read_text).transpose()?.unwrap_or_default();
        let rows: Vec<Line<Row>> = read_lines(&self.file)?;
        let mut sets = Vec::new();
        for line in &rows {
            let row = line.value.clone();
            let wrong = |reason: String| -> Result<()> {
                bail!("{}, line {}: {reason}", self.file.display(), line.number)
            };
            let mut add = |kind: Kind, choices: Vec<String>, right: Vec<bool>| -> Result<()> {
                if choices.len() != right.len() {
                    wrong(format!("{} choices and {} labels", choices.len(), right.len()))?;
                }
                if choices.len() < 2 || choices.iter().any(|choice| choice.trim().is_empty()) {
                    wrong("there are not two choices or more, none of them empty".into())?;
                }
                if !right.contains(&true) || kind == Kind::Mc2 && !right.contains(&false) {
                    wrong("the labels do not have right and wrong choices".into())?;
                }
                sets.push(Set {
                    id: format!("{}:{kind:?}", line.number),
                    prompt: format!("{prefix}Q: {}\nA:", row.question),
                    kind,
                    choices,
                    right,
                });
                Ok(())
            };
            let label = |labels: Vec<u8>| labels.into_iter().map(|label| label == 1).collect();
            let mut found = false;
            if let (Some(choices), Some(answer)) = (row.choices, row.answer) {
                if answer >= choices.len() {
                    wrong(format!("answer {answer} of {} choices", choices.len()))?;
                }
                let right = (0..choices.len()).map(|index| index == answer).collect();
                add(Kind::Simple, choices, right)?;
                found = true;
            }
            if let Some(targets) = row.mc1_targets {
                add(Kind::Mc1, targets.choices, label(targets.labels))?;
                found = true;
            }
            if let Some(targets) = row.mc2_targets {
                add(Kind::Mc2, targets.choices, label(targets.labels))?;
                found = true;
            }
            if !found {
                wrong("neither choices and answer nor mc1_targets or mc2_targets".into())?;
            }
        }
        self.suite.run(Choices { sets, prefix: !prefix.is_empty() })
    }
}

struct Choices {
    sets: Vec<Set>,
    prefix: bool,
}

impl Suite for Choices {
    fn name(&self) -> &'static str {
        "choice"
    }

    fn settings(&self) -> Value {
        json!({ "sets": self.sets.len(), "prefix": self.prefix })
    }

    fn items(&mut self, _: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>> {
        let item = |set: &Set| Item {
            id: set.id.clone(),
            group: format!("{:?}", set.kind).to_lowercase(),
            prompt: set.prompt.clone(),
            ask: Ask::Choose {
                choices: set.choices.iter().map(|choice| format!(" {choice}")).collect(),
            },
            may_be_cut: false,
        };
        Ok(self.sets.iter().map(item).collect())
    }

    fn mark(&self, index: usize, answer: &Answer) -> Scores {
        let Answer::LogLikelihoods(scores) = answer else { return Scores::new() };
        mark(&self.sets[index], scores)
    }
}

fn mark(set: &Set, scores: &[f64]) -> Scores {
    let best = |scores: &[f64]| {
        let best = scores.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1).then(b.0.cmp(&a.0)));
        best.map_or(0.0, |(index, _)| f64::from(u8::from(set.right[index])))
    };
    match set.kind {
        Kind::Mc1 => Scores::from([("mc1".into(), best(scores))]),
        Kind::Mc2 => {
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let mass: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let right: f64 =
                mass.iter().zip(&set.right).filter(|(_, right)| **right).map(|(p, _)| p).sum();
            Scores::from([("mc2".into(), right / mass.iter().sum::<f64>())])
        }
        Kind::Simple => {
            let per_byte: Vec<f64> = scores
                .iter()
                .zip(&set.choices)
                .map(|(s, choice)| s / choice.len() as f64)
                .collect();
            Scores::from([("acc".into(), best(scores)), ("acc_norm".into(), best(&per_byte))])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(kind: Kind, choices: &[&str], right: &[bool]) -> Set {
        Set {
            id: String::new(),
            prompt: String::new(),
            kind,
            choices: choices.iter().map(|choice| choice.to_string()).collect(),
            right: right.to_vec(),
        }
    }

    #[test]
    fn likelihoods_decide() {
        let scores = [0.2f64.ln(), 0.1f64.ln(), 0.1f64.ln()];
        let mc2 = mark(&set(Kind::Mc2, &["a", "b", "c"], &[true, false, true]), &scores);
        assert!((mc2["mc2"] - 0.75).abs() < 1e-12);
        let mc1 = mark(&set(Kind::Mc1, &["a", "b", "c"], &[false, true, false]), &scores);
        assert_eq!(mc1["mc1"], 0.0);
        // −4 over 8 bytes beats −3 over 1.
        let simple = set(Kind::Simple, &["x", "eight by"], &[false, true]);
        let marks = mark(&simple, &[-3.0, -4.0]);
        assert_eq!((marks["acc"], marks["acc_norm"]), (0.0, 1.0));
    }
}
