//! Counters of an engine.

/// What an engine has done and holds. Counters start with the engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EngineStats {
    /// Sequences that hold a cache.
    pub running: usize,
    /// Sequences that wait for room.
    pub waiting: usize,
    /// Most sequences that ran at once.
    pub max_running: usize,
    /// Bytes allocated for the cache, shared prefixes included.
    pub allocated_bytes: usize,
    /// Most bytes allocated at once, during steps too.
    pub peak_bytes: usize,
    /// Bytes of swapped-out sequences in host memory.
    pub swapped_bytes: usize,
    /// Prefixes kept for others.
    pub prefixes: usize,
    /// Steps so far.
    pub steps: u64,
    /// Rows the model computed: tokens of prompts and answers, drafts and what was computed again.
    pub computed_tokens: u64,
    /// Tokens of answers.
    pub generated_tokens: u64,
    /// Tokens of prompts that were taken from shared prefixes.
    pub reused_tokens: u64,
    /// Sequences that had to give way, their cache swapped out.
    pub swapped_out: u64,
    /// Sequences that had to give way, their cache forgotten.
    pub forgotten: u64,
    /// Prefixes given up for room.
    pub evicted: u64,
    /// Tokens proposed by prompt lookup.
    pub drafted_tokens: u64,
    /// Those of them that the model agreed with.
    pub accepted_tokens: u64,
    /// Requests that ended before their time: cancelled, failed or beyond their deadline.
    pub abandoned: u64,
}
