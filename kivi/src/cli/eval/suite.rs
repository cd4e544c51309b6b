//! Evaluations that ask a model questions: options, the loop over batches, the summary.

mod answer;
mod journal;
mod jsonl;

pub(super) use answer::Answer;
pub(super) use jsonl::{Line, read_lines};

use crate::cli::{
    cache::{Cache, CacheOptions},
    device::{self, DeviceOptions, Task},
    model::{self, ModelOptions},
    output,
};
use answer::Answerer;
use anyhow::{Result, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use indicatif::{ProgressBar, ProgressStyle};
use journal::{Journal, Record};
use kivi::{
    DecoderBackend,
    models::{Checkpoint, chat::Message},
};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::PathBuf};

/// Options that all of these evaluations have.
#[derive(Args, Clone, Debug)]
pub(super) struct SuiteOptions {
    /// Ask only so many questions: the first ones, or with --seed a random sample.
    #[arg(long, env = "KIVI_LIMIT", value_name = "N")]
    pub(super) limit: Option<usize>,
    /// Seed of everything random: of a sample, and of texts that are made up.
    #[arg(long, env = "KIVI_SEED", value_name = "N")]
    pub(super) seed: Option<u64>,
    /// Questions that are answered together.
    #[arg(long, env = "KIVI_BATCH", default_value_t = 8, value_name = "N")]
    batch: usize,
    /// Put each question to the model through its chat template.
    #[arg(long, env = "KIVI_CHAT", value_parser = FalseyValueParser::new())]
    chat: bool,
    /// Append every answer to a JSONL file; answers that it already holds are not asked for again.
    #[arg(long, env = "KIVI_OUT", value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    cache: CacheOptions,
    /// Print one JSON object.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new())]
    json: bool,
}

/// What is asked of the model.
#[derive(Clone, Debug)]
pub(super) enum Ask {
    /// Text, generated greedily until one of these strings.
    Generate { max_tokens: usize, stop: Vec<String> },
    /// The log-likelihood of each of these continuations.
    Choose { choices: Vec<String> },
}

/// One question.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// Unique within the evaluation.
    pub(super) id: String,
    /// Scores are averaged for each group, and over all of them.
    pub(super) group: String,
    pub(super) prompt: String,
    pub(super) ask: Ask,
    /// Whether tokens may be taken out of the middle of a prompt that does not fit.
    pub(super) may_be_cut: bool,
}

/// Scores of an answer by name, each from 0 to 1.
pub(super) type Scores = BTreeMap<String, f64>;

/// An evaluation: its questions and how answers are marked.
pub(super) trait Suite {
    /// Name of the command.
    fn name(&self) -> &'static str;

    /// What was asked for, for the report.
    fn settings(&self) -> Value;

    /// The questions. `tokens` counts the tokens of a text.
    fn items(&mut self, tokens: &dyn Fn(&str) -> Result<usize>) -> Result<Vec<Item>>;

    /// Marks the answer to item `index`.
    fn mark(&self, index: usize, answer: &Answer) -> Scores;

    /// Draws what there is to draw from the mean scores of each group.
    fn plot(&self, _groups: &BTreeMap<String, Scores>) -> Result<()> {
        Ok(())
    }
}

impl SuiteOptions {
    /// Runs an evaluation.
    pub(super) fn run(self, suite: impl Suite) -> Result<()> {
        if self.batch == 0 || self.limit == Some(0) {
            bail!("there is nothing to do with 0 questions");
        }
        let checkpoint = self.model.open(!self.json)?;
        let device = self.device.clone();
        device.run(Evaluation { options: self, suite, checkpoint })
    }

    /// The random numbers of this run.
    pub(super) fn random(&self) -> ChaCha8Rng {
        ChaCha8Rng::seed_from_u64(self.seed.unwrap_or(0))
    }
}

/// A number below `bound`; the bias of the remainder is far below anything measured here.
pub(super) fn below(random: &mut ChaCha8Rng, bound: usize) -> usize {
    (random.next_u64() % bound.max(1) as u64) as usize
}

struct Evaluation<S> {
    options: SuiteOptions,
    suite: S,
    checkpoint: Checkpoint,
}

