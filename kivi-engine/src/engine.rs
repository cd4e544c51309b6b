//! The engine: requests in, one step at a time, events out.

use crate::{
    Admission, EngineBuilder, EngineStats, Error, Event, Events, FinishReason, Lookup, Preemption,
    Request, Result,
    branch::{Branch, BranchId, Shared},
    prefix::{PrefixIndex, PrefixKey},
    schedule::Work,
};
use kivi_core::{DecoderBackend, KeyValue, SequenceId, Snapshot, memory};
use kivi_models::{
    Llama, Session,
    sampling::{Sampler, SamplerConfig},
    text::{StopMatcher, TokenStream},
    tokenizer::Tokenizer,
};
use std::{collections::BTreeMap, sync::Arc, time::Instant};
use tokio::sync::mpsc::UnboundedSender;

/// What [`EngineBuilder`] sets.
#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) max_running: usize,
    pub(crate) max_waiting: usize,
    pub(crate) step_tokens: usize,
    pub(crate) context: usize,
    pub(crate) admission: Admission,
    pub(crate) preemption: Preemption,
    pub(crate) swap_memory: usize,
    pub(crate) prefix_sharing: bool,
}

/// Most answers to one prompt: each is a sequence with books of its own, cached or not.
const MAX_SAMPLES: usize = 1024;

/// Runs a model for many requests at once over one pool of cache pages; see the
/// [crate](crate) for how.
///
/// It does nothing by itself: call [`Engine::step`], or move it to a thread with [`Engine::start`].
pub struct Engine<B: DecoderBackend> {
    pub(crate) session: Session<B>,
    pub(crate) kv_memory: usize,
    tokenizer: Option<Tokenizer>,
    pub(crate) options: Options,
    pub(crate) lookup: Option<Lookup>,
    /// Every answer under way, in the order in which they are served.
    pub(crate) branches: BTreeMap<BranchId, Branch>,
    pub(crate) prefixes: PrefixIndex,
    pub(crate) root: PrefixKey,
    next_request: u64,
    pub(crate) stats: EngineStats,
    /// Whether memory was freed that the backend still holds.
    pub(crate) freed: bool,
}

impl<B: DecoderBackend> Engine<B> {
    /// A builder for an engine over a model.
    pub fn builder(model: &Llama<B>) -> EngineBuilder<B> {
        EngineBuilder::new(model)
    }

    pub(crate) fn new(
        session: Session<B>,
        kv_memory: usize,
        tokenizer: Option<Tokenizer>,
        options: Options,
        lookup: Option<Lookup>,
    ) -> Self {
        let spec = session.state().spec();
        let root = PrefixKey::root(session.model().fingerprint(), spec);
        Self {
            root,
            session,
            kv_memory,
            tokenizer,
            options,
            lookup,
            branches: BTreeMap::new(),
            prefixes: PrefixIndex::default(),
            next_request: 0,
            stats: EngineStats::default(),
            freed: false,
        }
    }

    /// The pool and the model.
    pub fn session(&self) -> &Session<B> {
        &self.session
    }

    /// Takes a request; nothing is computed yet.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`], [`Error::TooLarge`] when its cache would not fit even alone,
    /// [`Error::QueueFull`].
    pub fn submit(&mut self, request: Request) -> Result<Events> {
        let (sender, events) = Events::channel();
        self.enqueue(request, sender)?;
        Ok(events)
    }

    pub(crate) fn enqueue(
        &mut self,
        request: Request,
        events: UnboundedSender<Event>,
    ) -> Result<()> {
        let stop = self.check(&request)?;
        let keys = if self.options.prefix_sharing {
            let config = self.session.state().spec().config();
            PrefixKey::of_prompt(self.root, config, &request.prompt)
        } else {
            Vec::new()
        };
        let deadline = request.deadline.and_then(|limit| Instant::now().checked_add(limit));
        let shared = Arc::new(Shared { request, events, deadline, keys });
        let id = BranchId { request: self.next_request, sample: 0 };
        let branch = self.branch(&shared, 0, stop)?;
        self.next_request += 1;
        self.branches.insert(id, branch);
        Ok(())
    }

