//! Hugging Face directories: single files, shards, and what can be wrong with them.

use super::golden;
use crate::checkpoint::{
    Checkpoint, LayerWeight, ShardIndex, TokenizerConfig, TokenizerSource, WeightName,
};
use crate::config::{Architecture, ModelConfig};
use crate::{Error, Result};
use kivi_core::WeightFormat;
use proptest::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::path::Path;
use tempfile::TempDir;

/// A tensor: name, type, shape.
type Spec = (String, Dtype, Vec<usize>);

/// One layer, width 8, 2 query heads and 1 kv head of 4 elements, MLP 6, 5 tokens.
fn config() -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 5,
        "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
        "bos_token_id": 0, "eos_token_id": [1, 2]
    })
}

fn tensors() -> Vec<Spec> {
    [
        ("model.embed_tokens.weight", vec![5, 8]),
        ("model.norm.weight", vec![8]),
        ("lm_head.weight", vec![5, 8]),
        ("model.layers.0.input_layernorm.weight", vec![8]),
        ("model.layers.0.self_attn.q_proj.weight", vec![8, 8]),
        ("model.layers.0.self_attn.k_proj.weight", vec![4, 8]),
        ("model.layers.0.self_attn.v_proj.weight", vec![4, 8]),
        ("model.layers.0.self_attn.o_proj.weight", vec![8, 8]),
        ("model.layers.0.post_attention_layernorm.weight", vec![8]),
        ("model.layers.0.mlp.gate_proj.weight", vec![6, 8]),
        ("model.layers.0.mlp.up_proj.weight", vec![6, 8]),
        ("model.layers.0.mlp.down_proj.weight", vec![8, 6]),
    ]
    .map(|(name, shape)| (name.to_owned(), Dtype::BF16, shape))
    .to_vec()
}

fn change(name: &str, dtype: Dtype, shape: &[usize]) -> Vec<Spec> {
    let mut tensors = tensors();
    tensors.retain(|(other, ..)| other != name);
    tensors.push((name.to_owned(), dtype, shape.to_vec()));
    tensors
}

/// A safetensors file; every tensor holds the bytes 0, 1, 2 ….
fn serialize(tensors: &[Spec]) -> Vec<u8> {
    let bytes: Vec<u8> = (0..=255).cycle().take(1 << 12).collect();
    let views = tensors.iter().map(|(name, dtype, shape)| {
        let length = shape.iter().product::<usize>() * dtype.bitsize() / 8;
        (name, TensorView::new(*dtype, shape.clone(), &bytes[..length]).unwrap())
    });
    safetensors::serialize(views, None).unwrap()
}

fn write(directory: &Path, name: &str, contents: impl AsRef<[u8]>) {
    std::fs::write(directory.join(name), contents).unwrap();
}

fn directory(config: &Value, tensors: &[Spec]) -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "config.json", config.to_string());
    write(directory.path(), "model.safetensors", serialize(tensors));
    directory
}

fn open(config: &Value, tensors: &[Spec]) -> Result<Checkpoint> {
    Checkpoint::open(directory(config, tensors).path())
}

