//! Answering a batch of questions.

use super::{Ask, Item};
use crate::cli::{cache::Cache, eval::score};
use anyhow::{Result, bail};
use kivi::{
    DecoderBackend, SequenceId,
    models::{
        Llama, Session,
        text::{StopMatcher, TokenStream},
        tokenizer::Tokenizer,
    },
};
use serde::{Deserialize, Serialize};

/// What the model said.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub(in crate::cli::eval) enum Answer {
    /// Generated text, without the stop string.
    Text(String),
    /// `ln p` of each choice.
    LogLikelihoods(Vec<f64>),
}

/// What is needed to answer.
pub(super) struct Answerer<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) stop_tokens: Vec<u32>,
    /// Longest sequence.
    pub(super) context: usize,
    /// Whether prompts spell special tokens, as those of a chat template do.
    pub(super) special: bool,
}

/// One text that is being generated.
struct Generation {
    sequence: SequenceId,
    stream: TokenStream,
    stop: StopMatcher,
    text: String,
    left: usize,
    next: Option<u32>,
}

impl Answerer<'_> {
    /// Tokens of a prompt, with those in the middle left out if it is too long and may be cut.
    ///
    /// # Errors
    /// When the prompt is empty or does not fit.
    pub(super) fn tokens(&self, item: &Item) -> Result<Vec<u32>> {
        let mut tokens = self.tokenizer.encode(&item.prompt, !self.special, self.special)?;
        let longest = match &item.ask {
            Ask::Generate { max_tokens, .. } => *max_tokens,
            Ask::Choose { choices } => {
                let lengths = choices.iter().map(|choice| self.continuation(choice));
                lengths
                    .map(|tokens| Ok(tokens?.len()))
                    .collect::<Result<Vec<_>>>()?
                    .into_iter()
                    .max()
                    .unwrap_or(0)
            }
        };
        let room = self.context.saturating_sub(longest);
        if tokens.len() > room {
            if !item.may_be_cut || room < 2 {
                bail!(
                    "{}: a prompt of {} tokens and an answer of up to {longest} do not fit the \
                     context of {}",
                    item.id,
                    tokens.len(),
                    self.context
                );
            }
            let end = tokens.split_off(tokens.len() - (room - room / 2));
            tokens.truncate(room / 2);
            tokens.extend(end);
        }
        if tokens.is_empty() {
            bail!("{}: the prompt is empty", item.id);
        }
        Ok(tokens)
    }

    fn continuation(&self, text: &str) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode(text, false, false)?)
    }

    /// Answers the questions, in one batch.
    pub(super) fn answer<B: DecoderBackend>(
        &self,
        llama: &Llama<B>,
        cache: &Cache,
        items: &[&Item],
    ) -> Result<Vec<Answer>> {
        let slots = |item: &&Item| match &item.ask {
            Ask::Generate { .. } => 1,
            Ask::Choose { choices } => 1 + choices.len(),
        };
        let prompts = items.iter().map(|item| self.tokens(item)).collect::<Result<Vec<_>>>()?;
        let room = |(item, prompt): (&&Item, &Vec<u32>)| match &item.ask {
            Ask::Generate { max_tokens, .. } => prompt.len() + max_tokens,
            Ask::Choose { choices } => {
                // A token is never longer than the bytes it spells, plus one for a leading space.
                prompt.len() + choices.iter().map(|choice| choice.len() + 1).max().unwrap_or(0)
            }
        };
        let longest = items.iter().zip(&prompts).map(room).max().unwrap_or(0);
        let sequences = items.iter().map(slots).sum::<usize>();
        let mut session = cache.session(llama, sequences, longest)?;
        let mut answers: Vec<Option<Answer>> = vec![None; items.len()];
        let mut generations = Vec::new();
        for (index, (item, prompt)) in items.iter().zip(&prompts).enumerate() {
            let sequence = session.create_sequence()?;
            let logits = session.prompt(sequence, prompt)?;
            match &item.ask {
                Ask::Generate { max_tokens, stop } => {
                    let mut generation = Generation {
                        sequence,
                        stream: TokenStream::continuing(self.tokenizer, true),
                        stop: StopMatcher::new(&self.stop_tokens, stop)?,
                        text: String::new(),
                        left: *max_tokens,
                        next: None,
                    };
                    generation.take(&logits)?;
                    generations.push((index, generation));
                }
                Ask::Choose { choices } => {
                    let choices = choices
                        .iter()
                        .map(|choice| self.continuation(choice))
                        .collect::<Result<Vec<_>>>()?;
                    let scores = choose(llama, &mut session, sequence, &logits, &choices)?;
                    session.state_mut().remove(sequence)?;
                    answers[index] = Some(Answer::LogLikelihoods(scores));
                }
            }
        }
        let vocabulary = llama.config().vocab_size;
        loop {
            let active: Vec<usize> =
                (0..generations.len()).filter(|&i| generations[i].1.next.is_some()).collect();
            if active.is_empty() {
                break;
            }
            let next: Vec<(SequenceId, [u32; 1])> = active
                .iter()
                .filter_map(|&i| Some((generations[i].1.sequence, [generations[i].1.next?])))
                .collect();
            let steps: Vec<(SequenceId, &[u32])> =
                next.iter().map(|(sequence, token)| (*sequence, &token[..])).collect();
            let logits = session.generate_step(&steps)?;
            for (&i, logits) in active.iter().zip(logits.chunks_exact(vocabulary)) {
                generations[i].1.take(logits)?;
            }
        }
        for (index, generation) in generations {
            answers[index] = Some(Answer::Text(generation.text));
        }
        Ok(answers.into_iter().flatten().collect())
    }
}

