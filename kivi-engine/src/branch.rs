//! One answer to a request, and the sequence it is computed on.

use crate::{Event, FinishReason, Request, prefix::PrefixKey, swap::Swapped};
use kivi_core::SequenceId;
use kivi_models::{
    sampling::Sampler,
    text::{StopMatcher, TokenStream},
};
use std::{sync::Arc, time::Instant};
use tokio::sync::mpsc::UnboundedSender;

/// Orders branches by the arrival of their request, then by sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BranchId {
    pub(crate) request: u64,
    pub(crate) sample: usize,
}

/// What the branches of a request share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) request: Request,
    pub(crate) events: UnboundedSender<Event>,
    pub(crate) deadline: Option<Instant>,
    /// One for each whole segment of the prompt.
    pub(crate) keys: Vec<PrefixKey>,
}

/// One answer under way.
#[derive(Debug)]
pub(crate) struct Branch {
    pub(crate) shared: Arc<Shared>,
    /// Prompt and answer so far; the newest token is not in the cache yet.
    pub(crate) tokens: Vec<u32>,
    /// Where its cache is, if it has one.
    pub(crate) sequence: Option<SequenceId>,
    /// Its cache in host memory.
    pub(crate) swapped: Option<Swapped>,
    /// Whether it had to give way before.
    pub(crate) gave_way: bool,
    /// Whether its prompt was announced.
    pub(crate) started: bool,
    pub(crate) sampler: Sampler,
    pub(crate) stop: StopMatcher,
    pub(crate) stream: Option<TokenStream>,
}

impl Branch {
    pub(crate) fn prompt_len(&self) -> usize {
        self.shared.request.prompt.len()
    }

    /// Tokens of the answer so far.
    pub(crate) fn answered(&self) -> usize {
        self.tokens.len() - self.prompt_len()
    }

    /// Tokens of the answer still allowed.
    pub(crate) fn left(&self) -> usize {
        self.shared.request.max_tokens - self.answered()
    }

    /// Chooses the next token from `logits` and tells the reader. `context` is the longest sequence.
    ///
    /// # Errors
    /// When logits are not numbers.
    pub(crate) fn take(
        &mut self,
        sample: usize,
        logits: &mut [f32],
        context: usize,
    ) -> kivi_models::Result<Option<FinishReason>> {
        for &token in &self.shared.request.forbidden {
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let token = self.sampler.sample(logits, &self.tokens)?;
        if self.stop.is_stop_token(token) {
            return Ok(Some(FinishReason::StopToken));
        }
        self.tokens.push(token);
        let piece = self.stream.as_mut().map(|stream| stream.push(token)).unwrap_or_default();
        let stopped = self.stop.push(&piece);
        self.tell(Event::Token { sample, token, text: stopped.text });
        Ok(match stopped.stop_string {
            Some(_) => Some(FinishReason::StopString),
            None if self.left() == 0 => Some(FinishReason::Length),
            None if self.tokens.len() >= context => Some(FinishReason::Context),
            None => None,
        })
    }

    /// Tells the reader that the answer is complete.
    pub(crate) fn finish(&mut self, sample: usize, reason: FinishReason) {
        let rest = self.stream.as_mut().map(TokenStream::finish).unwrap_or_default();
        let mut text = self.stop.push(&rest).text;
        text.push_str(&self.stop.finish());
        self.tell(Event::Finished { sample, reason, text });
    }

    /// Whether the reader has gone shows at the next step.
    pub(crate) fn tell(&self, event: Event) {
        let _ = self.shared.events.send(event);
    }
}
