//! Progress of a download: on the terminal, and for whoever watches that it does not stall.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Counts bytes and shows them on standard error, if that is a terminal.
#[derive(Clone)]
pub(super) struct Meter {
    bar: ProgressBar,
    events: Arc<AtomicU64>,
}

impl Meter {
    /// A meter for `bytes` bytes, or for work of unknown length.
    pub(super) fn new(what: &str, bytes: Option<u64>, visible: bool) -> Self {
        // indicatif draws nothing on standard error that is not a terminal.
        let target =
            if visible { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(bytes, target).with_message(what.to_owned());
        let template = match bytes {
            Some(_) => "{msg} [{wide_bar}] {bytes}/{total_bytes} ({eta})",
            None => "{spinner} {msg} {elapsed}",
        };
        // The templates are constant; indicatif's own is the fallback.
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        if bytes.is_none() {
            bar.enable_steady_tick(Duration::from_millis(200));
        }
        Self { bar, events: Arc::default() }
    }

    /// A meter that is not shown.
    #[cfg(test)]
    pub(super) fn hidden() -> Self {
        Self::new("", None, false)
    }

    /// `bytes` more have arrived.
    pub(super) fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
        self.events.fetch_add(1, Ordering::Relaxed);
    }

    /// A number that changes with every sign of life.
    pub(super) fn events(&self) -> u64 {
        self.events.load(Ordering::Relaxed)
    }

    /// Takes the bar off the terminal.
    pub(super) fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

impl hf_hub::api::Progress for Meter {
    fn init(&mut self, size: usize, _: &str) {
        self.bar.reset();
        self.bar.set_length(size as u64);
    }

    fn update(&mut self, size: usize) {
        self.advance(size as u64);
    }

    fn finish(&mut self) {
        self.clear();
    }
}