/// Opens the small model in two shards, with `index` in place of the right `weight_map`.
fn open_shards(index: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Result<Checkpoint> {
    let directory = tempfile::tempdir().unwrap();
    write(directory.path(), "config.json", config().to_string());
    let tensors = tensors();
    let (first, second) = tensors.split_at(5);
    let mut weight_map = serde_json::Map::new();
    for (file, shard) in [("model-1.safetensors", first), ("model-2.safetensors", second)] {
        write(directory.path(), file, serialize(shard));
        weight_map.extend(shard.iter().map(|(name, ..)| (name.clone(), json!(file))));
    }
    index(&mut weight_map);
    let index = json!({ "metadata": { "total_size": 1 }, "weight_map": weight_map });
    write(directory.path(), "model.safetensors.index.json", index.to_string());
    Checkpoint::open(directory.path())
}

fn refused(result: Result<Checkpoint>, message: &str) -> Error {
    let error = result.expect_err(message);
    let text = error.to_string();
    assert!(text.contains(message), "{text:?} does not contain {message:?}");
    assert!(!text.contains('\n'));
    error
}

#[test]
fn a_single_file_opens() {
    let directory = directory(&config(), &tensors());
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let name = directory.path().file_name().unwrap().to_string_lossy();
    assert_eq!(checkpoint.config().name, name);
    let down = checkpoint.required_weight(WeightName::Layer(0, LayerWeight::MlpDown)).unwrap();
    assert_eq!((down.format(), down.shape()), (WeightFormat::Bf16, [8, 6]));
    assert_eq!(down.bytes()[..4], [0, 1, 2, 3]);
    assert_eq!(checkpoint.weight(WeightName::Output).unwrap().shape(), [5, 8]);
    assert_eq!(checkpoint.inventory().len(), 12);
    // Without a generation_config.json the tokens come from config.json.
    assert_eq!(checkpoint.generation_defaults().eos_token_ids, [1, 2]);
    assert_eq!((checkpoint.chat_template(), checkpoint.bos_token()), (None, None));
}

#[test]
fn a_tied_model_ignores_a_second_copy() {
    let mut config = config();
    config["tie_word_embeddings"] = true.into();
    let checkpoint = open(&config, &tensors()).unwrap();
    assert!(checkpoint.weight(WeightName::Output).is_none());
    let mut tensors = tensors();
    tensors.retain(|(name, ..)| name != "lm_head.weight");
    open(&config, &tensors).unwrap();
    config["tie_word_embeddings"] = false.into();
    refused(open(&config, &tensors), "tensor lm_head.weight is missing");
}

#[test]
fn wrong_tensors_are_refused() {
    let norm = "model.norm.weight";
    let open = |tensors: Vec<Spec>| open(&config(), &tensors);
    open(change(norm, Dtype::F32, &[8])).unwrap();
    open(change(norm, Dtype::F16, &[8])).unwrap();
    open(change("model.layers.0.self_attn.rotary_emb.inv_freq", Dtype::F32, &[2])).unwrap();
    let error =
        refused(open(change(norm, Dtype::I32, &[8])), "tensor \"model.norm.weight\" of type I32");
    assert!(matches!(error.root(), Error::UnsupportedFeature { .. }));
    refused(open(change(norm, Dtype::F8_E4M3, &[8])), "of type F8_E4M3");
    let error = refused(
        open(change(norm, Dtype::F32, &[9])),
        "has shape [9], the configuration needs [1, 8]",
    );
    assert!(matches!(error.root(), Error::WrongShape { .. }));
    refused(open(change(norm, Dtype::F32, &[])), "has shape []");
    refused(open(change("lm_head.weight", Dtype::F32, &[5, 2, 4])), "has shape [5, 2, 4]");
    refused(open(change("lm_head.weight", Dtype::F32, &[8, 5])), "has shape [8, 5]");
    refused(
        open(change("model.layers.1.mlp.up_proj.weight", Dtype::F32, &[6, 8])),
        "which a llama model of 1 layers",
    );
    refused(
        open(change("model.layers.0.self_attn.q_norm.weight", Dtype::F32, &[4])),
        "q_norm.weight\", which",
    );
}

#[test]
fn damaged_files_are_refused() {
    let directory = directory(&config(), &tensors());
    let file = std::fs::read(directory.path().join("model.safetensors")).unwrap();
    for length in [0, 7, 8, 100, file.len() - 1] {
        write(directory.path(), "model.safetensors", &file[..length]);
        let error =
            refused(Checkpoint::open(directory.path()), "model.safetensors: invalid safetensors");
        assert!(matches!(error.root(), Error::InvalidSafetensors { .. }));
    }
    write(directory.path(), "model.safetensors", [&u64::MAX.to_le_bytes(), &file[8..]].concat());
    refused(Checkpoint::open(directory.path()), "header too large");
    write(directory.path(), "config.json", "{");
    refused(Checkpoint::open(directory.path()), "config.json: invalid JSON");
    std::fs::remove_file(directory.path().join("model.safetensors")).unwrap();
    write(directory.path(), "config.json", config().to_string());
    let error = refused(Checkpoint::open(directory.path()), "model.safetensors is missing");
    assert!(matches!(error, Error::MissingFile { .. }));
    write(directory.path(), "pytorch_model.bin", "");
    refused(
        Checkpoint::open(directory.path()),
        "weights in pytorch_model.bin (supported: safetensors)",
    );
}

#[test]
fn shards_must_match_their_index() {
    let norm = "model.norm.weight";
    assert_eq!(open_shards(|_| {}).unwrap().inventory().len(), 12);
    let set = |name: &str, file: &str| {
        open_shards(|map| {
            map.insert(name.to_owned(), file.into());
        })
    };
    let error = refused(set(norm, "model-3.safetensors"), "the index does not list it there");
    assert!(matches!(error.root(), Error::InvalidSafetensors { .. }));
    refused(
        set("lm_head.bias", "model-1.safetensors"),
        "lists tensor \"lm_head.bias\" in model-1.safetensors",
    );
    let error =
        refused(set("lm_head.bias", "model-0.safetensors"), "model-0.safetensors is missing");
    assert!(matches!(error, Error::MissingFile { .. }));
    let without = |name: &'static str| {
        open_shards(move |map| {
            map.remove(name);
        })
    };
    refused(without(norm), "model-1.safetensors holds tensor \"model.norm.weight\"");
    refused(open_shards(serde_json::Map::clear), "the index lists no tensor");
    for escape in [
        "../model-1.safetensors",
        "/model",
        "a/b",
        "a\\b",
        "C:b",
        "..",
        ".",
        "",
        "a/",
        "./a",
        "a\0b",
    ] {
        refused(set(norm, escape), "which is not a file in its directory");
    }
}

