//! The interactive chat of `kivi run`.

use super::{
    output,
    run::Answering,
    session_file::{SavedSession, SessionFile},
};
use anyhow::{Result, bail};
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
    /// The file the conversation is kept in.
    file: Option<SessionFile>,
    /// Whether earlier turns are known only by their tokens, from that file.
    restored: bool,
    saved: Option<SavedSession>,
}

/// What the model sees after an answer when the user then says `text`: the end of the answer's turn,
/// the message, and the opening of the next answer.
pub(super) fn next_turn(template: &ChatTemplate, text: &str) -> Result<String> {
    // Stands for the answer, whose words do not matter: what the template puts behind them does.
    const ANSWER: &str = "kivi-answer-8d1f";
    let messages = [("user", "?"), ("assistant", ANSWER), ("user", text)];
    let rendered = template.render(&messages.map(|(role, text)| Message::new(role, text)), true)?;
    match rendered.split_once(ANSWER) {
        Some((_, rest)) => Ok(rest.to_owned()),
        None => bail!("the chat template rewrites earlier answers, so a session cannot go on"),
    }
}

impl Chat {
    pub(super) fn new(
        template: ChatTemplate,
        system: Option<String>,
        file: Option<SessionFile>,
    ) -> Self {
        let messages = system.map(|text| Message::new("system", text)).into_iter().collect();
        let cached = file.as_ref().map_or(Vec::new(), |file| file.tokens().to_vec());
        let restored = !cached.is_empty();
        Self { template, messages, cached, file, restored, saved: None }
    }

    /// Reads messages and answers them until the input ends; `first` is answered first. The file is
    /// written after every answer.
    pub(super) fn converse<B: DecoderBackend>(
        mut self,
        session: &mut Session<B>,
        mut answering: Answering<'_>,
        first: Option<String>,
    ) -> Result<()> {
        let mut editor = DefaultEditor::new()?;
        let mut sequence = match &mut self.file {
            Some(file) => file.sequence(session)?,
            None => session.create_sequence()?,
        };
        let mut next = first;
        loop {
            let text = match next.take() {
                Some(text) => text,
                None => match editor.readline("> ") {
                    Ok(text) => text,
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => {
                        if let (Some(file), Some(saved)) = (&self.file, self.saved) {
                            eprintln!("{}", file.describe(saved));
                        }
                        return Ok(());
                    }
                    Err(error) => return Err(error.into()),
                },
            };
            if text.trim().is_empty() {
                continue;
            }
            editor.add_history_entry(&text)?;
            self.messages.push(Message::new("user", text.as_str()));
            self.turn(session, &mut answering, &mut sequence, &text)?;
        }
    }

    fn turn<B: DecoderBackend>(
        &mut self,
        session: &mut Session<B>,
        answering: &mut Answering<'_>,
        sequence: &mut SequenceId,
        text: &str,
    ) -> Result<()> {
        let encode = |text: &str| answering.tokenizer.encode(text, false, true);
        let tokens = if self.restored {
            [&self.cached[..], &encode(&next_turn(&self.template, text)?)?].concat()
        } else {
            encode(&self.template.render(&self.messages, true)?)?
        };
        if !tokens.starts_with(&self.cached) || tokens.len() == self.cached.len() {
            // The template rewrites earlier turns, or the text tokenizes differently: start over.
            session.state_mut().remove(*sequence)?;
            *sequence = session.create_sequence()?;
            self.cached.clear();
        }
        if tokens.len() >= answering.context {
            let full = format!(
                "the conversation of {} tokens no longer fits the context of {}",
                tokens.len(),
                answering.context
            );
            if self.file.is_some() {
                bail!("{full}; the session is saved up to the last answer");
            }
            eprintln!("{full}; starting anew");
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
        if let Some(file) = &self.file {
            self.saved = Some(file.save(session, *sequence, &self.cached)?);
        }
        Ok(())
    }
}
