//! An engine in a plain loop: three prompts at once over 64 MiB of cache, one thread, no runtime.
//!
//! ```sh
//! cargo run --release -p kivi-engine --example plain_loop
//! ```

use kivi_cpu::Cpu;
use kivi_engine::{Engine, Request};
use kivi_models::{
    Checkpoint, Llama,
    fetch::{self, FetchOptions},
    tokenizer::Tokenizer,
};

const PROMPTS: [&str; 3] =
    ["The capital of France is", "Water boils at", "The three primary colours are red,"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).unwrap_or_else(|| fetch::DEFAULT_MODEL.into());
    let checkpoint = Checkpoint::open(fetch::resolve(&model, &FetchOptions::default())?)?;
    let tokenizer = Tokenizer::from_source(checkpoint.tokenizer_source()?)?;
    let threads = std::thread::available_parallelism()?.get();
    let model = Llama::load(Cpu::new(threads)?, &checkpoint)?;

    let mut engine =
        Engine::builder(&model).kv_memory(64 << 20).tokenizer(tokenizer.clone()).build()?;
    let mut answers = Vec::new();
    for prompt in PROMPTS {
        let tokens = tokenizer.encode(prompt, true, false)?;
        answers.push(engine.submit(Request::new(tokens, 24))?);
    }
    while engine.step()? {
        // Whatever else the program does goes here.
    }
    for (prompt, events) in PROMPTS.iter().zip(answers) {
        for answer in events.collect_now()? {
            println!("{prompt}{}", answer.text.replace('\n', " "));
        }
    }
    let stats = engine.stats();
    println!(
        "{} tokens in {} steps, peak {} bytes",
        stats.generated_tokens, stats.steps, stats.peak_bytes
    );
    Ok(())
}
