//! The forms of a model's name.

use super::known::{KNOWN_MODELS, KnownModel};
use crate::error::quoted;
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// What a model's name refers to.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A file or directory that exists.
    Path(PathBuf),
    /// A model known by name.
    Known(&'static KnownModel),
    /// A repository of the Hugging Face Hub.
    Hub {
        /// `org/model`.
        repository: String,
        /// Branch, tag or commit; `main` if not given.
        revision: String,
        /// The one file wanted, or none for the whole model in safetensors.
        file: Option<String>,
    },
}

impl ModelSource {
    /// Reads a name: an existing path, the name of a known model, `org/model[@revision]`, or
    /// `org/model[@revision]:FILE.gguf`. An existing path comes first.
    ///
    /// # Errors
    /// [`Error::UnknownModel`] when it is none of these.
    pub fn parse(name: &str) -> Result<Self> {
        let path = Path::new(name);
        if !name.is_empty() && path.exists() {
            return Ok(Self::Path(path.to_owned()));
        }
        if let Some(model) = KNOWN_MODELS.iter().find(|model| model.name == name) {
            return Ok(Self::Known(model));
        }
        hub(name).ok_or_else(|| Error::UnknownModel {
            name: quoted(name),
            known: KNOWN_MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", "),
        })
    }
}

/// `org/model[@revision][:FILE.gguf]`, of characters that are safe in URLs and paths.
fn hub(name: &str) -> Option<ModelSource> {
    let (rest, file) = match name.split_once(':') {
        Some((rest, file)) => (rest, Some(file)),
        None => (name, None),
    };
    let (repository, revision) = rest.split_once('@').unwrap_or((rest, "main"));
    let mut parts = repository.split('/');
    let valid = parts.clone().count() == 2
        && parts.all(is_segment)
        // Without a colon that is a path to a file that does not exist.
        && !is_model_file(repository)
        && revision.split('/').all(is_segment)
        && file.is_none_or(|file| file.ends_with(".gguf") && file.split('/').all(is_segment));
    valid.then(|| ModelSource::Hub {
        repository: repository.to_owned(),
        revision: revision.to_owned(),
        file: file.map(str::to_owned),
    })
}

/// Whether `text` can be one segment of a path: not empty, not hidden, not `..`, no odd characters.
pub(super) fn is_segment(text: &str) -> bool {
    let valid = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    !text.is_empty() && text.len() <= 200 && !text.starts_with('.') && text.chars().all(valid)
}

fn is_model_file(name: &str) -> bool {
    [".gguf", ".safetensors", ".bin", ".json"].iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(name: &str) -> Option<(String, String, Option<String>)> {
        match ModelSource::parse(name).ok()? {
            ModelSource::Hub { repository, revision, file } => Some((repository, revision, file)),
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn hub_names_have_a_revision_and_a_file() {
        let parts = |r: &str, v: &str, f: Option<&str>| {
            Some((r.to_owned(), v.to_owned(), f.map(str::to_owned)))
        };
        assert_eq!(hub("org/my.model-1"), parts("org/my.model-1", "main", None));
        assert_eq!(hub("o/m@refs/pr/1"), parts("o/m", "refs/pr/1", None));
        assert_eq!(hub("o/m:a/b.Q4_1.gguf"), parts("o/m", "main", Some("a/b.Q4_1.gguf")));
        assert_eq!(hub("o/m@v1:x.gguf"), parts("o/m", "v1", Some("x.gguf")));
    }

    #[test]
    fn odd_names_are_unknown() {
        for name in [
            "",
            "model",
            "a/b/c",
            "/etc/nothing",
            "../x",
            "o/..",
            "o/m@",
            "o/m@a..b/../c",
            "o/m:",
            "o/m:x.bin",
            "o/m:../x.gguf",
            "o/m:/x.gguf",
            "models/x.gguf",
            "o/m n",
            "o/m?x",
            "o/m:a//b.gguf",
            "./m",
            "o\\m",
            "https://example.org/x",
        ] {
            assert!(matches!(ModelSource::parse(name), Err(Error::UnknownModel { .. })), "{name}");
        }
        let error = ModelSource::parse("nope\n").unwrap_err().to_string();
        assert_eq!(
            error,
            "no model \"nope\\n\": not a path that exists, not a known name (smollm2-135m), and not \
             of the form org/model[@revision] or org/model[@revision]:FILE.gguf"
        );
    }

    #[test]
    fn paths_and_known_names() {
        assert!(
            matches!(ModelSource::parse("src").unwrap(), ModelSource::Path(p) if p == Path::new("src"))
        );
        assert!(matches!(ModelSource::parse("smollm2-135m").unwrap(), ModelSource::Known(_)));
    }
}
