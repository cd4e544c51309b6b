//! Scores of a generated text against a reference, from 0 to 1.

use std::collections::HashMap;

/// Words of a text as SQuAD's metric takes them (arXiv 1606.05250): lower case, without punctuation
/// and articles.
fn words(text: &str) -> Vec<String> {
    let kept: String = text.to_lowercase().chars().filter(|c| !c.is_ascii_punctuation()).collect();
    let article = |word: &&str| !matches!(*word, "a" | "an" | "the");
    kept.split_whitespace().filter(article).map(String::from).collect()
}

/// Whether the words are the same.
pub(super) fn exact_match(answer: &str, reference: &str) -> f64 {
    f64::from(u8::from(words(answer) == words(reference)))
}

/// Harmonic mean of precision and recall of the words, as a bag.
pub(super) fn f1(answer: &str, reference: &str) -> f64 {
    let (answer, reference) = (words(answer), words(reference));
    if answer.is_empty() || reference.is_empty() {
        return f64::from(u8::from(answer == reference));
    }
    let mut counts: HashMap<&str, usize> = HashMap::new();
    for word in &reference {
        *counts.entry(word).or_default() += 1;
    }
    let mut same = 0;
    for word in &answer {
        if let Some(count) = counts.get_mut(word.as_str()).filter(|count| **count > 0) {
            *count -= 1;
            same += 1;
        }
    }
    harmonic(same, answer.len(), reference.len())
}

/// ROUGE-L: harmonic mean of precision and recall of the longest common subsequence of words
/// (Lin 2004), over the text as one sentence.
pub(super) fn rouge_l(answer: &str, reference: &str) -> f64 {
    let split = |text: &str| -> Vec<String> {
        text.to_lowercase().split_whitespace().map(String::from).collect()
    };
    let (answer, reference) = (split(answer), split(reference));
    harmonic(common_subsequence(&answer, &reference), answer.len(), reference.len())
}

/// `2 · common / (|a| + |b|)` of the longest common subsequence of characters.
pub(super) fn similarity(answer: &str, reference: &str) -> f64 {
    let (a, b): (Vec<char>, Vec<char>) = (answer.chars().collect(), reference.chars().collect());
    if a.is_empty() && b.is_empty() {
        return 1.0;
    }
    harmonic(common_subsequence(&a, &b), a.len(), b.len())
}

/// `2PR / (P + R)` with `P = same / found` and `R = same / expected`.
fn harmonic(same: usize, found: usize, expected: usize) -> f64 {
    if same == 0 { 0.0 } else { 2.0 * same as f64 / (found + expected) as f64 }
}

/// Length of the longest common subsequence.
fn common_subsequence<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    let mut lengths = vec![0; b.len() + 1];
    for x in a {
        let mut diagonal = 0;
        for (j, y) in b.iter().enumerate() {
            let above = lengths[j + 1];
            lengths[j + 1] = if x == y { diagonal + 1 } else { above.max(lengths[j]) };
            diagonal = above;
        }
    }
    lengths[b.len()]
}

/// The last number of a text, without thousands separators and a trailing full stop.
pub(super) fn last_number(text: &str) -> Option<f64> {
    let numeric = |c: char| c.is_ascii_digit() || matches!(c, '.' | ',' | '-');
    let parts = text.split(|c: char| !numeric(c)).rev();
    let number = |part: &str| {
        let part = part.replace(',', "");
        let part = part.trim_end_matches(['.', '-']);
        // A range or a sum without spaces: what follows the last minus sign.
        part.parse().ok().or_else(|| part.rsplit('-').next()?.parse().ok())
    };
    parts.filter(|part| part.contains(|c: char| c.is_ascii_digit())).find_map(number)
}

/// The best score over several references; 0 without any.
pub(super) fn best(references: &[String], score: impl Fn(&str) -> f64) -> f64 {
    references.iter().map(|reference| score(reference)).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_compared_without_case_articles_and_punctuation() {
        assert_eq!(exact_match("The  Cat!", "cat"), 1.0);
        assert_eq!(exact_match("two cats", "cat"), 0.0);
        // Precision 1/2, recall 1/3.
        assert!((f1("a white cat", "cat sat there") - 0.4).abs() < 1e-12);
        // A word counts as often as the reference has it.
        assert!((f1("cat cat", "cat") - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!((f1("", "cat"), f1("the", "a")), (0.0, 1.0));
    }

    #[test]
    fn subsequences() {
        // "police killed the gunman" and "police kill the gunman" have 3 of 4 words in order.
        assert_eq!(rouge_l("police kill the gunman", "police killed the gunman"), 0.75);
        assert_eq!(rouge_l("the gunman kill police", "police killed the gunman"), 0.5);
        assert_eq!(rouge_l("", "x"), 0.0);
        assert!((similarity("abcd", "bd") - 4.0 / 6.0).abs() < 1e-12);
        assert_eq!(similarity("", ""), 1.0);
    }

    #[test]
    fn numbers_at_the_end() {
        assert_eq!(last_number("#### 1,234"), Some(1234.0));
        assert_eq!(last_number("it is $3.50."), Some(3.5));
        assert_eq!(last_number("minus -7 then"), Some(-7.0));
        assert_eq!(last_number("5-3"), Some(3.0));
        assert_eq!(last_number("none . - ,"), None);
    }

    #[test]
    fn the_best_reference_counts() {
        let references = ["dog".to_string(), "cat".to_string()];
        assert_eq!(best(&references, |reference| exact_match("cat", reference)), 1.0);
        assert_eq!(best(&[], |_| 1.0), 0.0);
    }
}