#[test]
fn the_index_parses_or_is_refused() {
    let parse = |json: &str| ShardIndex::parse(json.as_bytes());
    let index =
        parse(r#"{"weight_map":{"b":"2.safetensors","a":"1.safetensors","c":"2.safetensors"}}"#)
            .unwrap();
    assert_eq!(index.files().into_iter().collect::<Vec<_>>(), ["1.safetensors", "2.safetensors"]);
    assert_eq!(index.weight_map()["c"], "2.safetensors");
    for bad in ["", "[]", "{}", r#"{"weight_map":[]}"#, r#"{"weight_map":{"a":1}}"#] {
        assert!(matches!(parse(bad), Err(Error::InvalidJson { .. })), "{bad}");
    }
    // serde_json stops at a nesting of 128.
    assert!(parse(&"[".repeat(100_000)).is_err());
}

#[test]
fn chat_templates_and_special_tokens() {
    let directory = directory(&config(), &tensors());
    let path = directory.path();
    let reopen = |tokenizer_config: Value| {
        write(path, "tokenizer_config.json", tokenizer_config.to_string());
        Checkpoint::open(path).unwrap()
    };
    let checkpoint = reopen(json!({
        "chat_template": "one", "bos_token": "<s>",
        "eos_token": { "__type": "AddedToken", "content": "</s>", "lstrip": false }
    }));
    assert_eq!(checkpoint.chat_template(), Some("one"));
    assert_eq!((checkpoint.bos_token(), checkpoint.eos_token()), (Some("<s>"), Some("</s>")));
    let named =
        json!([{ "name": "tool_use", "template": "t" }, { "name": "default", "template": "d" }]);
    let checkpoint = reopen(json!({ "chat_template": named, "bos_token": null }));
    assert_eq!((checkpoint.chat_template(), checkpoint.bos_token()), (Some("d"), None));
    write(path, "chat_template.jinja", "file");
    assert_eq!(reopen(json!({ "chat_template": "one" })).chat_template(), Some("file"));
    write(path, "chat_template.jinja", [0xFF]);
    refused(Checkpoint::open(path), "a chat template that is not UTF-8");
}

#[test]
fn tokenizer_files_are_looked_for() {
    let directory = directory(&config(), &tensors());
    let source = || Checkpoint::open(directory.path()).unwrap().tokenizer_source();
    assert!(source().unwrap_err().to_string().contains("no tokenizer.json"));
    write(directory.path(), "tokenizer.model", "");
    assert!(source().unwrap_err().to_string().contains("tokenizer.model alone is not enough"));
    write(directory.path(), "tokenizer.json", "{}");
    let path = directory.path().join("tokenizer.json");
    assert_eq!(
        source().unwrap(),
        TokenizerSource::HuggingFace { path, config: TokenizerConfig::default() }
    );
}

#[test]
fn special_tokens_must_be_in_the_vocabulary() {
    let directory = directory(&config(), &tensors());
    write(directory.path(), "generation_config.json", json!({ "eos_token_id": 5 }).to_string());
    refused(
        Checkpoint::open(directory.path()),
        "the special token 5 is outside the vocabulary of 5",
    );
}

#[test]
fn missing_token_ids_come_from_the_configuration() {
    let directory = directory(&config(), &tensors());
    write(
        directory.path(),
        "generation_config.json",
        json!({ "top_p": 0.9, "bos_token_id": 3 }).to_string(),
    );
    let checkpoint = Checkpoint::open(directory.path()).unwrap();
    let defaults = checkpoint.generation_defaults();
    assert_eq!((defaults.top_p, defaults.bos_token_id), (Some(0.9), Some(3)));
    assert_eq!(defaults.eos_token_ids, [1, 2]);
}

#[test]
fn messages_are_short_whatever_the_file_holds() {
    let text = format!("a\n{}", "b".repeat(1 << 20));
    let mut wrong = config();
    wrong["hidden_size"] = json!(text);
    let error = open(&wrong, &tensors()).unwrap_err().to_string();
    assert!(error.len() < 500 && !error.contains('\n'), "{error}");
    let mut wrong = config();
    wrong["model_type"] = json!(text);
    let error = open(&wrong, &tensors()).unwrap_err().to_string();
    assert!(error.len() < 500 && !error.contains('\n'), "{error}");
}

/// Directories written by transformers.
#[test]
fn reference_models_open() {
    let open = |name: &str| Checkpoint::open(golden(name)).unwrap();
    let llama = open("llama2-tiny");
    assert_eq!(llama.config().architecture, Architecture::Llama);
    assert_eq!((llama.config().layers, llama.config().head_dim), (2, 32));
    assert_eq!(llama.required_weight(WeightName::Output).unwrap().format(), WeightFormat::F16);
    assert_eq!(
        (llama.bos_token(), llama.generation_defaults().eos_token_ids.as_slice()),
        (Some("<s>"), &[263][..])
    );
    let mistral = open("mistral-tiny");
    assert_eq!(mistral.config().architecture, Architecture::Mistral);
    assert_eq!(mistral.config().rope.theta, 1e6);
    let query = mistral.required_weight(WeightName::Layer(1, LayerWeight::Query)).unwrap();
    assert_eq!((query.format(), query.shape()), (WeightFormat::Bf16, [96, 48]));
    let config: ModelConfig = mistral.config().clone();
    assert_eq!(config.weight_names().count(), mistral.inventory().len());
}

proptest! {
    #[test]
    fn any_index_is_refused_or_stays_inside(json in "\\{\"weight_map\":\\{\"a\":\"[./a\\\\:]{0,6}\"\\}\\}") {
        if let Ok(index) = ShardIndex::parse(json.as_bytes()) {
            for file in index.files() {
                let path = Path::new("/m").join(file);
                prop_assert_eq!(path.parent(), Some(Path::new("/m")));
            }
        }
    }
}
