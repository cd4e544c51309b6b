//! Stop tokens and stop strings.

use crate::{Error, Result};

/// Watches a sequence for the tokens and strings that end it.
///
/// The string that is completed first ends the text, and of several completed by the same character
/// the longest: a rule that does not depend on how the text is cut into chunks. Neither the stop
/// string nor anything after it is emitted; text that may yet turn out to be the beginning of one is
/// held back.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    tokens: Vec<u32>,
    strings: Vec<String>,
    /// The longest end of the text so far that begins a stop string.
    held: String,
    stopped: bool,
}

/// What [`StopMatcher::push`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Text that can be shown now.
    pub text: String,
    /// Index of the stop string that ended the sequence.
    pub stop_string: Option<usize>,
}

impl StopMatcher {
    /// A matcher for the given token ids and strings; both may be empty.
    ///
    /// # Errors
    /// [`Error::InvalidStop`] for an empty string, which would match everywhere.
    pub fn new(tokens: &[u32], strings: &[String]) -> Result<Self> {
        if let Some(index) = strings.iter().position(String::is_empty) {
            return Err(Error::InvalidStop { reason: format!("string {index} is empty") });
        }
        let (tokens, strings) = (tokens.to_vec(), strings.to_vec());
        Ok(Self { tokens, strings, held: String::new(), stopped: false })
    }

    /// Whether the token ends the sequence; its text is not part of the answer.
    pub fn is_stop_token(&self, id: u32) -> bool {
        self.tokens.contains(&id)
    }

    /// Takes the next piece of text. After a stop string, every call returns nothing.
    pub fn push(&mut self, text: &str) -> Stopped {
        if self.stopped {
            return Stopped { text: String::new(), stop_string: None };
        }
        let mut all = std::mem::take(&mut self.held);
        all.push_str(text);
        if let Some((start, index)) = self.first_stop(&all) {
            self.stopped = true;
            all.truncate(start);
            return Stopped { text: all, stop_string: Some(index) };
        }
        self.held = all.split_off(all.len() - self.longest_beginning(&all));
        Stopped { text: all, stop_string: None }
    }

    /// The text held back, when the sequence ends for another reason.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Start and index of the stop string completed first, the longest of equals.
    fn first_stop(&self, text: &str) -> Option<(usize, usize)> {
        let found = self.strings.iter().enumerate().filter_map(|(index, stop)| {
            let start = text.find(stop.as_str())?;
            Some((start + stop.len(), start, index))
        });
        found.min().map(|(_, start, index)| (start, index))
    }

    /// Bytes at the end of `text` that are a proper beginning of some stop string.
    fn longest_beginning(&self, text: &str) -> usize {
        let beginning = |stop: &String| {
            let longest = text.len().min(stop.len() - 1);
            (1..=longest).rev().find(|&n| text.as_bytes().ends_with(&stop.as_bytes()[..n]))
        };
        self.strings.iter().filter_map(beginning).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pushes the chunks; returns the text shown and the stop string found.
    fn run(stops: &[String], chunks: &[String]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(&[], stops).unwrap();
        let mut shown = String::new();
        for chunk in chunks {
            let Stopped { text, stop_string } = matcher.push(chunk);
            shown.push_str(&text);
            if stop_string.is_some() {
                assert_eq!(matcher.push("more").text, "");
                assert_eq!(matcher.finish(), "");
                return (shown, stop_string);
            }
        }
        shown.push_str(&matcher.finish());
        (shown, None)
    }

    /// Character by character: does the text so far end with a stop string?
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for end in text.char_indices().map(|(at, c)| at + c.len_utf8()) {
            let ended = (0..stops.len()).filter(|&i| text[..end].ends_with(stops[i].as_str()));
            if let Some(i) = ended.min_by_key(|&i| (std::cmp::Reverse(stops[i].len()), i)) {
                return (text[..end - stops[i].len()].to_owned(), Some(i));
            }
        }
        (text.to_owned(), None)
    }

    fn strings(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_stop_string_may_span_chunks() {
        let (stops, chunks) = (strings(&["\n\nUser:"]), strings(&["Hi.", "\n", "\nUs", "er: x"]));
        assert_eq!(run(&stops, &chunks), ("Hi.".into(), Some(0)));
    }

    #[test]
    fn only_what_may_become_a_stop_string_is_held_back() {
        let mut matcher = StopMatcher::new(&[2], &strings(&["<end>"])).unwrap();
        assert_eq!(matcher.push("a < b").text, "a < b");
        assert_eq!(matcher.push(" <en").text, " ");
        assert_eq!(matcher.push("try>").text, "<entry>");
        assert_eq!(matcher.push("<e").text, "");
        assert_eq!(matcher.finish(), "<e");
        assert!(matcher.is_stop_token(2) && !matcher.is_stop_token(3));
    }

    #[test]
    fn the_string_completed_first_wins_however_the_text_is_cut() {
        let stops = strings(&["abcd", "bc"]);
        assert_eq!(run(&stops, &strings(&["abcd"])), ("a".into(), Some(1)));
        assert_eq!(run(&stops, &strings(&["abc", "d"])), ("a".into(), Some(1)));
        assert_eq!(run(&strings(&["c", "bc"]), &strings(&["abcd"])), ("a".into(), Some(1)));
    }

    #[test]
    fn an_empty_stop_string_is_an_error() {
        let error = StopMatcher::new(&[], &strings(&["x", ""])).unwrap_err();
        assert_eq!(error.to_string(), "invalid stop sequence: string 1 is empty");
    }

    proptest! {
        #[test]
        fn agrees_with_the_naive_search(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            chunks in prop::collection::vec("[abé]{0,5}", 0..8),
        ) {
            prop_assert_eq!(run(&stops, &chunks), naive(&stops, &chunks.concat()));
        }
    }
}
