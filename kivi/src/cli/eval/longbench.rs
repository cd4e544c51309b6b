//! `kivi eval longbench`.

use super::{
    metrics::{best, f1, rouge_l, similarity},
    suite::{Answer, Ask, Item, Line, Scores, Suite, SuiteOptions, read_lines},
    text::read_text,
};
use anyhow::{Result, anyhow, bail};
use clap::Args;
use serde::Deserialize;
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf};

/// Long documents and questions about them, in LongBench's format (arXiv 2308.14508).
///
/// One JSON object per line with "input", "context", "answers", "dataset" and, where classes are to be
/// told, "all_classes"; a file may hold several data sets. Each is marked with the benchmark's metric:
/// F1, ROUGE-L, accuracy or similarity of the first line of code. Only the English and code data sets
/// are known. Prompts that do not fit the context lose tokens in the middle.
#[derive(Args, Debug)]
pub(in crate::cli) struct LongBench {
    /// The questions, JSONL.
    #[arg(long, env = "KIVI_FILE", value_name = "FILE")]
    file: PathBuf,
    /// Prompts by data set, a JSON object with {context} and {input} in its texts, such as the
    /// benchmark's own dataset2prompt.json; published figures need these.
    #[arg(long, env = "KIVI_PROMPTS", value_name = "FILE")]
    prompts: Option<PathBuf>,
    /// Longest answers in tokens by data set, such as the benchmark's own dataset2maxlen.json.
    #[arg(long, env = "KIVI_MAX_LENGTHS", value_name = "FILE")]
    max_lengths: Option<PathBuf>,
    #[command(flatten)]
    suite: SuiteOptions,
}

#[derive(Clone, Debug, Deserialize)]
struct Row {
    input: String,
    context: String,
    answers: Vec<String>,
    dataset: String,
    #[serde(default)]
    all_classes: Option<Vec<String>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Metric {
    F1,
    Rouge,
    /// The right class, shared among all classes the answer names.
    Class,
    /// The number of the right paragraph among all numbers of the answer.
    Retrieval,
    /// The right number among all numbers of the answer.
    Count,
    Code,
}

impl Metric {
    fn of(dataset: &str) -> Option<Self> {
        // LongBench-E names its data sets with a suffix.
        Some(match dataset.strip_suffix("_e").unwrap_or(dataset) {
            "narrativeqa" | "qasper" | "multifieldqa_en" | "hotpotqa" | "2wikimqa" | "musique"
            | "triviaqa" => Self::F1,
            "gov_report" | "qmsum" | "multi_news" | "samsum" => Self::Rouge,
            "trec" => Self::Class,
            "passage_retrieval_en" => Self::Retrieval,
            "passage_count" => Self::Count,
            "lcc" | "repobench-p" => Self::Code,
            _ => return None,
        })
    }

    /// The prompt and the longest answer where no files say otherwise.
    fn defaults(self) -> (&'static str, usize) {
        match self {
            Self::F1 => (
                "Read the text and answer the question in a few words.\n\n{context}\n\nQuestion: \
                 {input}\nAnswer:",
                32,
            ),
            Self::Rouge => ("Read the text.\n\n{context}\n\n{input}\nSummary:", 256),
            Self::Class => ("{context}\n{input}", 32),
            Self::Retrieval => (
                "Here are numbered paragraphs.\n\n{context}\n\nThis is a summary of one of \
                 them:\n\n{input}\n\nIts number is: Paragraph",
                16,
            ),
            Self::Count => (
                "Some of these paragraphs are repeated.\n\n{context}\n\nHow many different paragraphs \
                 are there? There are",
                16,
            ),
            Self::Code => ("Complete the code.\n{context}{input}", 64),
        }
    }

