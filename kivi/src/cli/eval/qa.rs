//! `kivi eval qa`.

use super::{
    metrics::{best, exact_match, f1},
    suite::{Answer, Ask, Item, Line, Scores, Suite, SuiteOptions, read_lines},
};
use anyhow::{Result, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use std::path::PathBuf;

/// Questions about a story, each after the earlier ones with their answers.
///
/// One JSON object per line, in the style of CoQA (arXiv 1808.07042): {"story": "…", "questions":
/// ["…", …], "answers": ["…" or ["…", …], …]}, a list being answers that are equally right. Scores
/// are the exact match and F1 of words, the best over the right answers.
#[derive(Args, Debug)]
pub(in crate::cli) struct Qa {
    /// The stories, JSONL.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Longest answer in tokens.
    #[arg(long, env = "KIVI_MAX_TOKENS", default_value_t = 32, value_name = "N")]
    max_tokens: usize,
    #[command(flatten)]
    suite: SuiteOptions,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    #[serde(alias = "context")]
    story: String,
    questions: Vec<String>,
    answers: Vec<Right>,
}

/// One right answer or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Right {
    One(String),
    Several(Vec<String>),
}

impl Right {
    fn all(&self) -> Vec<String> {
        match self {
            Self::One(answer) => vec![answer.clone()],
            Self::Several(answers) => answers.clone(),
        }
    }
}

impl Qa {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let rows: Vec<Line<Row>> = read_lines(&self.file)?;
        for line in &rows {
            let (questions, answers) = (&line.value.questions, &line.value.answers);
            let empty = |right: &Right| right.all().is_empty();
            if questions.is_empty() || questions.len() != answers.len() {
                bail!(
                    "{}, line {}: {} questions and {} answers",
                    self.file.display(),
                    line.number,
                    questions.len(),
                    answers.len()
                );
            }
            if let Some(index) = answers.iter().position(empty) {
                bail!(
                    "{}, line {}: question {index} has no answer",
                    self.file.display(),
                    line.number
                );
            }
        }
        self.suite.run(Stories { rows, rights: Vec::new(), max_tokens: self.max_tokens })
    }
}

struct Stories {
    rows: Vec<Line<Row>>,
    /// Of every item.
    rights: Vec<Vec<String>>,
    max_tokens: usize,
}

impl Suite for Stories {
    fn name(&self) -> &'static str {
        "qa"
    }

    fn settings(&self) -> Value {
        json!({ "max_tokens": self.max_tokens, "rows": self.rows.len() })
    }

    fn items(&mut self, _: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        for Line { number, value: row } in &self.rows {
            let mut prompt = format!("{}\n", row.story);
            for (index, (question, right)) in row.questions.iter().zip(&row.answers).enumerate() {
                prompt += &format!("\nQ: {question}\nA:");
                items.push(Item {
                    id: format!("{number}.{index}"),
                    group: "qa".into(),
                    prompt: prompt.clone(),
                    ask: Ask::Generate { max_tokens: self.max_tokens, stop: vec!["\n".into()] },
                    may_be_cut: false,
                });
                let right = right.all();
                prompt += &format!(" {}", right[0]);
                self.rights.push(right);
            }
        }
        Ok(items)
    }

    fn mark(&self, index: usize, answer: &Answer) -> Scores {
        let Answer::Text(text) = answer else { return Scores::new() };
        let rights = &self.rights[index];
        Scores::from([
            ("exact_match".into(), best(rights, |right| exact_match(text, right))),
            ("f1".into(), best(rights, |right| f1(text, right))),
        ])
    }
}