    /// Everything that can be known to be wrong with a request.
    fn check(&self, request: &Request) -> Result<StopMatcher> {
        let (prompt, context) = (request.prompt.len(), self.options.context);
        if prompt == 0 || request.max_tokens == 0 || request.samples == 0 {
            return Err(Error::request("prompt, max_tokens and samples must not be empty or 0"));
        }
        if request.samples > MAX_SAMPLES {
            let reason = format!("{} samples, more than {MAX_SAMPLES}", request.samples);
            return Err(Error::request(reason));
        }
        if prompt >= context {
            let reason = format!("a prompt of {prompt} tokens in a context of {context}");
            return Err(Error::request(reason));
        }
        let vocabulary = self.session.model().config().vocab_size;
        if let Some(token) = request.prompt.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::request(format!("token {token} of a vocabulary of {vocabulary}")));
        }
        if !request.stop_strings.is_empty() && self.tokenizer.is_none() {
            return Err(Error::request("stop strings need an engine with a tokenizer"));
        }
        let waiting = self.branches.values().filter(|branch| branch.sequence.is_none()).count();
        if waiting >= self.options.max_waiting {
            return Err(Error::QueueFull { waiting });
        }
        let tokens = self.longest(request);
        let needed = self.predict(tokens).max(self.prefill_bytes(prompt));
        if needed > self.kv_memory {
            return Err(Error::TooLarge { tokens, needed, budget: self.kv_memory });
        }
        request.sampling.validate()?;
        Ok(StopMatcher::new(&request.stop_tokens, &request.stop_strings)?)
    }

    fn branch(&self, shared: &Arc<Shared>, sample: usize, stop: StopMatcher) -> Result<Branch> {
        let seed = shared.request.sampling.seed.wrapping_add(sample as u64);
        let sampling = SamplerConfig { seed, ..shared.request.sampling.clone() };
        let stream = self.tokenizer.as_ref().map(|known| TokenStream::continuing(known, true));
        Ok(Branch {
            tokens: shared.request.prompt.clone(),
            shared: Arc::clone(shared),
            sequence: None,
            swapped: None,
            gave_way: false,
            started: false,
            sampler: Sampler::new(sampling)?,
            stop,
            stream,
        })
    }

    /// Tokens of the longest answer with its prompt.
    pub(crate) fn longest(&self, request: &Request) -> usize {
        request.prompt.len().saturating_add(request.max_tokens).min(self.options.context)
    }

    /// Bytes of a sequence of so many tokens that shares nothing.
    pub(crate) fn predict(&self, tokens: usize) -> usize {
        let state = self.session.state();
        memory::predict(state.spec(), state.policy().as_ref(), tokens).allocated()
    }

    /// Bytes of a prompt while its largest segment is open.
    pub(crate) fn prefill_bytes(&self, prompt: usize) -> usize {
        let state = self.session.state();
        let spec = state.spec();
        let open = spec.config().segment_tokens().unwrap_or(prompt).min(prompt);
        let full = self.full_room();
        let room = state.policy().kept(prompt - open).map(|kept| prompt.saturating_sub(kept));
        let room = spec.whole_groups(room).zip(full).map(|(open, full)| open.max(full));
        self.predict(prompt) - spec.slot_bytes(full) + spec.slot_bytes(room)
    }

    /// Room of a residual that is generated into.
    pub(crate) fn full_room(&self) -> KeyValue<usize> {
        let state = self.session.state();
        state.spec().whole_groups(state.policy().residual_capacity())
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.branches.is_empty()
    }

    /// Advances every running sequence, begins waiting ones, and says whether there is more to do.
    ///
    /// A failure of the model or the device ends the requests of the step ([`Event::Failed`]), not
    /// the engine.
    ///
    /// # Errors
    /// When the bookkeeping itself fails; the engine is then of no further use.
    pub fn step(&mut self) -> Result<bool> {
        self.drop_unwanted()?;
        let batch = self.schedule()?;
        if !batch.is_empty() {
            self.execute(batch)?;
        }
        if std::mem::take(&mut self.freed) {
            self.session.flush()?;
        }
        Ok(!self.is_idle())
    }

    /// Steps until there is nothing to do.
    ///
    /// # Errors
    /// As [`Engine::step`].
    pub fn run(&mut self) -> Result<()> {
        while self.step()? {}
        Ok(())
    }

    /// Counters.
    pub fn stats(&self) -> EngineStats {
        let running = self.running().count();
        let swapped = self.branches.values().filter_map(|branch| branch.swapped.as_ref());
        EngineStats {
            running,
            waiting: self.branches.len() - running,
            allocated_bytes: self.session.state().allocated_bytes(),
            swapped_bytes: swapped.map(|swapped| swapped.bytes()).sum(),
            prefixes: self.prefixes.len(),
            ..self.stats.clone()
        }
    }

    /// The longest kept prefix of some tokens, to be saved to a file; `None` if no segment of them is
    /// kept.
    ///
    /// # Errors
    /// When the backend cannot export it.
    pub fn snapshot_prefix(&self, tokens: &[u32]) -> Result<Option<Snapshot>> {
        let config = self.session.state().spec().config();
        let keys = PrefixKey::of_tokens(self.root, config, tokens);
        let Some((segments, sequence)) = self.prefixes.longest(&keys) else { return Ok(None) };
        let tokens = &tokens[..self.boundary(segments - 1)];
        Ok(Some(self.session.snapshot(sequence, tokens)?))
    }

    /// Keeps a prefix from a snapshot, as if a prompt had just been computed; others may be given up
    /// for it.
    ///
    /// # Errors
    /// When it is of another model or cache, does not end where a segment does, or does not fit. The
    /// engine then goes on as before, but for the prefixes it gave up.
    pub fn restore_prefix(&mut self, snapshot: &Snapshot) -> Result<()> {
        let tokens = snapshot.tokens();
        let config = self.session.state().spec().config();
        let keys = PrefixKey::of_tokens(self.root, config, tokens);
        let ends = keys.len().checked_sub(1).map(|depth| self.boundary(depth));
        if ends != Some(tokens.len()) || !self.options.prefix_sharing {
            let reason = format!("{} tokens are no whole number of segments", tokens.len());
            return Err(Error::request(reason));
        }
        let (key, depth) = (keys[keys.len() - 1], keys.len() - 1);
        if self.prefixes.contains(&key) {
            return Ok(());
        }
        let needed = self.predict(tokens.len()) + self.compact_bytes(tokens.len());
        if !self.find_room(needed)? {
            return Err(Error::TooLarge { tokens: tokens.len(), needed, budget: self.kv_memory });
        }
        let sequence = self.session.restore(snapshot)?;
        let kept = self.insert_prefix(key, depth, sequence);
        self.release(sequence)?;
        self.session.flush()?;
        kept
    }

    /// Checks that the pool's accounting balances: the bytes the bookkeeping believes in are those
    /// the backend has, within the budget, and every sequence of the pool belongs to an answer or a
    /// prefix. Meant for tests, between steps.
    ///
    /// # Errors
    /// [`Error::InvalidRequest`] that says what does not balance.
    pub fn audit(&self) -> Result<()> {
        let state = self.session.state();
        let (believed, measured) = (state.allocated_bytes(), self.session.measure().allocated);
        if believed != measured || believed > self.kv_memory {
            let reason = format!(
                "{believed} bytes by the books, {measured} of the backend, budget {}",
                self.kv_memory
            );
            return Err(Error::request(reason));
        }
        let mut expected: Vec<SequenceId> = self.prefixes.sequences().collect();
        expected.extend(self.branches.values().filter_map(|branch| branch.sequence));
        let (known, owned) = (state.sequence_count(), expected.len());
        if known != owned || expected.iter().any(|&id| state.tokens(id).is_err()) {
            let reason = format!("{known} sequences in the pool, {owned} that belong to somebody");
            return Err(Error::request(reason));
        }
        Ok(())
    }

    pub(crate) fn running(&self) -> impl Iterator<Item = (BranchId, SequenceId)> + '_ {
        self.branches.iter().filter_map(|(&id, branch)| Some((id, branch.sequence?)))
    }

    /// Gives up answers nobody waits for any more.
    fn drop_unwanted(&mut self) -> Result<()> {
        let now = Instant::now();
        let late = |branch: &Branch| branch.shared.deadline.is_some_and(|deadline| deadline <= now);
        let unwanted = self.branches.iter().filter_map(|(&id, branch)| {
            let cancelled = branch.shared.events.is_closed();
            (cancelled || late(branch)).then_some((id, cancelled))
        });
        for (id, cancelled) in unwanted.collect::<Vec<_>>() {
            self.stats.abandoned += 1;
            if cancelled {
                self.remove(id)?;
            } else {
                self.finish(id, FinishReason::Deadline)?;
            }
        }
        Ok(())
    }

    /// Runs a step and gives everyone what it brought.
    fn execute(&mut self, batch: Vec<Work>) -> Result<()> {
        let steps = batch.iter().map(|work| (work.sequence, work.tokens.as_slice()));
        let steps: Vec<_> = steps.collect();
        let (mut rows, mut first) = (Vec::new(), 0);
        for work in &batch {
            rows.extend(work.sampled.clone().map(|row| first + row));
            first += work.tokens.len();
        }
        self.stats.steps += 1;
        self.stats.computed_tokens += first as u64;
        self.stats.max_running = self.stats.max_running.max(self.running().count());

        let model = self.session.model().clone();
        let logits = model.backend().run(|| {
            let hidden = self.session.step(&steps)?;
            if rows.is_empty() { Ok(Vec::new()) } else { model.logits(&hidden, &rows) }
        });
        let mut logits = match logits {
            Ok(logits) => logits,
            Err(error) => {
                let error = Arc::new(Error::from(error));
                for work in batch {
                    self.fail(work.branch.request, &error)?;
                }
                return Ok(());
            }
        };
        let vocabulary = model.config().vocab_size;
        let mut logits = logits.chunks_exact_mut(vocabulary);
        for work in batch {
            let mut own: Vec<_> = logits.by_ref().take(work.sampled.len()).collect();
            // An earlier sample of the same request may have failed it.
            if self.branches.contains_key(&work.branch) {
                self.keep_prefix(&work)?;
                self.take(&work, &mut own)?;
            }
        }
        Ok(())
    }

    /// Chooses tokens from the logits of one branch's rows, and takes back the drafts that the model
    /// would not have chosen.
    fn take(&mut self, work: &Work, logits: &mut [&mut [f32]]) -> Result<()> {
        let Work { branch: id, sequence, .. } = *work;
        let Some(branch) = self.branches.get_mut(&id) else { return Ok(()) };
        if logits.is_empty() {
            return Ok(());
        }
        if id.sample == 0 && branch.answered() == 0 && branch.shared.request.samples > 1 {
            self.branch_out(id, logits[0])?;
        }
        let Some(branch) = self.branches.get_mut(&id) else { return Ok(()) };
        let (known, mut ended) = (branch.tokens.len(), None);
        for (row, logits) in logits.iter_mut().enumerate() {
            match branch.take(id.sample, logits, self.options.context) {
                Ok(reason) => ended = reason,
                Err(error) => return self.fail(id.request, &Arc::new(error.into())),
            }
            let taken = branch.tokens.len() - known;
            let agreed = taken == row + 1 && work.drafts().get(row) == branch.tokens.last();
            if ended.is_some() || !agreed {
                break;
            }
        }
        let taken = branch.tokens.len() - known;
        self.stats.generated_tokens += taken as u64;
        let accepted = taken.saturating_sub(1);
        self.stats.drafted_tokens += work.drafts().len() as u64;
        self.stats.accepted_tokens += accepted as u64;
        if let Some(reason) = ended {
            return self.finish(id, reason);
        }
        if accepted < work.drafts().len() {
            self.session.state_mut().truncate(sequence, known + accepted)?;
            self.freed = true;
        }
        Ok(())
    }

    /// Begins the other answers to a prompt that was just computed.
    fn branch_out(&mut self, first: BranchId, logits: &[f32]) -> Result<()> {
        let Some(parent) = self.branches.get(&first) else { return Ok(()) };
        let (shared, sequence) = (Arc::clone(&parent.shared), parent.sequence);
        let stop = parent.stop.clone();
        for sample in 1..shared.request.samples {
            let id = BranchId { sample, ..first };
            let mut branch = self.branch(&shared, sample, stop.clone())?;
            branch.started = true;
            // Where there is no room for a fork, the branch waits like any other.
            let slot = self.session.state().spec().slot_bytes(self.full_room());
            if let Some(sequence) = sequence
                && self.running().count() < self.options.max_running
                && self.find_room(slot)?
            {
                match self.session.fork(sequence) {
                    Ok(fork) => branch.sequence = Some(fork),
                    Err(error) => return self.fail(first.request, &Arc::new(error.into())),
                }
            }
            let ended = branch.take(sample, &mut logits.to_vec(), self.options.context);
            self.stats.generated_tokens += branch.answered() as u64;
            self.branches.insert(id, branch);
            match ended {
                Ok(None) => {}
                Ok(Some(reason)) => self.finish(id, reason)?,
                Err(error) => return self.fail(first.request, &Arc::new(error.into())),
            }
        }
        Ok(())
    }

    /// Ends an answer.
    pub(crate) fn finish(&mut self, id: BranchId, reason: FinishReason) -> Result<()> {
        if let Some(branch) = self.branches.get_mut(&id) {
            branch.finish(id.sample, reason);
        }
        self.remove(id)
    }

    /// Ends all answers to a request.
    pub(crate) fn fail(&mut self, request: u64, error: &Arc<Error>) -> Result<()> {
        let ids = self.branches.keys().filter(|id| id.request == request).copied();
        for (index, id) in ids.collect::<Vec<_>>().into_iter().enumerate() {
            if index == 0
                && let Some(branch) = self.branches.get(&id)
            {
                branch.tell(Event::Failed(Arc::clone(error)));
                self.stats.abandoned += 1;
            }
            self.remove(id)?;
        }
        Ok(())
    }

    /// Forgets a branch and its cache.
    fn remove(&mut self, id: BranchId) -> Result<()> {
        let sequence = self.branches.remove(&id).and_then(|branch| branch.sequence);
        sequence.map_or(Ok(()), |sequence| self.release(sequence))
    }

    pub(crate) fn release(&mut self, sequence: SequenceId) -> Result<()> {
        self.freed = true;
        Ok(self.session.state_mut().remove(sequence)?)
    }

    /// Fails everything, at the end.
    pub(crate) fn abandon_all(&self) {
        let (stopped, mut told) = (Arc::new(Error::Stopped), None);
        for (id, branch) in &self.branches {
            if told != Some(id.request) {
                branch.tell(Event::Failed(Arc::clone(&stopped)));
            }
            told = Some(id.request);
        }
    }
}
