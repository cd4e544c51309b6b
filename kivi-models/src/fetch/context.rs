//! Options and environment, read once.

use super::FetchOptions;
use crate::{Error, Result};
use std::env;
use std::path::PathBuf;
use std::time::Duration;

/// Everything a search depends on.
#[derive(Clone, Debug)]
pub(super) struct Context {
    pub(super) offline: bool,
    pub(super) cache_dir: PathBuf,
    pub(super) progress: bool,
    pub(super) python: PathBuf,
    pub(super) hub: HubSettings,
}

/// What the Hub's own tools read from the environment.
#[derive(Clone, Debug)]
pub(super) struct HubSettings {
    /// `HF_HUB_CACHE`, or `hub` in `HF_HOME`.
    pub(super) cache_dir: PathBuf,
    /// `HF_ENDPOINT`, without a slash at the end.
    pub(super) endpoint: String,
    /// The proxy that the HTTP client will use.
    pub(super) proxy: Option<String>,
    /// `HF_TOKEN`; without it the token that `hf auth login` stored is used.
    pub(super) token: Option<String>,
    /// How long to wait for a connection.
    pub(super) connect_timeout: Duration,
    /// How long to wait for the next bytes.
    pub(super) stall_timeout: Duration,
}

impl Context {
    pub(super) fn new(options: &FetchOptions) -> Result<Self> {
        let chosen = options.cache_dir.clone().or_else(|| path("KIVI_CACHE_DIR"));
        let platform = || dirs::cache_dir().map(|dir| dir.join("kivi").join("models"));
        let cache_dir = chosen.or_else(platform).ok_or(Error::NoCacheDir)?;
        let hub_home = path("HF_HOME").or_else(|| {
            let cache = path("XDG_CACHE_HOME").or_else(|| Some(dirs::home_dir()?.join(".cache")));
            Some(cache?.join("huggingface"))
        });
        let hub_cache = path("HF_HUB_CACHE").or_else(|| Some(hub_home?.join("hub")));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned());
        // The same variables in the same order as in ureq.
        let proxies =
            ["ALL_PROXY", "all_proxy", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"];
        Ok(Self {
            offline: options.offline || text("HF_HUB_OFFLINE").is_some_and(|value| is_true(&value)),
            progress: options.progress,
            python: options.python.clone(),
            hub: HubSettings {
                cache_dir: hub_cache.unwrap_or_else(|| cache_dir.join("hub")),
                endpoint: endpoint.trim_end_matches('/').to_owned(),
                proxy: proxies.into_iter().find_map(text),
                token: text("HF_TOKEN"),
                connect_timeout: options.hub_timeout,
                stall_timeout: Duration::from_secs(30),
            },
            cache_dir,
        })
    }
}

/// What `huggingface_hub` takes for true.
fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_uppercase().as_str(), "1" | "ON" | "YES" | "TRUE")
}

/// A variable that is set and not empty.
fn text(name: &str) -> Option<String> {
    env::var(name).ok().filter(|value| !value.is_empty())
}

fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}
