//! The interactive chat of `kivi run`.

use super::{output, run::Answering};
use anyhow::Result;
use kivi::{
    DecoderBackend, SequenceId,
    models::{
        Session,
        chat::{ChatTemplate, Message},
    },
};
use rustyline::{DefaultEditor, error::ReadlineError};

/// A conversation. The cache holds `cached`; a new turn continues it where the template allows.
pub(super) struct Chat {
    template: ChatTemplate,
    messages: Vec<Message>,
    cached: Vec<u32>,
}

impl Chat {
    pub(super) fn new(template: ChatTemplate, system: Option<String>) -> Self {
        let messages = system.map(|text| Message::new("system", text)).into_iter().collect();
        Self { template, messages, cached: Vec::new() }
    }

    /// Reads messages and answers them until the input ends; `first` is answered first.
    pub(super) fn converse<B: DecoderBackend>(
        mut self,
        session: &mut Session<B>,
        mut answering: Answering<'_>,
        first: Option<String>,
    ) -> Result<()> {
        let mut editor = DefaultEditor::new()?;
        let mut sequence = session.create_sequence()?;
        let mut next = first;
        loop {
            let text = match next.take() {
                Some(text) => text,
                None => match editor.readline("> ") {
                    Ok(text) => text,
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => return Ok(()),
                    Err(error) => return Err(error.into()),
                },
            };
            if text.trim().is_empty() {
                continue;
            }
            editor.add_history_entry(&text)?;
            self.messages.push(Message::new("user", text));
            self.turn(session, &mut answering, &mut sequence)?;
        }
    }

    fn turn<B: DecoderBackend>(
        &mut self,
        session: &mut Session<B>,
        answering: &mut Answering<'_>,
        sequence: &mut SequenceId,
    ) -> Result<()> {
        let rendered = self.template.render(&self.messages, true)?;
        let tokens = answering.tokenizer.encode(&rendered, false, true)?;
        if !tokens.starts_with(&self.cached) || tokens.len() == self.cached.len() {
            // The template rewrites earlier turns, or the text tokenizes differently: start over.
            session.state_mut().remove(*sequence)?;
            *sequence = session.create_sequence()?;
            self.cached.clear();
        }
        if tokens.len() >= answering.context {
            eprintln!(
                "the conversation of {} tokens no longer fits the context of {}; starting anew",
                tokens.len(),
                answering.context
            );
            self.messages.retain(|message| message.role == "system");
            return Ok(());
        }
        let answer =
            answering.answer(session, *sequence, tokens.split_at(self.cached.len()), false)?;
        output::print("\n")?;
        self.cached = tokens;
        self.cached.extend_from_slice(&answer.generated.tokens);
        // A token that stopped the answer is not in the cache.
        self.cached.truncate(session.state().tokens(*sequence)?);
        self.messages.push(Message::new("assistant", answer.generated.text));
        Ok(())
    }
}
