//! Checks of the Markdown files: links lead somewhere, and the book lists every page.

use crate::report::{Check, Problem};
use crate::shell::root;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Checks every Markdown file of the repository's root, of `tools` and of the book.
pub(crate) fn check() -> Check {
    let book = root().join("docs/src");
    let mut files = markdown(root(), false)?;
    files.extend(markdown(&root().join("tools"), false)?);
    let pages = markdown(&book, true)?;
    files.extend(pages.iter().cloned());

    let mut errors = Vec::new();
    let mut links = 0;
    for file in &files {
        let text = read(file)?;
        for target in targets(&text) {
            links += 1;
            if let Err(error) = resolve(file, &target) {
                errors.push(format!("{}: {error}", shown(file)));
            }
        }
    }
    let summary = book.join("SUMMARY.md");
    let listed: BTreeSet<PathBuf> =
        targets(&read(&summary)?).iter().map(|target| normal(&book.join(target))).collect();
    for page in pages.iter().filter(|page| **page != summary && !listed.contains(*page)) {
        errors.push(format!("{} is not in SUMMARY.md", shown(page)));
    }
    if errors.is_empty() {
        return Ok(format!("{links} links in {} files", files.len()));
    }
    for error in &errors {
        println!("{error}");
    }
    Err(Problem::failed(format!("{} broken links or unlisted pages", errors.len())))
}

fn read(file: &Path) -> Result<String, Problem> {
    fs::read_to_string(file)
        .map_err(|error| Problem::failed(format!("cannot read {}: {error}", shown(file))))
}

fn shown(file: &Path) -> String {
    file.strip_prefix(root()).unwrap_or(file).display().to_string()
}

/// The Markdown files of a folder, sorted.
fn markdown(folder: &Path, recursive: bool) -> Result<Vec<PathBuf>, Problem> {
    let fail = |error| Problem::failed(format!("cannot list {}: {error}", shown(folder)));
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).map_err(fail)? {
        let path = entry.map_err(fail)?.path();
        if path.is_dir() {
            if recursive {
                files.extend(markdown(&path, true)?);
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

/// Checks one link target of `file`: the file it names exists, and so does the heading.
fn resolve(file: &Path, target: &str) -> Result<(), String> {
    let external = ["http://", "https://", "mailto:"];
    if external.iter().any(|scheme| target.starts_with(scheme)) {
        return Ok(());
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let folder = file.parent().unwrap_or(file);
    let path = if path.is_empty() { file.to_owned() } else { normal(&folder.join(path)) };
    if !path.exists() {
        return Err(format!("link to {target}: no such file"));
    }
    if !path.starts_with(root()) {
        return Err(format!("link to {target}: outside the repository"));
    }
    if anchor.is_empty() {
        return Ok(());
    }
    let text = fs::read_to_string(&path).map_err(|error| format!("link to {target}: {error}"))?;
    if prose(&text).any(|line| line.starts_with('#') && slug(line) == anchor) {
        Ok(())
    } else {
        Err(format!("link to {target}: no such heading"))
    }
}

/// `path` without `.` and `..`, by the text alone.
fn normal(path: &Path) -> PathBuf {
    let mut result = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                result.pop();
            }
            other => result.push(other),
        }
    }
    result
}

/// The anchor mdBook and code forges give a heading.
fn slug(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// The lines outside fenced code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// Targets of inline links and images `[text](target)`, reference definitions `[name]: target` and
/// mdBook includes.
fn targets(text: &str) -> Vec<String> {
    let mut targets = Vec::new();
    let inside_fences_too = text.split("{{#include ").skip(1);
    targets.extend(inside_fences_too.filter_map(|rest| {
        let (target, _) = rest.split_once("}}")?;
        target.split(':').next().map(|path| path.trim().to_owned())
    }));
    for line in prose(text) {
        // Odd pieces lie between backticks.
        let line: String = line.split('`').step_by(2).collect();
        if let Some((name, target)) = line.split_once("]: ")
            && name.starts_with('[')
        {
            targets.extend(target.split_whitespace().next().map(str::to_owned));
        }
        for rest in line.split("](").skip(1) {
            let target = rest.split([')', ' ']).next().unwrap_or_default();
            targets.push(target.trim_matches(['<', '>']).to_owned());
        }
    }
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_links_outside_code() {
        let text = "See [a](x.md) and ![b](y.png \"title\").\n`[no](code)`\n\
                    ```\n[no](fenced)\n{{#include z.txt:5}}\n```\n[ref]: w.md#top\n";
        assert_eq!(targets(text), ["z.txt", "x.md", "y.png", "w.md#top"]);
    }

    #[test]
    fn slugs_are_those_of_mdbook() {
        assert_eq!(slug("## What a query sees"), "what-a-query-sees");
        assert_eq!(slug("# `kivi run`: options"), "kivi-run-options");
    }

    #[test]
    fn resolves_files_and_headings() {
        let page = root().join("page.md");
        assert_eq!(resolve(&page, "xtask/src/docs.rs"), Ok(()));
        assert_eq!(resolve(&page, "https://example.org/nowhere"), Ok(()));
        assert!(resolve(&page, "no/such/file.md").unwrap_err().contains("no such file"));
        assert!(resolve(&page, "..").unwrap_err().contains("outside"));
        assert!(resolve(&page, "Cargo.toml#no-such").unwrap_err().contains("no such heading"));
    }

    #[test]
    fn removes_dots_from_paths() {
        assert_eq!(normal(Path::new("/a/b/../c/./d")), Path::new("/a/c/d"));
    }
}
