//! `kivi run`.

use super::{
    cache::{Cache, CacheOptions},
    chat::{self, Chat},
    device::{self, DeviceOptions, Task},
    machine,
    model::{self, ModelOptions},
    output,
    sampling::SamplingOptions,
    session_file::{SavedSession, SessionFile},
    summary::CacheSummary,
};
use anyhow::{Result, bail};
use clap::Args;
use clap::builder::FalseyValueParser;
use kivi::{
    DecoderBackend,
    models::{
        Checkpoint, Llama, Session,
        chat::{ChatTemplate, Message},
        generate::{Decoding, FinishReason, Generated},
        sampling::Sampler,
        text::StopMatcher,
        tokenizer::Tokenizer,
    },
};
use serde_json::json;
use std::{
    io::{IsTerminal, Read},
    path::PathBuf,
    time::{Duration, Instant},
};

/// Generate text, or chat.
///
/// The prompt is given to the model as a user's message if the model has a chat template, and as it
/// is with --raw or without one. Without a prompt, on a terminal, this is an interactive chat.
#[derive(Args, Debug)]
pub(super) struct Run {
    /// What to say to the model; read from standard input if that is not a terminal.
    prompt: Option<String>,
    /// Read the prompt from a file instead.
    #[arg(long, env = "KIVI_PROMPT_FILE", conflicts_with = "prompt", value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    #[command(flatten)]
    model: ModelOptions,
    #[command(flatten)]
    device: DeviceOptions,
    #[command(flatten)]
    cache: CacheOptions,
    #[command(flatten)]
    sampling: SamplingOptions,
    /// Generate exactly N tokens: the model is kept from ending its text earlier.
    #[arg(short = 'n', long, env = "KIVI_TOKENS", value_name = "N", conflicts_with_all = ["max_tokens", "stop"])]
    tokens: Option<usize>,
    /// Generate at most N tokens [default: until the model stops or the context is full].
    #[arg(long, env = "KIVI_MAX_TOKENS", value_name = "N")]
    max_tokens: Option<usize>,
    /// Stop before this text; may be given several times.
    #[arg(long, env = "KIVI_STOP", value_name = "TEXT")]
    stop: Vec<String>,
    /// Longest sequence in tokens [default: the model's].
    #[arg(long, env = "KIVI_CONTEXT", value_name = "TOKENS")]
    context: Option<usize>,
    /// A system message.
    #[arg(long, env = "KIVI_SYSTEM", value_name = "TEXT")]
    system: Option<String>,
    /// Give the prompt to the model as it is, without the chat template.
    #[arg(long, env = "KIVI_RAW", value_parser = FalseyValueParser::new(), conflicts_with_all = ["chat", "system"])]
    raw: bool,
    /// Chat interactively, after the prompt if there is one.
    #[arg(long, env = "KIVI_CHAT", value_parser = FalseyValueParser::new())]
    chat: bool,
    /// Go on from the conversation in FILE, if it exists, and save it there afterwards, so that it is
    /// not computed again.
    #[arg(long, env = "KIVI_SESSION", value_name = "FILE")]
    session: Option<PathBuf>,
    /// Print one JSON object with text, speeds and bytes instead of the text.
    #[arg(long, env = "KIVI_JSON", value_parser = FalseyValueParser::new(), conflicts_with = "chat")]
    json: bool,
}

impl Run {
    pub(super) fn execute(self: Box<Self>) -> Result<()> {
        // Everything that can be wrong with the request is found before the weights are loaded.
        let mut prompt = self.read_prompt()?;
        let chat = self.chat || prompt.is_none() && std::io::stdin().is_terminal();
        if chat && (self.json || self.raw) {
            bail!("--json and --raw need a prompt");
        }
        if !chat && prompt.is_none() {
            let mut bytes = Vec::new();
            std::io::stdin()
                .read_to_end(&mut bytes)
                .map_err(|error| anyhow::anyhow!("cannot read standard input: {error}"))?;
            prompt = Some(utf8("standard input", bytes)?);
        }
        if prompt.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
            bail!("the prompt is empty");
        }
        let file = self.session.as_deref().map(SessionFile::open).transpose()?;
        if self.system.is_some() && file.as_ref().is_some_and(|file| !file.tokens().is_empty()) {
            bail!("a system message is for a new session, and this one has begun");
        }
        let device = self.device.clone();
        let checkpoint = self.model.open(!self.json)?;
        device.run(RunTask { run: *self, checkpoint, prompt, chat, file })
    }

    fn read_prompt(&self) -> Result<Option<String>> {
        let Some(path) = &self.prompt_file else { return Ok(self.prompt.clone()) };
        let bytes = std::fs::read(path)
            .map_err(|error| anyhow::anyhow!("cannot read {}: {error}", path.display()))?;
        if bytes.is_empty() {
            bail!("{} is empty", path.display());
        }
        Ok(Some(utf8(&path.display().to_string(), bytes)?))
    }

    /// Tokens of the prompt as the model is to see it, at the beginning of a text or, `later`, after an
    /// answer.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
        prompt: &str,
        later: bool,
    ) -> Result<Vec<u32>> {
        let Some(template) = template.filter(|_| !self.raw) else {
            if self.system.is_some() {
                bail!("a system message needs a chat template, and this model has none");
            }
            return Ok(tokenizer.encode(prompt, !later, false)?);
        };
        if later {
            return Ok(tokenizer.encode(&chat::next_turn(template, prompt)?, false, true)?);
        }
        let mut messages = Vec::new();
        messages.extend(self.system.iter().map(|text| Message::new("system", text)));
        messages.push(Message::new("user", prompt));
        Ok(tokenizer.encode(&template.render(&messages, true)?, false, true)?)
    }
}

