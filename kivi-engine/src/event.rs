//! What an engine answers.

use crate::{Error, Result};
use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Something that happened to a request.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The prompt is being computed.
    Started {
        /// Tokens of the prompt whose cache another request had left behind.
        reused: usize,
    },
    /// An answer has another token.
    Token {
        /// Which answer.
        sample: usize,
        /// The token.
        token: u32,
        /// The text that is certain with it; empty without a tokenizer.
        text: String,
    },
    /// An answer is complete.
    Finished {
        /// Which answer.
        sample: usize,
        /// Why.
        reason: FinishReason,
        /// Text that was held back because it could have begun a stop string.
        text: String,
    },
    /// The request failed; nothing follows.
    Failed(Arc<Error>),
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FinishReason {
    /// A stop token.
    StopToken,
    /// A stop string.
    StopString,
    /// As many tokens as asked for.
    Length,
    /// The end of the engine's context.
    Context,
    /// The request's deadline.
    Deadline,
}

/// The events of one request, in order; the stream ends when all its answers have.
///
/// An unbounded channel lies between the engine and this end, so the engine never waits for a slow
/// reader; it holds at most [`Request::max_tokens`](crate::Request::max_tokens) events per answer.
/// Dropping this end cancels the request.
#[derive(Debug)]
pub struct Events {
    receiver: UnboundedReceiver<Event>,
}

/// One complete answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The tokens, without a stop token.
    pub tokens: Vec<u32>,
    /// The text, without a stop string; empty without a tokenizer.
    pub text: String,
    /// Why it ended.
    pub reason: FinishReason,
}

impl Events {
    /// The two ends.
    pub(crate) fn channel() -> (UnboundedSender<Event>, Self) {
        let (sender, receiver) = unbounded_channel();
        (sender, Self { receiver })
    }

    /// The next event, or `None` after the last; with any async runtime.
    pub async fn next(&mut self) -> Option<Event> {
        self.receiver.recv().await
    }

    /// The same, blocking the thread. Only where another thread runs the engine.
    ///
    /// # Panics
    /// Inside an async runtime of tokio, which must not be blocked.
    pub fn blocking_next(&mut self) -> Option<Event> {
        self.receiver.blocking_recv()
    }

    /// The next event if there is one now.
    pub fn try_next(&mut self) -> Option<Event> {
        self.receiver.try_recv().ok()
    }

    /// The answers so far, from the events that have not been taken, in the order of the samples.
    /// Complete when the engine is idle.
    ///
    /// # Errors
    /// What the request failed with, or [`Error::Stopped`] when an answer is not complete.
    pub fn collect_now(mut self) -> Result<Vec<Completion>, Arc<Error>> {
        let mut answers = Answers::default();
        while let Some(event) = self.try_next() {
            answers.push(event)?;
        }
        answers.complete()
    }

    /// Waits for all answers, blocking the thread as [`Events::blocking_next`] does.
    ///
    /// # Errors
    /// What the request failed with, or [`Error::Stopped`].
    ///
    /// # Panics
    /// Inside an async runtime of tokio.
    pub fn wait(mut self) -> Result<Vec<Completion>, Arc<Error>> {
        let mut answers = Answers::default();
        while let Some(event) = self.blocking_next() {
            answers.push(event)?;
        }
        answers.complete()
    }
}

impl futures_core::Stream for Events {
    type Item = Event;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Event>> {
        self.receiver.poll_recv(context)
    }
}

/// Answers under way.
#[derive(Default)]
struct Answers {
    samples: Vec<(Vec<u32>, String, Option<FinishReason>)>,
}

impl Answers {
    fn push(&mut self, event: Event) -> Result<(), Arc<Error>> {
        let (Event::Token { sample, .. } | Event::Finished { sample, .. }) = event else {
            return match event {
                Event::Failed(error) => Err(error),
                _ => Ok(()),
            };
        };
        if self.samples.len() <= sample {
            self.samples.resize_with(sample + 1, Default::default);
        }
        let (tokens, text, reason) = &mut self.samples[sample];
        match event {
            Event::Token { token, text: piece, .. } => {
                tokens.push(token);
                text.push_str(&piece);
            }
            Event::Finished { reason: why, text: rest, .. } => {
                text.push_str(&rest);
                *reason = Some(why);
            }
            _ => {}
        }
        Ok(())
    }

    fn complete(self) -> Result<Vec<Completion>, Arc<Error>> {
        let complete = |(tokens, text, reason): (_, _, Option<_>)| {
            let reason = reason.ok_or_else(|| Arc::new(Error::Stopped))?;
            Ok(Completion { tokens, text, reason })
        };
        if self.samples.is_empty() {
            return Err(Arc::new(Error::Stopped));
        }
        self.samples.into_iter().map(complete).collect()
    }
}