impl Generation {
    /// Takes the most likely token; `next` is empty when the text ends.
    fn take(&mut self, logits: &[f32]) -> Result<()> {
        self.next = None;
        let Some(token) = score::argmax(logits).filter(|&token| logits[token].is_finite()) else {
            bail!("the model's logits are not numbers");
        };
        let token = token as u32;
        if self.left == 0 || self.stop.is_stop_token(token) {
            self.finish();
            return Ok(());
        }
        self.left -= 1;
        let piece = self.stop.push(&self.stream.push(token));
        self.text.push_str(&piece.text);
        if piece.stop_string.is_none() {
            self.next = Some(token);
        }
        Ok(())
    }

    fn finish(&mut self) {
        let piece = self.stop.push(&self.stream.finish());
        self.text.push_str(&piece.text);
        self.text.push_str(&self.stop.finish());
    }
}

/// `ln p` of each continuation of a sequence, `logits` being those after its last token. Every
/// continuation is read through the cache, as generated tokens are.
fn choose<B: DecoderBackend>(
    llama: &Llama<B>,
    session: &mut Session<B>,
    sequence: SequenceId,
    logits: &[f32],
    choices: &[Vec<u32>],
) -> Result<Vec<f64>> {
    let probability = |logits: &[f32], token: u32| -> Result<f64> {
        let p = f64::from(logits[token as usize]) - score::log_sum_exp(logits);
        if p.is_finite() { Ok(p) } else { bail!("the model's logits are not numbers") }
    };
    let mut scores = Vec::new();
    for choice in choices {
        let Some((&first, _)) = choice.split_first() else { bail!("a choice is empty") };
        let mut total = probability(logits, first)?;
        let read = &choice[..choice.len() - 1];
        if !read.is_empty() {
            let fork = session.fork(sequence)?;
            let hidden = session.step(&[(fork, read)])?;
            let rows: Vec<usize> = (0..read.len()).collect();
            let logits = llama.logits(&hidden, &rows)?;
            let vocabulary = llama.config().vocab_size;
            for (logits, &token) in logits.chunks_exact(vocabulary).zip(&choice[1..]) {
                total += probability(logits, token)?;
            }
            session.state_mut().remove(fork)?;
        }
        scores.push(total);
    }
    Ok(scores)
}