/// The text that was read from `source`.
fn utf8(source: &str, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{source} is not valid UTF-8 at byte {at}")
    })
}

struct RunTask {
    run: Run,
    checkpoint: Checkpoint,
    prompt: Option<String>,
    chat: bool,
    file: Option<SessionFile>,
}

/// What is needed to answer a prompt, whoever asks.
pub(super) struct Answering<'a> {
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) sampler: Sampler,
    pub(super) stop: StopMatcher,
    /// Tokens that are never chosen.
    pub(super) forbidden: Vec<u32>,
    pub(super) max_tokens: usize,
    pub(super) context: usize,
}

/// An answer and how long it took.
pub(super) struct Answer {
    pub(super) generated: Generated,
    pub(super) prompt_tokens: usize,
    pub(super) prompt_time: Duration,
    pub(super) generation_time: Duration,
}

impl Answering<'_> {
    /// Appends a prompt to a sequence and generates, printing the text unless `quiet`. `history` are
    /// the tokens of earlier turns, for the repetition penalty.
    pub(super) fn answer<B: DecoderBackend>(
        &mut self,
        session: &mut Session<B>,
        sequence: kivi::SequenceId,
        (history, prompt): (&[u32], &[u32]),
        quiet: bool,
    ) -> Result<Answer> {
        let before = session.state().tokens(sequence)?;
        let used = before + prompt.len();
        if used >= self.context {
            bail!(
                "the prompt of {} tokens does not fit: {before} of the context of {} are used",
                prompt.len(),
                self.context
            );
        }
        let start = Instant::now();
        let logits = session.prompt(sequence, prompt)?;
        let prompt_time = start.elapsed();

        let start = Instant::now();
        let decoding = Decoding {
            tokenizer: self.tokenizer,
            sampler: &mut self.sampler,
            stop: self.stop.clone(),
            forbidden: &self.forbidden,
            max_tokens: self.max_tokens.min(self.context - used),
        };
        let mut failed = None;
        let mut history = [history, prompt].concat();
        let generated = session.generate(sequence, logits, &mut history, decoding, |text| {
            if !quiet {
                failed = output::print(text).err();
            }
            failed.is_none()
        })?;
        let generation_time = start.elapsed();
        match failed {
            Some(error) => Err(error.into()),
            None => {
                Ok(Answer { generated, prompt_tokens: prompt.len(), prompt_time, generation_time })
            }
        }
    }
}

