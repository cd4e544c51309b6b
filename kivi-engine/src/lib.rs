//! Continuous batching over one pool of 2-bit cache pages.
//!
//! An [`Engine`] runs a model for many requests at once. Each step it advances every running sequence
//! by one token, fills what is left of the step with pieces of prompts, and keeps all cached keys and
//! values within a budget in bytes ([`EngineBuilder::kv_memory`]): prompts that others began with are
//! not computed again, and when the budget is full the youngest sequence waits, its cache swapped out
//! or forgotten, until there is room.
//!
//! None of this shows in an answer: on a deterministic backend every token equals the one of the same
//! request computed alone, whatever its batch mates, the chunks of its prompt, what was shared,
//! preempted or drafted.
//!
//! ```no_run
//! use kivi_engine::{Engine, Event, Request};
//! # fn model() -> kivi_models::Llama<kivi_cpu_ref::CpuRef> { panic!("not run") }
//! # let tokens = vec![1, 2, 3];
//! let model = model();
//! let mut engine = Engine::builder(&model).kv_memory(256 << 20).build()?;
//! let mut events = engine.submit(Request::new(tokens, 100))?;
//! while engine.step()? {
//!     while let Some(event) = events.try_next() {
//!         if let Event::Token { token, .. } = event {
//!             println!("{token}");
//!         }
//!     }
//! }
//! # Ok::<(), kivi_engine::Error>(())
//! ```
//!
//! [`Engine::start`] moves an engine to a thread of its own and returns an [`EngineHandle`] that any
//! thread or async task can submit to.

mod branch;
mod builder;
mod engine;
mod error;
mod event;
mod handle;
mod lookup;
mod prefix;
mod request;
mod schedule;
mod stats;
mod swap;

pub use builder::{Admission, EngineBuilder, Preemption, SEGMENT_TOKENS};
pub use engine::Engine;
pub use error::{Error, Result};
pub use event::{Completion, Event, Events, FinishReason};
pub use handle::EngineHandle;
pub use lookup::Lookup;
pub use request::Request;
pub use stats::EngineStats;
