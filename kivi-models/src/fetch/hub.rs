//! The Hugging Face Hub.

mod snapshot;

use super::Attempt;
use super::cache::verify;
use super::context::{Context, HubSettings};
use super::known::KnownModel;
use super::name::is_segment;
use super::network::{probe, supervised};
use super::progress::Meter;
use crate::error::one_line;
use crate::{Error, Result};
use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo, Metadata};
use hf_hub::{Cache, Repo, RepoType};
use std::fs;
use std::path::PathBuf;

/// A known model in the Hub's local cache, verified.
pub(super) fn known_model_here(model: &KnownModel, context: &Context) -> Option<PathBuf> {
    let cache = Cache::new(context.hub.cache_dir.clone());
    model.repositories.iter().find_map(|repository| {
        let path = cache.model((*repository).to_owned()).get(model.file)?;
        match verify(&path, model) {
            Ok(()) => Some(path),
            Err(reason) => {
                tracing::warn!("{repository} in the Hub's cache is passed over: {reason}");
                None
            }
        }
    })
}

/// Downloads a known model from the first repository that has exactly this file.
pub(super) fn known_model(
    model: &KnownModel,
    context: &Context,
    attempts: &mut Vec<Attempt>,
) -> Option<PathBuf> {
    if let Err(reason) = probe(&context.hub) {
        attempts.push(Attempt { source: context.hub.endpoint.clone(), reason });
        return None;
    }
    for repository in model.repositories {
        let meter = Meter::new(model.file, Some(model.bytes), context.progress);
        let (hub, model, name) = (context.hub.clone(), *model, (*repository).to_owned());
        let stall = hub.stall_timeout;
        let found = supervised(stall, &meter, move |meter| {
            let api = api(&hub)?;
            let repo = api.model(name);
            let offered = metadata(&api, &repo, model.file)?;
            meter.advance(0);
            // For large files the entity tag is the SHA-256 of the content.
            if offered.size() as u64 != model.bytes || offered.etag() != model.sha256 {
                let (size, etag) = (offered.size(), one_line(offered.etag()));
                return Err(format!("offers another file of {size} bytes, SHA-256 {etag}"));
            }
            let path = download(&repo, model.file, meter)?;
            verify(&path, &model).map(|()| path)
        });
        match found {
            Ok(path) => return Some(path),
            Err(reason) => {
                tracing::info!("{repository} is passed over: {reason}");
                attempts.push(Attempt { source: format!("Hub repository {repository}"), reason });
            }
        }
    }
    None
}

/// One file of a repository, or the directory with a whole model.
pub(super) fn repository(
    repository: &str,
    revision: &str,
    file: Option<&str>,
    context: &Context,
) -> Result<PathBuf> {
    let repo = Repo::with_revision(repository.to_owned(), RepoType::Model, revision.to_owned());
    let cached = Cache::new(context.hub.cache_dir.clone()).repo(repo.clone());
    let here = match file {
        Some(file) => cached.get(file),
        None => snapshot::complete(&cached),
    };
    if let Some(path) = here {
        // What was fetched once is used as it is; another revision is another name.
        tracing::info!("using {} from the Hub's cache", path.display());
        return Ok(path);
    }
    let name = match file {
        Some(file) => format!("{repository}@{revision}:{file}"),
        None => format!("{repository}@{revision}"),
    };
    if context.offline {
        return Err(Error::OfflineHub { name, cache: context.hub.cache_dir.clone() });
    }
    let fail = |reason| Error::Unavailable {
        name: name.clone(),
        attempts: vec![Attempt { source: context.hub.endpoint.clone(), reason }],
    };
    probe(&context.hub).map_err(fail)?;
    let meter = Meter::new(&name, Some(0), context.progress);
    let (hub, file) = (context.hub.clone(), file.map(str::to_owned));
    let stall = hub.stall_timeout;
    supervised(stall, &meter, move |meter| {
        let api = api(&hub)?;
        match file {
            Some(file) => fetch_file(&api, &api.repo(repo), &file, meter),
            None => snapshot::fetch(&api, &Cache::new(hub.cache_dir), &repo, &meter),
        }
    })
    .map_err(fail)
}

fn api(hub: &HubSettings) -> Result<Api, String> {
    let cache = Cache::new(hub.cache_dir.clone());
    let token = hub.token.clone().or_else(|| cache.token());
    ApiBuilder::from_cache(cache)
        .with_endpoint(hub.endpoint.clone())
        .with_token(token)
        .with_retries(2)
        .build()
        .map_err(explain)
}

/// Length and entity tag of a file, which the client will use as part of a path.
fn metadata(api: &Api, repo: &ApiRepo, file: &str) -> Result<Metadata, String> {
    let metadata = api.metadata(&repo.url(file)).map_err(explain)?;
    if !is_segment(metadata.etag()) || !is_segment(metadata.commit_hash()) {
        return Err(format!("odd entity tag or commit for {file}"));
    }
    Ok(metadata)
}

/// Downloads one file and checks that it is whole.
fn fetch_file(api: &Api, repo: &ApiRepo, file: &str, meter: Meter) -> Result<PathBuf, String> {
    let expected = metadata(api, repo, file)?.size() as u64;
    meter.advance(0);
    let path = download(repo, file, meter)?;
    let length = fs::metadata(&path).map_err(|error| error.to_string())?.len();
    if length != expected {
        return Err(format!("{file} has {length} bytes, expected {expected}"));
    }
    Ok(path)
}

fn download(repo: &ApiRepo, file: &str, meter: Meter) -> Result<PathBuf, String> {
    repo.download_with_progress(file, meter).map_err(explain)
}

fn explain(error: hf_hub::api::sync::ApiError) -> String {
    let text = one_line(&error.to_string());
    match text.as_str() {
        text if text.contains("http status: 401") || text.contains("http status: 403") => {
            format!("{text} (private, gated or not there; HF_TOKEN may help)")
        }
        text if text.contains("http status: 404") => format!("{text} (not there)"),
        text => text.to_owned(),
    }
}
