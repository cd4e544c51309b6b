//! Generating text, token by token.

use crate::{
    Result,
    sampling::Sampler,
    session::Session,
    text::{StopMatcher, TokenStream},
    tokenizer::Tokenizer,
};
use kivi_core::{DecoderBackend, SequenceId};

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token or a stop string.
    Stop,
    /// As many tokens as asked for, or the end of the context.
    Length,
    /// The receiver of the text wanted no more.
    Cancelled,
}

/// What a generation produced.
#[derive(Clone, Debug)]
pub struct Generated {
    /// The text, without the stop string.
    pub text: String,
    /// The tokens, without the stop token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// How to turn logits into text.
#[derive(Debug)]
pub struct Decoding<'a> {
    /// Turns tokens into text.
    pub tokenizer: &'a Tokenizer,
    /// Chooses tokens.
    pub sampler: &'a mut Sampler,
    /// Watches for the end.
    pub stop: StopMatcher,
    /// Tokens that are never chosen, such as those that would end a text too early.
    pub forbidden: &'a [u32],
    /// At most so many tokens.
    pub max_tokens: usize,
}

impl<B: DecoderBackend> Session<B> {
    /// Continues a sequence from `logits`, those after its last token.
    ///
    /// `history` holds the tokens the repetition penalty looks at, and is extended. `on_text` gets
    /// each piece of text as soon as it is certain and returns whether to go on.
    ///
    /// Every token is appended to the cache, the last one included, unless something stopped the
    /// generation: then the token that did is not.
    ///
    /// # Errors
    /// When logits are not numbers, the pool is full or the backend fails.
    pub fn generate(
        &mut self,
        sequence: SequenceId,
        mut logits: Vec<f32>,
        history: &mut Vec<u32>,
        decoding: Decoding<'_>,
        mut on_text: impl FnMut(&str) -> bool,
    ) -> Result<Generated> {
        let Decoding { tokenizer, sampler, mut stop, forbidden, max_tokens } = decoding;
        let mut stream = TokenStream::continuing(tokenizer, true);
        let mut generated =
            Generated { text: String::new(), tokens: Vec::new(), finish: FinishReason::Length };
        while generated.tokens.len() < max_tokens {
            for &token in forbidden {
                if let Some(logit) = logits.get_mut(token as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
            let token = sampler.sample(&mut logits, history)?;
            if stop.is_stop_token(token) {
                generated.finish = FinishReason::Stop;
                break;
            }
            generated.tokens.push(token);
            history.push(token);
            let piece = stop.push(&stream.push(token));
            generated.text.push_str(&piece.text);
            let wanted = piece.text.is_empty() || on_text(&piece.text);
            if piece.stop_string.is_some() {
                generated.finish = FinishReason::Stop;
                return Ok(generated);
            }
            if !wanted {
                generated.finish = FinishReason::Cancelled;
                return Ok(generated);
            }
            logits = self.generate_step(&[(sequence, &[token])])?;
        }
        let piece = stop.push(&stream.finish());
        let rest = piece.text + &stop.finish();
        if !rest.is_empty() {
            generated.text.push_str(&rest);
            on_text(&rest);
        }
        Ok(generated)
    }
}
