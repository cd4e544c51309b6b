//! Options of an engine.

use crate::{Engine, Error, Lookup, Result, engine::Options};
use kivi_core::{CacheConfig, DecoderBackend, LayerSpec, PoolSpec};
use kivi_models::{Llama, Session, tokenizer::Tokenizer};

/// Tokens of a prompt that see each other in full precision where the engine chooses the cache; shared
/// prefixes end where these segments do.
pub const SEGMENT_TOKENS: usize = 512;

/// What a sequence must find room for before it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Its prompt: more sequences run at once, and some may have to give way later.
    #[default]
    Prompt,
    /// Its prompt and the longest answer asked for: nothing ever gives way.
    WholeAnswer,
}

/// What happens to the cache of a sequence that has to give way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// Its packed pages are copied to host memory, as far as
    /// [`swap_memory`](EngineBuilder::swap_memory) goes; where they cannot be, it is forgotten.
    #[default]
    Swap,
    /// It is forgotten, and computed again later.
    Recompute,
}

/// Sets the options of an [`Engine`].
#[must_use]
pub struct EngineBuilder<B: DecoderBackend> {
    model: Llama<B>,
    cache: Option<(CacheConfig, Vec<LayerSpec>)>,
    kv_memory: usize,
    tokenizer: Option<Tokenizer>,
    options: Options,
    lookup: Option<Lookup>,
}

impl<B: DecoderBackend> EngineBuilder<B> {
    pub(crate) fn new(model: &Llama<B>) -> Self {
        let options = Options {
            max_running: 256,
            max_waiting: usize::MAX,
            step_tokens: 512,
            context: model.config().context_length,
            admission: Admission::default(),
            preemption: Preemption::default(),
            swap_memory: 4 << 30,
            prefix_sharing: true,
        };
        Self {
            model: model.clone(),
            cache: None,
            kv_memory: 1 << 30,
            tokenizer: None,
            options,
            lookup: None,
        }
    }

    /// The cache; by default keys and values in 2 bits, segments of 512 tokens, and a rollback length
    /// that suits [`EngineBuilder::lookup`].
    pub fn cache(mut self, config: CacheConfig, layers: Vec<LayerSpec>) -> Self {
        self.cache = Some((config, layers));
        self
    }

    /// Bytes for all cached keys and values, shared prefixes included; 1 GiB by default. Nothing is
    /// allocated before it is needed.
    pub fn kv_memory(mut self, bytes: usize) -> Self {
        self.kv_memory = bytes;
        self
    }

    /// Turns tokens into text, and makes stop strings possible.
    pub fn tokenizer(mut self, tokenizer: Tokenizer) -> Self {
        self.tokenizer = Some(tokenizer);
        self
    }

    /// At most so many sequences at once; 256 by default.
    pub fn max_running(mut self, sequences: usize) -> Self {
        self.options.max_running = sequences;
        self
    }

    /// At most so many requests may wait; a further one is refused. Any number by default.
    pub fn max_waiting(mut self, requests: usize) -> Self {
        self.options.max_waiting = requests;
        self
    }

    /// At most so many rows in a step, 512 by default: how long a prompt may keep the others waiting.
    /// Every running sequence advances by at least one token all the same.
    pub fn step_tokens(mut self, rows: usize) -> Self {
        self.options.step_tokens = rows;
        self
    }

    /// Longest sequence in tokens; the model's by default.
    pub fn context(mut self, tokens: usize) -> Self {
        self.options.context = tokens;
        self
    }

    /// What a sequence must find room for before it begins.
    pub fn admission(mut self, admission: Admission) -> Self {
        self.options.admission = admission;
        self
    }

    /// What happens to the cache of a sequence that has to give way.
    pub fn preemption(mut self, preemption: Preemption) -> Self {
        self.options.preemption = preemption;
        self
    }

    /// Bytes of host memory for swapped-out sequences, not part of
    /// [`kv_memory`](EngineBuilder::kv_memory); 4 GiB by default.
    pub fn swap_memory(mut self, bytes: usize) -> Self {
        self.options.swap_memory = bytes;
        self
    }

    /// Whether prompts that begin alike share what is cached of their whole segments; they do by
    /// default, if the cache has segments.
    pub fn prefix_sharing(mut self, share: bool) -> Self {
        self.options.prefix_sharing = share;
        self
    }

    /// Proposes tokens by prompt lookup; off by default.
    pub fn lookup(mut self, lookup: Lookup) -> Self {
        self.lookup = Some(lookup);
        self
    }

    /// Builds the engine.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for options that are not allowed together, and when the backend does
    /// not support the cache.
    pub fn build(self) -> Result<Engine<B>> {
        let Self { model, cache, kv_memory, tokenizer, options, lookup } = self;
        let (config, layers) = match cache {
            Some(cache) => cache,
            None => {
                let rollback = lookup.map_or(0, |lookup| lookup.draft_tokens);
                let builder = CacheConfig::builder().segment_tokens(Some(SEGMENT_TOKENS));
                let config = builder.rollback_length(rollback).build()?;
                let layers = model.cache_layers(&config);
                (config, layers)
            }
        };
        for (name, value) in [
            ("max_running", options.max_running),
            ("step_tokens", options.step_tokens),
            ("context", options.context),
        ] {
            if value == 0 {
                return Err(Error::option(name, value, "at least 1"));
            }
        }
        if let Some(lookup) = &lookup {
            lookup.check(config.rollback_length())?;
        }
        // The budget in bytes is the engine's to keep; the pool only needs numbers that are beyond it.
        let spec = PoolSpec::new(config.clone(), layers.clone(), 0, 1)?;
        let pages = (0..spec.group_count()).map(|group| kv_memory / spec.page_bytes(group).max(1));
        let pages = pages.max().unwrap_or(0).min(u32::MAX as usize - 1);
        let spec = PoolSpec::new(config, layers, pages, u32::MAX as usize)?;
        let session = Session::with_pool(&model, spec)?;
        Ok(Engine::new(session, kv_memory, tokenizer, options, lookup))
    }
}