impl<S: Suite> Task for Evaluation<S> {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { options, mut suite, checkpoint } = self;
        let cache = options.cache.cache(checkpoint.config())?;
        let tokenizer = model::tokenizer(&checkpoint)?;
        let template = model::chat_template(&checkpoint)?;
        if options.chat && template.is_none() {
            bail!("this model has no chat template");
        }
        let count = |text: &str| Ok(tokenizer.encode(text, false, false)?.len());
        let mut items = suite.items(&count)?;
        if items.is_empty() {
            bail!("there is nothing to ask");
        }
        if let Some(template) = template.filter(|_| options.chat) {
            for item in &mut items {
                item.prompt = template.render(&[Message::new("user", &item.prompt)], true)?;
            }
        }
        let chosen = options.chosen(items.len());
        let stop_tokens = model::stop_tokens(&checkpoint, &tokenizer);
        let context = checkpoint.config().context_length;
        // Found before the weights are loaded.
        let answerer =
            Answerer { tokenizer: &tokenizer, stop_tokens, context, special: options.chat };
        for &index in &chosen {
            answerer.tokens(&items[index])?;
        }
        let header = json!({
            "evaluation": suite.name(),
            "model": options.model.model,
            "chat": options.chat,
            "cache": cache.describe(),
            "settings": suite.settings(),
            "fingerprint": format!("{:016x}", fingerprint(&items)),
        });
        let mut journal = Journal::open(options.out.as_deref(), &header)?;
        for &index in &chosen {
            // The right answers may have been corrected since.
            journal.mark(&items[index].id, |answer| suite.mark(index, answer));
        }
        let todo: Vec<usize> =
            chosen.iter().copied().filter(|&i| !journal.has(&items[i].id)).collect();
        let llama = options.model.load(backend, &checkpoint)?;
        if !options.json {
            eprintln!(
                "{}; {}; cache: {}; {} questions{}",
                options.model.model,
                device::describe(&llama, &checkpoint),
                cache.describe(),
                chosen.len(),
                match chosen.len() - todo.len() {
                    0 => String::new(),
                    done => format!(", {done} answered before"),
                },
            );
        }
        let bar = progress(options.json, todo.len());
        for batch in todo.chunks(options.batch) {
            let asked: Vec<&Item> = batch.iter().map(|&index| &items[index]).collect();
            let answers = answerer.answer(&llama, &cache, &asked)?;
            for (&index, answer) in batch.iter().zip(answers) {
                let item = &items[index];
                journal.add(Record {
                    id: item.id.clone(),
                    group: item.group.clone(),
                    scores: suite.mark(index, &answer),
                    answer,
                })?;
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        let asked: Vec<&str> = chosen.iter().map(|&index| items[index].id.as_str()).collect();
        let groups = journal.means(&asked);
        suite.plot(&groups)?;
        report(&options, &cache, header, asked.len(), &groups)
    }
}

impl SuiteOptions {
    /// Which of `count` items are asked, in their order.
    fn chosen(&self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        let limit = self.limit.unwrap_or(count).min(count);
        if limit < count && self.seed.is_some() {
            let mut random = self.random();
            for index in 0..limit {
                order.swap(index, index + below(&mut random, count - index));
            }
        }
        order.truncate(limit);
        order.sort_unstable();
        order
    }
}

/// FNV-1a of everything that is asked, so that answers to other questions are not taken for these.
fn fingerprint(items: &[Item]) -> u64 {
    let texts = items.iter().map(|item| format!("{}\0{}\0{:?}\0", item.id, item.prompt, item.ask));
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    texts.fold(0xcbf2_9ce4_8422_2325, |hash, text| text.bytes().fold(hash, step))
}

fn progress(hidden: bool, questions: usize) -> ProgressBar {
    let bar = if hidden { ProgressBar::hidden() } else { ProgressBar::new(questions as u64) };
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} questions, {eta} left");
    bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Name of the group of all questions.
const ALL: &str = "all";

fn report(
    options: &SuiteOptions,
    cache: &Cache,
    header: Value,
    questions: usize,
    groups: &BTreeMap<String, Scores>,
) -> Result<()> {
    let limit = cache.bits_in_the_limit()?;
    if options.json {
        let mut object = header;
        object["questions"] = questions.into();
        object["bits_per_element_limit"] = limit.into();
        object["scores"] = json!(groups.get(ALL));
        object["groups"] = json!(groups);
        return output::print_json(object);
    }
    for (group, scores) in groups.iter().filter(|(group, _)| groups.len() > 2 || *group == ALL) {
        let list = scores.iter().map(|(name, mean)| format!("{name} {:.2} %", 100.0 * mean));
        output::print(&format!("{group}: {}\n", list.collect::<Vec<_>>().join(", ")))?;
    }
    eprintln!("cache: {limit:.2} bits per element in the limit");
    Ok(())
}
