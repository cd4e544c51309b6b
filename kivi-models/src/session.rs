//! A model with a cache and some sequences in it.

use crate::{Llama, Observer, Result};
use kivi_core::{
    CacheConfig, CacheState, DecoderBackend, LayerSpec, PoolSpec, SequenceId, Snapshot,
    SnapshotError, StepPlan, StepRequest,
    memory::{self, MeasuredBytes, MemoryUsage},
};

/// A model, a cache pool and the bookkeeping of the sequences in it.
pub struct Session<B: DecoderBackend> {
    model: Llama<B>,
    state: CacheState,
    cache: B::Cache,
    plan: StepPlan,
}

impl<B: DecoderBackend> Session<B> {
    /// A pool for `sequences` sequences of up to `context` tokens; memory is taken as it is needed.
    ///
    /// # Errors
    /// When the backend does not support the cache.
    pub fn new(
        model: &Llama<B>,
        config: CacheConfig,
        sequences: usize,
        context: usize,
    ) -> Result<Self> {
        let layers = model.cache_layers(&config);
        Self::with_layers(model, config, layers, sequences, context)
    }

    /// The same with formats of each layer's own, as [`CachePlan::layers`](crate::CachePlan::layers)
    /// gives them.
    ///
    /// # Errors
    /// When there is not one cache layer per layer of the model, a layer has another shape than the
    /// model's, or the backend does not support the cache.
    pub fn with_layers(
        model: &Llama<B>,
        config: CacheConfig,
        layers: Vec<LayerSpec>,
        sequences: usize,
        context: usize,
    ) -> Result<Self> {
        let spec = PoolSpec::for_context(config, layers, sequences, context)?;
        Self::with_pool(model, spec)
    }

    /// The same over a pool of any size.
    ///
    /// # Errors
    /// As [`Session::with_layers`].
    pub fn with_pool(model: &Llama<B>, spec: PoolSpec) -> Result<Self> {
        let shape = |layer: &LayerSpec| (layer.kv_heads, layer.head_dim, layer.window);
        let expected = model.cache_layers(spec.config());
        if !spec.layers().iter().map(shape).eq(expected.iter().map(shape)) {
            let reason = "the cache layers do not have the shapes of the model's layers";
            return Err(kivi_core::Error::request("create cache", reason).into());
        }
        let cache = model.backend().create_cache(&spec)?;
        let (model, state) = (model.clone(), CacheState::new(spec));
        Ok(Self { model, state, cache, plan: StepPlan::default() })
    }

    /// Adds an empty sequence.
    ///
    /// # Errors
    /// When the pool is full.
    pub fn create_sequence(&mut self) -> Result<SequenceId> {
        Ok(self.state.create_sequence()?)
    }

    /// Appends a prompt and returns the logits after its last token, `[vocab_size]`.
    ///
    /// # Errors
    /// When the prompt is empty, the pool is full or the backend fails.
    pub fn prompt(&mut self, sequence: SequenceId, tokens: &[u32]) -> Result<Vec<f32>> {
        let before = self.state.tokens(sequence)?;
        self.state.begin_prompt(sequence, tokens.len())?;
        let result = self.generate_step(&[(sequence, tokens)]);
        if result.is_err() && self.state.tokens(sequence)? == before {
            // Nothing of it was planned: the prompt is not begun either.
            self.state.truncate(sequence, before)?;
        }
        result
    }

    /// Appends tokens to several sequences at once and returns the logits after the last token of
    /// each, `[sequences, vocab_size]`. Tokens that are not part of a prompt count as generated.
    ///
    /// # Errors
    /// When a sequence is unknown or named twice, the pool is full or the backend fails.
    pub fn generate_step(&mut self, steps: &[(SequenceId, &[u32])]) -> Result<Vec<f32>> {
        let model = self.model.clone();
        model.backend().run(|| {
            let hidden = self.step(steps)?;
            model.logits(&hidden, &self.plan.last_rows())
        })
    }

    /// As [`Session::generate_step`], but returns the hidden states of all rows.
    ///
    /// # Errors
    /// As [`Session::generate_step`]. A token beyond the vocabulary is found before anything is
    /// changed; when the backend fails, the sequences of the step must be removed.
    pub fn step(&mut self, steps: &[(SequenceId, &[u32])]) -> Result<B::Buffer> {
        let tokens = self.plan_step(steps)?;
        self.model.forward(&mut self.cache, &self.plan, &tokens)
    }

    /// The same, showing the attention of every layer to `observe`.
    ///
    /// # Errors
    /// As [`Session::step`], and those of `observe`.
    pub fn step_observed(
        &mut self,
        steps: &[(SequenceId, &[u32])],
        observe: &mut Observer<'_, B>,
    ) -> Result<B::Buffer> {
        let tokens = self.plan_step(steps)?;
        self.model.forward_observed(&mut self.cache, &self.plan, &tokens, observe)
    }

