//! All files of one model in safetensors, at one commit.

use super::super::name::is_segment;
use super::super::progress::Meter;
use super::{explain, fetch_file};
use crate::error::{one_line, quoted};
use hf_hub::api::sync::Api;
use hf_hub::{Cache, CacheRepo, Repo, RepoType};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Without these there is no model.
const REQUIRED: [&str; 2] = ["config.json", "tokenizer.json"];

/// Taken along where a repository has them.
const OPTIONAL: [&str; 4] = [
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Which file holds which tensor.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

/// The directory of a snapshot that is in the cache with all its weights.
pub(super) fn complete(repo: &CacheRepo) -> Option<PathBuf> {
    for file in REQUIRED {
        repo.get(file)?;
    }
    match repo.get(INDEX) {
        Some(index) => {
            for shard in shards(&index).ok()? {
                repo.get(&shard)?;
            }
        }
        None => drop(repo.get(SINGLE)?),
    }
    Some(repo.get(REQUIRED[0])?.parent()?.to_owned())
}

/// Downloads what a model needs, all from the commit that `repo` points to now.
pub(super) fn fetch(
    api: &Api,
    cache: &Cache,
    repo: &Repo,
    meter: &Meter,
) -> Result<PathBuf, String> {
    let info = api.repo(repo.clone()).info().map_err(explain)?;
    meter.advance(0);
    let commit = info.sha;
    if commit.len() != 40 || !commit.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(format!("odd commit {}", quoted(&commit)));
    }
    let files: BTreeSet<&str> = info.siblings.iter().map(|file| file.rfilename.as_str()).collect();
    let weights = [INDEX, SINGLE].into_iter().find(|file| files.contains(file));
    let weights = weights.ok_or_else(|| no_weights(&files))?;
    if let Some(missing) = REQUIRED.iter().find(|file| !files.contains(*file)) {
        return Err(format!("the repository has no {missing}"));
    }
    // Its revision is the commit, so that all files belong together.
    let name = repo.url();
    let pinned = api.repo(Repo::with_revision(name, RepoType::Model, commit.clone()));
    let wanted = REQUIRED.into_iter().chain(OPTIONAL).filter(|file| files.contains(file));
    let mut config = None;
    for file in wanted {
        let path = fetch_file(api, &pinned, file, meter.clone())?;
        config = config.or(Some(path));
    }
    let weights = fetch_file(api, &pinned, weights, meter.clone())?;
    if weights.ends_with(INDEX) {
        for shard in shards(&weights)? {
            fetch_file(api, &pinned, &shard, meter.clone())?;
        }
    }
    // Last, so that the revision's name leads to a complete snapshot or to none.
    cache.repo(repo.clone()).create_ref(&commit).map_err(|error| error.to_string())?;
    let folder = config.as_deref().and_then(Path::parent).map(Path::to_owned);
    folder.ok_or_else(|| "the repository is empty".to_owned())
}

/// The files an index names; each must be a plain name.
fn shards(index: &Path) -> Result<BTreeSet<String>, String> {
    let json = fs::read(index).map_err(|error| format!("cannot read {INDEX}: {error}"))?;
    let index: Index = serde_json::from_slice(&json)
        .map_err(|error| format!("invalid {INDEX}: {}", one_line(&error.to_string())))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    match shards.iter().find(|shard| !is_segment(shard) || !shard.ends_with(".safetensors")) {
        Some(odd) => Err(format!("{INDEX} names the file {}", quoted(odd))),
        None => Ok(shards),
    }
}

/// Tells what else could be asked for.
fn no_weights(files: &BTreeSet<&str>) -> String {
    let gguf: Vec<&str> = files.iter().copied().filter(|file| file.ends_with(".gguf")).collect();
    if gguf.is_empty() {
        return format!("the repository has neither {SINGLE} nor {INDEX} nor a GGUF file");
    }
    let listed = gguf.iter().take(20).copied().collect::<Vec<_>>().join(", ");
    format!("the repository has GGUF files only; add one of them as :FILE.gguf ({listed})")
}
