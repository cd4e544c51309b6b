//! Drafting by prompt lookup: what followed the last time the newest tokens occurred.
//!
//! After `PromptLookupCandidateGenerator` of Hugging Face transformers; the model verifies a draft in
//! one step, and whatever it would not have chosen itself is taken back.

use crate::{Error, Result};

/// Options of prompt lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lookup {
    /// Tokens proposed at once. The cache's rollback length must be at least as large.
    pub draft_tokens: usize,
    /// Longest run of newest tokens to look for; shorter ones are tried after it.
    pub max_match: usize,
    /// Shortest run to look for.
    pub min_match: usize,
}

impl Default for Lookup {
    fn default() -> Self {
        Self { draft_tokens: 8, max_match: 4, min_match: 2 }
    }
}

impl Lookup {
    pub(crate) fn check(&self, rollback: usize) -> Result<()> {
        if self.draft_tokens == 0 || self.draft_tokens > rollback {
            let allowed = format!("1 up to the cache's rollback length {rollback}");
            return Err(Error::option("draft_tokens", self.draft_tokens, &allowed));
        }
        if self.min_match == 0 || self.min_match > self.max_match {
            let allowed = format!("1 up to max_match {}", self.max_match);
            return Err(Error::option("min_match", self.min_match, &allowed));
        }
        Ok(())
    }

    /// What followed the latest earlier occurrence of the longest matching end of `tokens`, at most
    /// `limit` tokens. Where that runs into the end of the text, the text repeats itself, and so does
    /// the draft.
    pub(crate) fn draft(&self, tokens: &[u32], limit: usize) -> Vec<u32> {
        let n = tokens.len();
        for length in (self.min_match..=self.max_match.min(n.saturating_sub(1))).rev() {
            let end = &tokens[n - length..];
            let found = (0..n - length).rev().find(|&at| &tokens[at..at + length] == end);
            if let Some(at) = found {
                let repeating = tokens[at + length..].iter().copied().cycle();
                return repeating.take(self.draft_tokens.min(limit)).collect();
            }
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_match_wins_and_of_equals_the_latest() {
        let lookup = Lookup { draft_tokens: 3, max_match: 3, min_match: 1 };
        // "1 2 3" occurred at the start, "3" alone later.
        assert_eq!(lookup.draft(&[1, 2, 3, 4, 5, 3, 9, 1, 2, 3], 8), [4, 5, 3]);
        assert_eq!(lookup.draft(&[3, 4, 5, 3, 9, 7, 3], 8), [9, 7, 3]);
        assert_eq!(lookup.draft(&[3, 4, 5, 3, 9, 7, 3], 1), [9]);
        assert!(lookup.draft(&[1, 2, 3], 8).is_empty());
        assert!(lookup.draft(&[7], 8).is_empty());
        assert!(lookup.draft(&[], 8).is_empty());
        // A text with a period of 1, and one of 2.
        assert_eq!(lookup.draft(&[5, 5, 5, 5], 8), [5, 5, 5]);
        assert_eq!(lookup.draft(&[1, 8, 9, 8, 9], 8), [8, 9, 8]);
    }

    #[test]
    fn options_are_checked() {
        let default = Lookup::default();
        assert!(default.check(8).is_ok());
        let error = default.check(4).unwrap_err().to_string();
        assert_eq!(error, "invalid draft_tokens: 8 (1 up to the cache's rollback length 4)");
        assert!(Lookup { min_match: 5, ..default }.check(8).is_err());
        assert!(Lookup { min_match: 0, ..default }.check(8).is_err());
    }
}
