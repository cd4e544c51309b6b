//! The backend-agnostic core of kivi, the 2-bit KV cache of the KIVI paper (ICML 2024,
//! arXiv 2402.02750): keys quantized per channel, values per token, the newest tokens kept in full
//! precision, attention computed straight on the packed codes.
//!
//! This crate knows no device. It defines
//!
//! - the configuration: [`CacheConfig`], [`Format`], [`LayerSpec`], [`PoolSpec`];
//! - the [`quantizer`] and the canonical packed form, [`PackedKeys`] and [`PackedValues`];
//! - the cache state machine [`CacheState`]: pure bookkeeping that turns "these sequences advance by
//!   so many tokens" into a [`StepPlan`] for a backend to execute;
//! - [`CachePolicy`]: which tokens are kept, and at which precision;
//! - the exact memory model, [`memory`];
//! - [`Snapshot`]: one sequence of a cache in a file, for any backend;
//! - the traits a backend implements, [`CacheBackend`] and [`DecoderBackend`], and [`WeightData`],
//!   the form weights arrive in.
//!
//! Shapes are written `[rows, kv_heads, head_dim]`, row-major, last axis contiguous. A *row* is one
//! token of one sequence in one step; a step's rows are those of its sequences, one after another.

mod attention;
mod backend;
mod canonical;
mod config;
mod error;
mod format;
mod key_bias;
mod key_value;
pub mod memory;
mod packed;
mod pages;
mod plan;
mod policy;
mod pool;
pub mod quantizer;
mod rope;
mod snapshot;
mod state;
mod weight;

pub use attention::Attention;
pub use backend::{CacheBackend, Capabilities, DecoderBackend};
pub use canonical::{CanonicalLayer, FullTokens};
pub use config::{CacheConfig, CacheConfigBuilder, NamedCache, ValueResidual};
pub use error::{Error, Result, expect_len};
pub use format::{Bits, Format, Promotion, StoreDtype};
pub use key_bias::KeyBias;
pub use key_value::KeyValue;
pub use packed::{PackedKeys, PackedValues, PromotedKeys, code_at, words_for};
pub use pages::PageId;
pub use plan::{PageCopy, PageRef, SequenceLayout, SequencePlan, StepPlan};
pub use policy::{CachePolicy, KiviPolicy};
pub use pool::{LayerSpec, PoolSpec};
pub use rope::{Rope, RopeStyle};
pub use snapshot::{ModelIdentity, Snapshot, SnapshotError, SnapshotHeader};
pub use state::{CacheState, SequenceId, StepBytes, StepRequest};
pub use weight::{WeightData, WeightFormat, blocks};