impl Task for RunTask {
    fn run<B: DecoderBackend>(self, backend: B) -> Result<()> {
        let Self { run, checkpoint, prompt, chat, mut file } = self;
        let model_config = checkpoint.config();
        let cache = run.cache.cache(model_config)?;
        let sampler = run.sampling.config(checkpoint.generation_defaults());
        let tokenizer = model::tokenizer(&checkpoint)?;
        let template = model::chat_template(&checkpoint)?;
        if chat && template.is_none() {
            bail!("this model has no chat template, so it cannot chat; give it a prompt");
        }
        let context = match run.context {
            Some(n) if n > model_config.context_length => {
                bail!("context {n} is beyond the model's {}", model_config.context_length)
            }
            Some(n) => n,
            None => model_config.context_length,
        };
        let stop_tokens = model::stop_tokens(&checkpoint, &tokenizer);
        let (stop_tokens, forbidden) = match run.tokens {
            Some(_) => (Vec::new(), stop_tokens),
            None => (stop_tokens, Vec::new()),
        };
        let mut answering = Answering {
            tokenizer: &tokenizer,
            sampler: Sampler::new(sampler)?,
            stop: StopMatcher::new(&stop_tokens, &run.stop)?,
            forbidden,
            max_tokens: run.tokens.or(run.max_tokens).unwrap_or(usize::MAX),
            context,
        };
        let earlier = file.as_ref().map_or(Vec::new(), |file| file.tokens().to_vec());
        let later = !earlier.is_empty();
        let encode = |text: &String| run.encode(&tokenizer, template.as_ref(), text, later);
        let tokens = if chat { None } else { prompt.as_ref().map(encode).transpose()? };
        if let Some(tokens) = &tokens {
            let used = earlier.len() + tokens.len();
            let after = match earlier.len() {
                0 => String::new(),
                earlier => format!(" after {earlier} of the session"),
            };
            if used >= context {
                bail!(
                    "the prompt of {} tokens{after} does not fit the context of {context}",
                    tokens.len()
                );
            }
            if let Some(n) = run.tokens.filter(|&n| n > context - used) {
                bail!(
                    "{n} more tokens after a prompt of {}{after} do not fit the context of {context}",
                    tokens.len()
                );
            }
        }

        let llama = run.model.load(backend, &checkpoint)?;
        if !run.json {
            eprintln!("{}", start_up_line(&run, &checkpoint, &llama, &cache));
        }
        let mut session = cache.session(&llama, 1, context)?;
        if chat && let Some(template) = template {
            return Chat::new(template, run.system, file).converse(&mut session, answering, prompt);
        }
        let sequence = match &mut file {
            Some(file) => file.sequence(&mut session)?,
            None => session.create_sequence()?,
        };
        let prompt = tokens.as_deref().unwrap_or_default();
        let answer = answering.answer(&mut session, sequence, (&earlier, prompt), run.json)?;
        let saved = file.as_ref().map(|file| {
            let mut cached = [&earlier, prompt, &answer.generated.tokens].concat();
            // A token that stopped the answer is not in the cache.
            cached.truncate(session.state().tokens(sequence)?);
            Ok((file, file.save(&session, sequence, &cached)?))
        });
        // An answer that cannot be saved is still shown.
        let (saved, failed) = match saved.transpose() {
            Ok(saved) => (saved, None),
            Err(error) => (None, Some(error)),
        };
        report(&run, &session, sequence, &answer, model_config.context_length, saved)?;
        failed.map_or(Ok(()), Err)
    }
}

fn start_up_line<B: DecoderBackend>(
    run: &Run,
    checkpoint: &Checkpoint,
    llama: &Llama<B>,
    cache: &Cache,
) -> String {
    let model = checkpoint.config();
    format!(
        "{}: {}, {} layers, {} query and {} kv heads of {}; {}; cache: {}",
        run.model.model,
        model.architecture,
        model.layers,
        model.query_heads,
        model.kv_heads,
        model.head_dim,
        device::describe(llama, checkpoint),
        cache.describe(),
    )
}

/// Prints the closing summary, or the JSON object.
fn report<B: DecoderBackend>(
    run: &Run,
    session: &Session<B>,
    sequence: kivi::SequenceId,
    answer: &Answer,
    context: usize,
    saved: Option<(&SessionFile, SavedSession)>,
) -> Result<()> {
    let state = session.state();
    let tokens = state.tokens(sequence)?;
    let (spec, policy) = (state.spec(), state.policy().as_ref());
    let cache = CacheSummary::new(
        spec,
        policy,
        tokens,
        context,
        session.measure(),
        session.memory(sequence)?,
    );
    let generated = answer.generated.tokens.len();
    let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64();
    let prompt_rate = rate(answer.prompt_tokens, answer.prompt_time);
    let generation_rate = rate(generated, answer.generation_time);
    if session.saturated() > 0 {
        eprintln!(
            "warning: {} cached elements were beyond the range of the cache and saturated",
            session.saturated()
        );
    }
    if run.json {
        let resident = machine::resident_bytes();
        let mut fields = json!({
            "text": answer.generated.text,
            "finish": match answer.generated.finish {
                FinishReason::Stop => "stop",
                FinishReason::Length => "length",
                FinishReason::Cancelled => "cancelled",
            },
            "prompt_tokens": answer.prompt_tokens,
            "generated_tokens": generated,
            "prompt_tokens_per_second": prompt_rate,
            "generation_tokens_per_second": generation_rate,
            "cache": cache,
            "resident_bytes": resident.map(|(now, _)| now),
            "peak_resident_bytes": resident.map(|(_, peak)| peak),
        });
        if let Some((_, saved)) = saved {
            fields["session"] = json!(saved);
        }
        return output::print_json(fields);
    }
    output::print("\n")?;
    eprint!(
        "\nprompt: {} tokens, {prompt_rate:.1} tokens/s; generated: {generated} tokens, \
         {generation_rate:.1} tokens/s\n{}",
        answer.prompt_tokens,
        cache.lines()
    );
    if let Some((file, saved)) = saved {
        eprintln!("{}", file.describe(saved));
    }
    Ok(())
}
