//! Answers all requests through an engine, and takes the time.

use super::workload::Planned;
use crate::cli::machine;
use anyhow::{Result, bail};
use kivi::{
    DecoderBackend,
    engine::{Engine, EngineStats, Error, Event, Events, FinishReason, Request},
};
use std::time::Instant;

/// What one run came to.
#[derive(Debug, Default)]
pub(super) struct Measured {
    /// Of each request.
    pub(super) answers: Vec<Vec<u32>>,
    /// From the arrival of the first request to the last token.
    pub(super) seconds: f64,
    /// From a request's arrival to its first token, in seconds, ascending.
    pub(super) first_token: Vec<f64>,
    /// From a token to the next of the same answer, ascending.
    pub(super) between: Vec<f64>,
    /// Sequences that held a cache, averaged over the time of the steps.
    pub(super) mean_batch: f64,
    /// Steps in which nothing but answers advanced.
    pub(super) decoding: Decoding,
    pub(super) stats: EngineStats,
    /// Resident memory of the process before the run, and the most during it.
    pub(super) resident: Option<(u64, u64)>,
}

/// Steps in which nothing but answers advanced.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Decoding {
    steps: u64,
    sequences: u64,
    tokens: u64,
    seconds: f64,
}

impl Decoding {
    /// Tokens per second, if there were such steps.
    pub(super) fn rate(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.tokens as f64 / self.seconds)
    }

    /// Sequences in a step, on average.
    pub(super) fn batch(&self) -> Option<f64> {
        (self.steps > 0).then(|| self.sequences as f64 / self.steps as f64)
    }

    /// Counts a step if every row was the newest token of an answer, or a draft after it.
    fn count(&mut self, before: &EngineStats, after: &EngineStats, seconds: f64) {
        let rows = after.computed_tokens - before.computed_tokens;
        let tokens = after.generated_tokens - before.generated_tokens;
        let drafted = after.drafted_tokens - before.drafted_tokens;
        let accepted = after.accepted_tokens - before.accepted_tokens;
        // Each sequence has one row that was not drafted and brings one token; a piece of a prompt
        // has more rows than it brings tokens.
        let sequences = rows.saturating_sub(drafted);
        if sequences > 0 && tokens == sequences + accepted {
            self.steps += 1;
            self.sequences += sequences;
            self.tokens += tokens;
            self.seconds += seconds;
        }
    }
}

/// A request under way.
struct Open {
    index: usize,
    events: Events,
    arrived: Instant,
    newest: Option<Instant>,
}

/// The engine's request for a planned one.
fn request(planned: &Planned, forbidden: &[u32]) -> Request {
    let mut request = Request::new(planned.prompt.clone(), planned.output);
    request.forbidden = forbidden.to_vec();
    request
}

/// Whether an engine like this can answer every request; otherwise the bytes that one needs.
pub(super) fn too_small<B: DecoderBackend>(
    mut engine: Engine<B>,
    requests: &[Planned],
) -> Result<Option<usize>> {
    let mut most = None;
    for planned in requests {
        match engine.submit(request(planned, &[])) {
            Ok(_) => {}
            Err(Error::TooLarge { needed, .. }) => most = most.max(Some(needed)),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(most)
}

/// Answers all requests. `finished` is called after every answer.
///
/// # Errors
/// When a request fails, or has an answer of another length than planned.
pub(super) fn serve<B: DecoderBackend>(
    engine: &mut Engine<B>,
    requests: &[Planned],
    forbidden: &[u32],
    finished: impl Fn(),
) -> Result<Measured> {
    let reset = machine::reset_peak_resident();
    let resident = machine::resident_bytes().filter(|_| reset).map(|(now, _)| now);
    let mut measured =
        Measured { answers: vec![Vec::new(); requests.len()], ..Measured::default() };
    let (mut open, mut next): (Vec<Open>, usize) = (Vec::new(), 0);
    let (mut stepping, mut occupied) = (0.0, 0.0);
    let start = Instant::now();
    loop {
        while let Some(planned) = requests.get(next)
            && planned.arrival <= start.elapsed()
        {
            let events = engine.submit(request(planned, forbidden))?;
            open.push(Open { index: next, events, arrived: start + planned.arrival, newest: None });
            next += 1;
        }
        if engine.is_idle() {
            let Some(planned) = requests.get(next) else { break };
            std::thread::sleep(planned.arrival.saturating_sub(start.elapsed()));
            continue;
        }
        let (before, began) = (engine.stats(), Instant::now());
        engine.step()?;
        let (after, now) = (engine.stats(), Instant::now());
        let seconds = (now - began).as_secs_f64();
        measured.decoding.count(&before, &after, seconds);
        let under_way = open.len();
        take_events(&mut open, now, &mut measured)?;
        let ended = under_way - open.len();
        (0..ended).for_each(|_| finished());
        stepping += seconds;
        occupied += seconds * (after.running + ended) as f64;
    }
    measured.seconds = start.elapsed().as_secs_f64();
    measured.mean_batch = occupied / stepping;
    measured.resident = resident.zip(machine::resident_bytes().map(|(_, peak)| peak));
    measured.stats = engine.stats();
    measured.first_token.sort_unstable_by(f64::total_cmp);
    measured.between.sort_unstable_by(f64::total_cmp);
    for (index, (answer, planned)) in measured.answers.iter().zip(requests).enumerate() {
        if answer.len() != planned.output {
            let (found, expected) = (answer.len(), planned.output);
            bail!("request {index} was answered with {found} tokens instead of {expected}");
        }
    }
    Ok(measured)
}

/// Takes what a step brought, and forgets the requests that are complete.
fn take_events(open: &mut Vec<Open>, now: Instant, measured: &mut Measured) -> Result<()> {
    let mut wrong = None;
    open.retain_mut(|request| {
        while let Some(event) = request.events.try_next() {
            match event {
                Event::Token { token, .. } => {
                    measured.answers[request.index].push(token);
                    let since = |earlier: Instant| (now - earlier).as_secs_f64();
                    match request.newest.replace(now) {
                        Some(newest) => measured.between.push(since(newest)),
                        None => measured.first_token.push(since(request.arrived)),
                    }
                }
                Event::Finished { reason: FinishReason::Length, .. } => return false,
                Event::Finished { reason, .. } => {
                    wrong = Some(format!("request {} ended early: {reason:?}", request.index));
                    return false;
                }
                Event::Failed(error) => {
                    wrong = Some(format!("request {} failed: {error}", request.index));
                    return false;
                }
                _ => {}
            }
        }
        true
    });
    wrong.map_or(Ok(()), |wrong| bail!(wrong))
}
