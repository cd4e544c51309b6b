//! SentencePiece's byte-pair encoding, expressed as merges.

use std::cmp::Reverse;
use std::collections::HashMap;

/// The merges that a vocabulary of scored pieces implies: SentencePiece joins the neighbours whose
/// union has the highest score, so every way to split a piece into two pieces is a merge, ordered by
/// the score of the whole.
///
/// `pieces` are `(piece, id, score)` of the ordinary pieces only; scores are not NaN. Among equal
/// scores the longer left half goes first and then the longer right half, as transformers'
/// converter (`generate_merges` in `convert_slow_tokenizer.py`) has it.
pub(super) fn merges(pieces: &[(&str, u32, f32)]) -> Vec<(String, String)> {
    let id_of: HashMap<&str, u32> = pieces.iter().map(|&(piece, id, _)| (piece, id)).collect();
    let mut merges = Vec::new();
    for &(piece, id, score) in pieces {
        let chars = piece.chars().count();
        for (left_chars, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if let (Some(&l), Some(&r)) = (id_of.get(left), id_of.get(right)) {
                let halves = (Reverse(left_chars), Reverse(chars - left_chars));
                merges.push((score, (halves, id, l, r), left, right));
            }
        }
    }
    merges.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    merges.into_iter().map(|(_, _, left, right)| (left.to_owned(), right.to_owned())).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn higher_scores_merge_first_and_every_split_counts() {
        let pieces =
            [("a", 0, -9.0), ("b", 1, -9.0), ("ab", 2, -2.0), ("ba", 3, -1.0), ("aba", 4, -3.0)];
        let expected = [("b", "a"), ("a", "b"), ("ab", "a"), ("a", "ba")];
        let merges = super::merges(&pieces);
        assert!(merges.iter().map(|(l, r)| (l.as_str(), r.as_str())).eq(expected), "{merges:?}");
    }
}
