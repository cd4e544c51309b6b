//! Finding and opening models.

use anyhow::Result;
use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};
use kivi::DecoderBackend;
use kivi::models::{
    Checkpoint, KeyBiasMode, Llama,
    chat::ChatTemplate,
    fetch::{self, FetchOptions},
    tokenizer::Tokenizer,
};

/// Options that choose a model.
#[derive(Args, Clone, Debug)]
pub(super) struct ModelOptions {
    /// A directory, a GGUF file, a known name, or org/model[@revision][:FILE.gguf] on the Hub.
    #[arg(long, short, env = "KIVI_MODEL", default_value = fetch::DEFAULT_MODEL)]
    pub(super) model: String,
    #[command(flatten)]
    pub(super) offline: OfflineOption,
    /// Where the biases of key projections go: large ones beside the cache, which then keeps its
    /// accuracy, or all into the cached keys, as others do.
    #[arg(long, env = "KIVI_KEY_BIAS", value_enum, default_value = "beside")]
    key_bias: KeyBias,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KeyBias {
    Beside,
    InKeys,
}

/// Whether the network may be used.
#[derive(Args, Clone, Debug)]
pub(super) struct OfflineOption {
    /// Use only files that are on this machine.
    #[arg(long, env = "KIVI_OFFLINE", value_parser = FalseyValueParser::new())]
    offline: bool,
}

impl ModelOptions {
    /// Opens the model, fetching it first if need be.
    pub(super) fn open(&self, progress: bool) -> Result<Checkpoint> {
        open(&self.model, &self.offline, progress)
    }

    /// Loads a model as the options say.
    pub(super) fn load<B: DecoderBackend>(
        &self,
        backend: B,
        checkpoint: &Checkpoint,
    ) -> Result<Llama<B>> {
        let mode = match self.key_bias {
            KeyBias::Beside => KeyBiasMode::Beside,
            KeyBias::InKeys => KeyBiasMode::InKeys,
        };
        Ok(Llama::load_with(backend, checkpoint, mode)?)
    }
}

/// Opens a model by name.
pub(super) fn open(name: &str, offline: &OfflineOption, progress: bool) -> Result<Checkpoint> {
    let options = FetchOptions { offline: offline.offline, progress, ..FetchOptions::default() };
    Ok(Checkpoint::open(fetch::resolve(name, &options)?)?)
}

/// The tokenizer of a model.
pub(super) fn tokenizer(checkpoint: &Checkpoint) -> Result<Tokenizer> {
    Ok(Tokenizer::from_source(checkpoint.tokenizer_source()?)?)
}

/// The chat template of a model, if it has one.
pub(super) fn chat_template(checkpoint: &Checkpoint) -> Result<Option<ChatTemplate>> {
    let (bos, eos) = (checkpoint.bos_token(), checkpoint.eos_token());
    let source = checkpoint.chat_template();
    let template = source
        .map(|source| ChatTemplate::new(source, bos.unwrap_or_default(), eos.unwrap_or_default()));
    Ok(template.transpose()?)
}

/// Tokens that end an answer: those of the generation settings, or the tokenizer's.
pub(super) fn stop_tokens(checkpoint: &Checkpoint, tokenizer: &Tokenizer) -> Vec<u32> {
    let named = &checkpoint.generation_defaults().eos_token_ids;
    if named.is_empty() { tokenizer.eos_id().into_iter().collect() } else { named.clone() }
}
