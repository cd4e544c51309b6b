//! Beam search against the answers of Hugging Face transformers (`tools/golden_beams.py`), and over a
//! quantized cache against itself.

use kivi_core::{CacheConfig, Format};
use kivi_cpu::Cpu;
use kivi_models::{Beam, BeamOptions, Checkpoint, Llama, Session};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::PathBuf;

fn golden() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn model(name: &str) -> (Llama<Cpu>, Vec<u32>) {
    let folder = golden().join("models").join(name);
    let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (chunks, _) = file.tensor("prompt").unwrap().data().as_chunks::<8>();
    let prompt = chunks.iter().map(|bytes| i64::from_le_bytes(*bytes) as u32).collect();
    let checkpoint = Checkpoint::open(folder).unwrap();
    (Llama::load(Cpu::new(2).unwrap(), &checkpoint).unwrap(), prompt)
}

#[test]
fn beams_are_those_of_transformers() {
    let text = std::fs::read_to_string(golden().join("beams.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    let numbers = |value: &Value| -> Vec<u32> {
        value.as_array().unwrap().iter().map(|n| n.as_u64().unwrap() as u32).collect()
    };
    assert_eq!(cases.len(), 12);
    for case in cases {
        let (model, prompt) = model(case["model"].as_str().unwrap());
        let config = CacheConfig::builder().key(Format::F32).value(Format::F32).build().unwrap();
        let options = BeamOptions {
            beams: case["beams"].as_u64().unwrap() as usize,
            max_tokens: case["max_tokens"].as_u64().unwrap() as usize,
            stop_tokens: numbers(&case["stop"]),
            length_penalty: case["length_penalty"].as_f64().unwrap() as f32,
        };
        let mut session = Session::new(&model, config, options.beams, 256).unwrap();
        let found = session.beam_search(&prompt, &options).unwrap();
        assert_eq!(session.state().sequence_count(), 0);
        let expected = case["answers"].as_array().unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.tokens, numbers(&expected["tokens"]), "{case}");
            let score = expected["score"].as_f64().unwrap() as f32;
            assert!((found.score - score).abs() < 1e-4 * score.abs(), "{found:?}, not {score}");
        }
    }
}

/// Every answer, computed as a sequence of its own, has the score that the search found: forks and
/// reorders leave each beam with its own cache.
#[test]
fn scores_over_codes_are_those_of_the_answers_alone() {
    let (model, prompt) = model("llama3-tiny");
    let prompt: Vec<u32> = prompt.iter().cycle().take(90).copied().collect();
    let builder = CacheConfig::builder().group_size(16).residual_length(32);
    let config = builder.build().unwrap();
    let options =
        BeamOptions { beams: 6, max_tokens: 50, stop_tokens: vec![], length_penalty: 0.0 };
    let mut session = Session::new(&model, config.clone(), 6, 256).unwrap();
    let found = session.beam_search(&prompt, &options).unwrap();
    assert_eq!(found.len(), 6);
    for Beam { tokens, score } in found {
        let mut session = Session::new(&model, config.clone(), 1, 256).unwrap();
        let sequence = session.create_sequence().unwrap();
        let mut logits = session.prompt(sequence, &prompt).unwrap();
        let mut total = 0.0f64;
        for &token in &tokens {
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
            total += f64::from(logits[token as usize]) - sum.ln();
            logits = session.generate_step(&[(sequence, &[token])]).unwrap();
        }
        assert!((total - f64::from(score)).abs() < 1e-4 * total.abs(), "{score}, not {total}");
    }
}

#[test]
fn wrong_searches_and_orders_are_refused() {
    let (model, prompt) = model("llama2-tiny");
    let config = CacheConfig::builder().build().unwrap();
    let mut session = Session::new(&model, config, 2, 256).unwrap();
    let options = BeamOptions { beams: 0, max_tokens: 5, stop_tokens: vec![], length_penalty: 1.0 };
    let error = session.beam_search(&prompt, &options).unwrap_err().to_string();
    assert_eq!(error, "beam search: 0 beams of 5 tokens");
    // Three beams do not fit two slots; nothing stays behind.
    let error = session.beam_search(&prompt, &BeamOptions { beams: 3, ..options }).unwrap_err();
    assert!(error.to_string().contains("sequence slots"), "{error}");
    assert_eq!(session.state().sequence_count(), 0);
    let mut sequences = [session.create_sequence().unwrap(), session.create_sequence().unwrap()];
    assert!(session.reorder(&mut sequences, &[0]).is_err());
    assert!(session.reorder(&mut sequences, &[0, 2]).is_err());
    session.reorder(&mut sequences, &[1, 1]).unwrap();
    assert_eq!(session.state().sequence_count(), 2);
}
