//! Model files, tokenizers, chat templates, architectures and sampling of kivi.

mod beam;
mod cache_plan;
pub mod chat;
pub mod checkpoint;
pub mod config;
mod error;
pub mod fetch;
pub mod generate;
mod llama;
pub mod sampling;
mod session;
pub mod text;
pub mod tokenizer;

pub use beam::{Beam, BeamOptions};
pub use cache_plan::{CachePlan, LayerFormats};
pub use checkpoint::Checkpoint;
pub use config::ModelConfig;
pub use error::{Error, Result};
pub use llama::{KeyBiasMode, Llama, ObservedAttention, Observer};
pub use session::Session;
