//! An engine on a thread of its own, asked by tasks of an async runtime; one of them goes away.
//!
//! ```sh
//! cargo run --release -p kivi-engine --example tokio_service
//! ```

use kivi_cpu::Cpu;
use kivi_engine::{Engine, EngineHandle, Event, Request};
use kivi_models::{
    Checkpoint, Llama,
    fetch::{self, FetchOptions},
    tokenizer::Tokenizer,
};
use std::time::{Duration, Instant};

type Error = Box<dyn std::error::Error + Send + Sync>;

fn start() -> Result<(EngineHandle, Tokenizer), Error> {
    let model = std::env::args().nth(1).unwrap_or_else(|| fetch::DEFAULT_MODEL.into());
    let checkpoint = Checkpoint::open(fetch::resolve(&model, &FetchOptions::default())?)?;
    let tokenizer = Tokenizer::from_source(checkpoint.tokenizer_source()?)?;
    let threads = std::thread::available_parallelism()?.get();
    let model = Llama::load(Cpu::new(threads)?, &checkpoint)?;
    let builder = Engine::builder(&model).kv_memory(64 << 20).max_waiting(100);
    Ok((builder.tokenizer(tokenizer.clone()).build()?.start()?, tokenizer))
}

/// One client: the answer as it comes, or nothing more once `patience` is over.
async fn ask(
    engine: EngineHandle,
    prompt: Vec<u32>,
    patience: Duration,
) -> Result<(String, Duration), Error> {
    let (start, mut first, mut text) = (Instant::now(), Duration::ZERO, String::new());
    let mut events = engine.submit(Request::new(prompt, 64));
    let answer = async {
        while let Some(event) = events.next().await {
            match event {
                Event::Token { text: piece, .. } => {
                    if first.is_zero() {
                        first = start.elapsed();
                    }
                    text.push_str(&piece);
                }
                Event::Finished { text: rest, .. } => text.push_str(&rest),
                Event::Failed(error) => return Err(error.to_string()),
                _ => {}
            }
        }
        Ok(())
    };
    match tokio::time::timeout(patience, answer).await {
        Ok(result) => result?,
        // Dropping the events, here at the end of the function, cancels the request.
        Err(_) => text.push_str(" … (gone)"),
    }
    Ok((text, first))
}

#[tokio::main]
async fn main() -> Result<(), Error> {
    let (engine, tokenizer) = tokio::task::spawn_blocking(start).await??;
    let mut clients = Vec::new();
    for (topic, seconds) in [("the sea", 60.0), ("bread", 60.0), ("the moon", 0.5)] {
        let prompt = tokenizer.encode(&format!("A short note on {topic}:"), true, false)?;
        let patience = Duration::from_secs_f64(seconds);
        clients.push((topic, tokio::spawn(ask(engine.clone(), prompt, patience))));
    }
    for (topic, client) in clients {
        let (text, first) = client.await??;
        println!("{topic} (first token after {first:.0?}): {}", text.replace('\n', " "));
    }
    let stats = engine.stats();
    println!("{} tokens in {} steps", stats.generated_tokens, stats.steps);
    tokio::task::spawn_blocking(move || engine.shut_down()).await?;
    Ok(())
}