    /// Plans a step and returns the tokens of its rows.
    fn plan_step(&mut self, steps: &[(SequenceId, &[u32])]) -> Result<Vec<u32>> {
        let request = |&(sequence, tokens): &(SequenceId, &[u32])| StepRequest {
            sequence,
            tokens: tokens.len(),
        };
        let requests: Vec<_> = steps.iter().map(request).collect();
        let vocabulary = self.model.config().vocab_size;
        let tokens = steps.iter().flat_map(|(_, tokens)| tokens.iter().copied());
        let tokens: Vec<u32> = tokens.collect();
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            let reason = format!("token {token} of a vocabulary of {vocabulary}");
            return Err(kivi_core::Error::request("step", reason).into());
        }
        self.state.plan(&requests, &mut self.plan)?;
        Ok(tokens)
    }

    /// The model.
    pub fn model(&self) -> &Llama<B> {
        &self.model
    }

    /// The state machine.
    pub fn state(&self) -> &CacheState {
        &self.state
    }

    /// A second sequence with the same tokens, sharing pages until one of the two writes to them.
    ///
    /// # Errors
    /// When the sequence is unknown or the pool is full.
    pub fn fork(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let fork = self.state.fork(sequence)?;
        self.copy_slot(sequence, fork)
    }

    /// A fork that has room for nothing but what it holds
    /// ([`CacheState::fork_compact`]): to keep and to fork from.
    ///
    /// # Errors
    /// As [`Session::fork`].
    pub fn fork_compact(&mut self, sequence: SequenceId) -> Result<SequenceId> {
        let fork = self.state.fork_compact(sequence)?;
        self.copy_slot(sequence, fork)
    }

    fn copy_slot(&mut self, sequence: SequenceId, fork: SequenceId) -> Result<SequenceId> {
        let layout = self.state.layout(fork)?;
        let copied = self.model.backend().copy_slot(&mut self.cache, sequence.slot(), &layout);
        if copied.is_err() {
            self.state.remove(fork)?;
        }
        Ok(copied.map(|()| fork)?)
    }

    /// Gives memory back that removed and truncated sequences had; the next step would.
    ///
    /// # Errors
    /// When the backend fails.
    pub fn flush(&mut self) -> Result<()> {
        self.state.plan(&[], &mut self.plan)?;
        Ok(self.model.backend().begin_step(&mut self.cache, &self.plan)?)
    }

    /// A snapshot of a sequence, to be saved to a file; `tokens` are the tokens it holds.
    ///
    /// # Errors
    /// As [`Snapshot::of_sequence`].
    pub fn snapshot(&self, sequence: SequenceId, tokens: &[u32]) -> Result<Snapshot> {
        let (backend, identity) = (self.model.backend(), self.model.identity());
        let source = (&self.cache, &self.state);
        Ok(Snapshot::of_sequence(backend, source, sequence, identity, tokens)?)
    }

    /// Adds the sequence of a snapshot, which may come from another backend. It goes on as if it had
    /// never been away; the logits after its last token are not part of a snapshot, so the next step
    /// takes at least one token.
    ///
    /// # Errors
    /// As [`Snapshot::restore`], and when a token is beyond the vocabulary. The session then is as it
    /// was.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SequenceId> {
        let (backend, identity) = (self.model.backend(), self.model.identity());
        let vocabulary = self.model.config().vocab_size;
        snapshot.check(identity, self.state.spec(), self.state.policy().as_ref())?;
        if let Some(token) = snapshot.tokens().iter().find(|&&id| id as usize >= vocabulary) {
            let reason = format!("token {token} of a vocabulary of {vocabulary}");
            return Err(kivi_core::Error::from(SnapshotError::Invalid { reason }).into());
        }
        Ok(snapshot.restore(backend, (&mut self.cache, &mut self.state), identity)?)
    }

    /// The state machine, to begin prompts and to truncate or remove sequences.
    pub fn state_mut(&mut self) -> &mut CacheState {
        &mut self.state
    }

    /// The backend's memory.
    pub fn cache(&self) -> &B::Cache {
        &self.cache
    }

    /// Bytes of a sequence, part by part, as the memory model has them.
    ///
    /// # Errors
    /// When the sequence is unknown.
    pub fn memory(&self, sequence: SequenceId) -> Result<MemoryUsage> {
        let layout = self.state.layout(sequence)?;
        Ok(memory::of_sequence(self.state.spec(), self.state.policy().as_ref(), &layout))
    }

    /// Bytes of the whole pool, as the backend has them.
    pub fn measure(&self) -> MeasuredBytes {
        self.model.backend().measure(&self.cache)
    }

    /// Elements the backend had to saturate when it rounded them to the store type.
    pub fn saturated(&self) -> u64 {
        self.model.backend().saturated(&self.cache)
    }
}
