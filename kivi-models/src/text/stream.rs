//! Detokenization of a growing sequence.

use crate::tokenizer::Tokenizer;

/// Turns tokens into text as they come, and never emits part of a character.
///
/// A character may span several tokens, so [`push`](Self::push) returns only what is complete and
/// [`finish`](Self::finish) the rest. All the pieces together equal [`Tokenizer::decode`] of the
/// whole sequence.
#[derive(Clone, Debug)]
pub struct TokenStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    /// The first byte is still to come, and a space there is the tokenizer's own.
    strip_space: bool,
    /// At most the first 3 bytes of a character of up to 4.
    pending: Vec<u8>,
}

impl TokenStream {
    /// A stream whose first token begins a text, so that the space SentencePiece puts before the
    /// first word is dropped. `skip_special` leaves special tokens out.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        let strip_space = tokenizer.strips_leading_space();
        Self { tokenizer: tokenizer.clone(), skip_special, strip_space, pending: Vec::new() }
    }

    /// A stream that goes on after other text, so that a leading space is text.
    pub fn continuing(tokenizer: &Tokenizer, skip_special: bool) -> Self {
        Self { strip_space: false, ..Self::new(tokenizer, skip_special) }
    }

    /// The text that `id` completes, possibly none. An id without a token reads as U+FFFD.
    pub fn push(&mut self, id: u32) -> String {
        let Self { tokenizer, skip_special, strip_space, pending } = self;
        let mut bytes = tokenizer.bytes_to_decode(id, *skip_special);
        if *strip_space && !bytes.is_empty() {
            *strip_space = false;
            bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
        }
        pending.extend_from_slice(bytes);
        let complete = complete_len(pending);
        let text = String::from_utf8_lossy(&pending[..complete]).into_owned();
        pending.drain(..complete);
        text
    }

    /// The end of the sequence: U+FFFD if the last character is incomplete, else nothing.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.pending);
        String::from_utf8_lossy(&rest).into_owned()
    }
}

/// How many leading bytes no later byte can change the meaning of: all but the valid beginning of
/// an unfinished character.
fn complete_len(bytes: &[u8]) -> usize {
    // Only the last three bytes can begin an unfinished character.
    let tail = bytes.len().saturating_sub(3);
    (tail..bytes.len())
        .find(|&at| {
            let rest = &bytes[at..];
            !is_continuation(rest[0])
                && matches!(std::str::from_utf8(rest), Err(e) if e.valid_up_to() == 0 && e.error_len().is_none())
        })
        .unwrap_or(bytes.len())
}

fn is_continuation(byte: u8) -> bool {
    byte & 0xC0 == 0x80
}
