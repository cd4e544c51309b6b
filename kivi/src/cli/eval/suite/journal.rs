//! The answers of an evaluation, kept in a file so that an interrupted run can be resumed.

use super::{ALL, Answer, Scores};
use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::{
    collections::{BTreeMap, HashMap},
    fs::{File, OpenOptions},
    io::Write,
    path::{Path, PathBuf},
};

/// The answer to one question.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) id: String,
    pub(super) group: String,
    pub(super) scores: Scores,
    pub(super) answer: Answer,
}

/// All answers so far. The file has the settings in its first line and a record in each of the others.
pub(super) struct Journal {
    records: HashMap<String, Record>,
    file: Option<(PathBuf, File)>,
}

impl Journal {
    /// Opens or creates the file, if there is to be one. A last line that was cut off is dropped.
    ///
    /// # Errors
    /// When the file holds answers of another evaluation, or is not such a file.
    pub(super) fn open(path: Option<&Path>, header: &Value) -> Result<Self> {
        let mut records = HashMap::new();
        let Some(path) = path else { return Ok(Self { records, file: None }) };
        let name = path.display();
        let wrong = |error: std::io::Error| anyhow!("cannot write {name}: {error}");
        let text = match std::fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            Err(error) => bail!("cannot read {name}: {error}"),
        };
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].lines().enumerate();
        if let Some((_, first)) = lines.next() {
            let found: Value = serde_json::from_str(first)
                .map_err(|error| anyhow!("{name}, line 1 is not the settings of a run: {error}"))?;
            if found != *header {
                bail!(
                    "{name} holds the answers of another run: its settings are {found}, these are \
                     {header}"
                );
            }
        } else if !text.is_empty() && !header.to_string().starts_with(&text) {
            bail!("{name} is not a file of answers");
        }
        for (index, line) in lines {
            let record: Record = serde_json::from_str(line)
                .map_err(|error| anyhow!("{name}, line {}: {error}", index + 1))?;
            records.insert(record.id.clone(), record);
        }
        let mut options = OpenOptions::new();
        let mut file =
            options.create(true).append(true).truncate(false).open(path).map_err(wrong)?;
        file.set_len(whole as u64).map_err(wrong)?;
        if whole == 0 {
            writeln!(file, "{header}").map_err(wrong)?;
        }
        Ok(Self { records, file: Some((path.into(), file)) })
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.records.contains_key(id)
    }

    /// Marks an answer that is there already.
    pub(super) fn mark(&mut self, id: &str, mark: impl Fn(&Answer) -> Scores) {
        if let Some(record) = self.records.get_mut(id) {
            record.scores = mark(&record.answer);
        }
    }

    pub(super) fn add(&mut self, record: Record) -> Result<()> {
        if let Some((path, file)) = &mut self.file {
            // One write per line, so that an interruption cuts at most one line off.
            let line = serde_json::to_string(&record)? + "\n";
            file.write_all(line.as_bytes())
                .map_err(|error| anyhow!("cannot write {}: {error}", path.display()))?;
        }
        self.records.insert(record.id.clone(), record);
        Ok(())
    }

    /// Mean scores of the given questions, for each group and over all.
    pub(super) fn means(&self, ids: &[&str]) -> BTreeMap<String, Scores> {
        let mut sums: BTreeMap<String, BTreeMap<String, (f64, usize)>> = BTreeMap::new();
        for record in ids.iter().filter_map(|id| self.records.get(*id)) {
            for group in [record.group.as_str(), ALL] {
                let scores = sums.entry(group.into()).or_default();
                for (name, score) in &record.scores {
                    let sum = scores.entry(name.clone()).or_default();
                    *sum = (sum.0 + score, sum.1 + 1);
                }
            }
        }
        let mean = |(name, (sum, count)): (String, (f64, usize))| (name, sum / count as f64);
        sums.into_iter()
            .map(|(group, scores)| (group, scores.into_iter().map(mean).collect()))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn record(id: &str, group: &str, score: f64) -> Record {
        let answer = Answer::Text("x\ny".into());
        let scores = Scores::from([("exact".to_string(), score)]);
        Record { id: id.into(), group: group.into(), scores, answer }
    }

    #[test]
    fn an_interrupted_run_goes_on_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("answers.jsonl");
        let header = json!({"evaluation": "test"});
        let mut journal = Journal::open(Some(&path), &header).unwrap();
        journal.add(record("1", "a", 1.0)).unwrap();
        journal.add(record("2", "a", 0.0)).unwrap();
        drop(journal);
        // Cut off in the middle of the second record.
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 10]).unwrap();
        let mut journal = Journal::open(Some(&path), &header).unwrap();
        assert!(journal.has("1") && !journal.has("2"));
        journal.add(record("2", "b", 0.5)).unwrap();
        let means = Journal::open(Some(&path), &header).unwrap().means(&["1", "2"]);
        assert_eq!(means["a"]["exact"], 1.0);
        assert_eq!(means[ALL]["exact"], 0.75);
        let other = Journal::open(Some(&path), &json!({"evaluation": "else"}));
        assert!(other.err().unwrap().to_string().contains("another run"));
    }

    #[test]
    fn other_files_are_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notes.txt");
        for text in ["no newline", "two\nlines\n"] {
            std::fs::write(&path, text).unwrap();
            assert!(Journal::open(Some(&path), &json!({})).is_err());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
    }
}