    fn score(self, answer: &str, right: &str, classes: &[String]) -> f64 {
        match self {
            Self::F1 => f1(answer, right),
            Self::Rouge => rouge_l(answer, right),
            Self::Class => {
                // A class whose name is part of the right one's does not count.
                let named = classes.iter().filter(|class| {
                    answer.contains(class.as_str())
                        && (class.as_str() == right || !right.contains(class.as_str()))
                });
                let named: Vec<_> = named.collect();
                match named.iter().any(|class| *class == right) {
                    true => 1.0 / named.len() as f64,
                    false => 0.0,
                }
            }
            Self::Retrieval | Self::Count => {
                let digits = |text: &str| -> Vec<String> {
                    let numbers = text.split(|c: char| !c.is_ascii_digit());
                    numbers.filter(|number| !number.is_empty()).map(String::from).collect()
                };
                let (found, right) = (digits(answer), digits(right));
                let same = found.iter().filter(|number| right.first() == Some(number)).count();
                if found.is_empty() { 0.0 } else { same as f64 / found.len() as f64 }
            }
            Self::Code => {
                // The first line that is not a comment or a fence.
                let comment = |line: &&str| !line.contains(['`', '#']) && !line.contains("//");
                let line = answer.trim_start_matches('\n').lines().find(comment);
                similarity(line.unwrap_or_default(), right)
            }
        }
    }
}

impl LongBench {
    pub(in crate::cli) fn execute(self) -> Result<()> {
        let rows: Vec<Line<Row>> = read_lines(&self.file)?;
        let read = |path: &Option<PathBuf>| -> Result<Option<String>> {
            path.as_deref().map(read_text).transpose()
        };
        let wrong = |path: &Option<PathBuf>, error: serde_json::Error| {
            anyhow!("{}: {error}", path.as_deref().unwrap_or("".as_ref()).display())
        };
        let prompts: BTreeMap<String, String> = match read(&self.prompts)? {
            Some(text) => serde_json::from_str(&text).map_err(|e| wrong(&self.prompts, e))?,
            None => BTreeMap::new(),
        };
        let lengths: BTreeMap<String, usize> = match read(&self.max_lengths)? {
            Some(text) => serde_json::from_str(&text).map_err(|e| wrong(&self.max_lengths, e))?,
            None => BTreeMap::new(),
        };
        let mut metrics = Vec::new();
        for Line { number, value } in &rows {
            let at = format!("{}, line {number}", self.file.display());
            let Some(metric) = Metric::of(&value.dataset) else {
                bail!("{at}: data set {} is not one of the English and code ones", value.dataset);
            };
            if value.answers.is_empty() {
                bail!("{at}: there is no answer");
            }
            if metric == Metric::Class && value.all_classes.as_ref().is_none_or(Vec::is_empty) {
                bail!("{at}: {} needs all_classes", value.dataset);
            }
            metrics.push(metric);
        }
        self.suite.run(Documents { rows, metrics, prompts, lengths })
    }
}

struct Documents {
    rows: Vec<Line<Row>>,
    metrics: Vec<Metric>,
    prompts: BTreeMap<String, String>,
    lengths: BTreeMap<String, usize>,
}

impl Suite for Documents {
    fn name(&self) -> &'static str {
        "longbench"
    }

    fn settings(&self) -> Value {
        json!({ "rows": self.rows.len(), "prompts": self.prompts, "max_lengths": self.lengths })
    }

    fn items(&mut self, _: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>> {
        let item = |(Line { number, value }, metric): (&Line<Row>, &Metric)| {
            let (prompt, length) = metric.defaults();
            let prompt = self.prompts.get(&value.dataset).map_or(prompt, String::as_str);
            // Each text is put in once, so that braces within them stay what they are.
            let mut filled = String::new();
            let mut rest = prompt;
            while let Some(start) = rest.find('{') {
                filled.push_str(&rest[..start]);
                rest = &rest[start..];
                let (text, name) = match rest {
                    _ if rest.starts_with("{context}") => (value.context.as_str(), "{context}"),
                    _ if rest.starts_with("{input}") => (value.input.as_str(), "{input}"),
                    _ => ("{", "{"),
                };
                filled.push_str(text);
                rest = &rest[name.len()..];
            }
            let stop = match metric {
                // Of few-shot data sets only the first line is the answer.
                Metric::Class => vec!["\n".to_string()],
                _ if matches!(value.dataset.as_str(), "triviaqa" | "samsum") => vec!["\n".into()],
                _ => Vec::new(),
            };
            Item {
                id: number.to_string(),
                group: value.dataset.clone(),
                prompt: filled + rest,
                ask: Ask::Generate {
                    max_tokens: self.lengths.get(&value.dataset).copied().unwrap_or(length),
                    stop,
                },
                may_be_cut: true,
            }
        };
        Ok(self.rows.iter().zip(&self.metrics).map(item).collect())
    }

    fn mark(&self, index: usize, answer: &Answer) -> Scores {
        let Answer::Text(text) = answer else { return Scores::new() };
        let (row, metric) = (&self.rows[index].value, self.metrics[index]);
        let classes = row.all_classes.as_deref().unwrap_or_default();
        let score = best(&row.answers, |right| metric.score(text, right, classes));
        Scores::from([("score".into(), score)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_the_benchmark() {
        let classes = ["Number of something", "Number", "City"].map(String::from);
        let score = |answer, right| Metric::Class.score(answer, right, &classes);
        assert_eq!(score("Type: City", "City"), 1.0);
        assert_eq!(score("City or Number", "City"), 0.5);
        assert_eq!(score("Number of something", "Number of something"), 1.0);
        assert_eq!(score("Number", "City"), 0.0);
        let score = |answer, right| Metric::Retrieval.score(answer, right, &[]);
        assert_eq!((score(" 12", "Paragraph 12"), score("3 or 12", "Paragraph 12")), (1.0, 0.5));
        assert_eq!(Metric::Count.score("no", "7", &[]), 0.0);
        assert_eq!(Metric::Code.score("\n# note\nreturn x\nmore", "return x", &[]), 1.0);
        assert_eq!(Metric::of("hotpotqa_e"), Some(Metric::F1));
        assert_eq!(Metric::of("dureader"), None);
    }

    #[test]
    fn braces_in_documents_are_text() {
        let value = Row {
            input: "{context}".into(),
            context: "fn f() {}".into(),
            answers: vec!["x".into()],
            dataset: "lcc".into(),
            all_classes: None,
        };
        let mut documents = Documents {
            rows: vec![Line { number: 3, value }],
            metrics: vec![Metric::Code],
            prompts: BTreeMap::from([("lcc".into(), "{{context}|{input}}".into())]),
            lengths: BTreeMap::new(),
        };
        let items = documents.items(&|text| Ok(text.len())).unwrap();
        assert_eq!(items[0].prompt, "{fn f() {}|{context}}");
    }
}
