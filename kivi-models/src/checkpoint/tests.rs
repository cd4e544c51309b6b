//! Whole checkpoints: small ones written here, and the reference models under `tests/golden`.

mod gguf;
mod hugging_face;
mod writer;

use super::{Checkpoint, LayerWeight, TokenizerSource, WeightName};
use crate::config::{ModelConfig, RopeScaling, RopeStyle};
use crate::{Error, Result};
use kivi_core::WeightFormat;
use std::path::{Path, PathBuf};
use writer::Writer;

/// Opens `file` written to disk.
fn open_file(name: &str, file: &[u8]) -> Result<Checkpoint> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join(name);
    std::fs::write(&path, file).unwrap();
    Checkpoint::open(path)
}

fn open_gguf(writer: &Writer) -> Result<Checkpoint> {
    open_file("model.gguf", &writer.build())
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/models").join(name)
}

#[test]
fn a_gguf_model_opens() {
    let checkpoint = open_gguf(&Writer::model()).unwrap();
    let config = checkpoint.config();
    assert_eq!(config.name, "Test");
    assert_eq!((config.vocab_size, config.hidden_size, config.layers), (6, 32, 2));
    assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (4, 2, 8));
    assert_eq!((config.intermediate_size, config.context_length), (64, 128));
    assert_eq!((config.norm_eps, config.rope.theta), (0.5, 1000.0));
    assert_eq!(config.rope.style, RopeStyle::Interleaved);
    assert_eq!((&config.rope.scaling, config.rope.rotary_dim), (&RopeScaling::None, 8));
    assert!(config.tied_embeddings);

    let key = checkpoint.required_weight(WeightName::Layer(1, LayerWeight::Key)).unwrap();
    assert_eq!((key.format(), key.shape()), (WeightFormat::Q8_0, [16, 32]));
    assert_eq!(key.bytes()[..4], [1, 2, 3, 4]);
    let norm = checkpoint.required_weight(WeightName::OutputNorm).unwrap();
    assert_eq!((norm.format(), norm.shape()), (WeightFormat::F32, [1, 32]));
    assert!(checkpoint.weight(WeightName::Output).is_none());
    let error = checkpoint.required_weight(WeightName::Layer(2, LayerWeight::Key)).unwrap_err();
    assert!(error.to_string().ends_with("tensor blk.2.attn_k.weight is missing"));

    let inventory = checkpoint.inventory();
    assert_eq!(inventory.len(), 2 + 2 * 9);
    assert_eq!(
        (inventory[0].name.as_str(), &inventory[0].shape[..]),
        ("token_embd.weight", &[6, 32][..])
    );
    assert_eq!((inventory[0].format.as_str(), inventory[0].bytes), ("Q8_0", 204));

    assert_eq!(checkpoint.chat_template(), Some("{{ bos_token }}"));
    assert_eq!((checkpoint.bos_token(), checkpoint.eos_token()), (Some("<s>"), Some("</s>")));
    let defaults = checkpoint.generation_defaults();
    assert_eq!((&defaults.eos_token_ids[..], defaults.bos_token_id), (&[4][..], Some(3)));
    assert_eq!(defaults.pad_token_id, None);
    let TokenizerSource::Gguf(vocabulary) = checkpoint.tokenizer_source().unwrap() else {
        panic!("a GGUF file has its own vocabulary");
    };
    assert_eq!(vocabulary.tokens, ["a", "b", "ab", "<s>", "</s>", "é"]);
    assert_eq!((vocabulary.token_types.len(), vocabulary.scores.len()), (6, 0));
    assert_eq!(vocabulary.merges, ["a b"]);
    assert_eq!((vocabulary.bos_id, vocabulary.add_bos), (Some(3), Some(true)));
    assert_eq!((vocabulary.pad_id, vocabulary.add_eos), (None, None));
}

#[test]
fn debug_output_holds_no_weights() {
    let checkpoint = open_gguf(&Writer::model()).unwrap();
    assert!(format!("{checkpoint:?}").len() < 1000);
    let gguf = super::Gguf::parse(Writer::model().build().into()).unwrap();
    assert!(format!("{gguf:?}").len() < 10_000);
}

#[test]
fn weights_outlive_the_checkpoint_and_the_directory_entry() {
    let checkpoint = open_gguf(&Writer::model()).unwrap();
    let weight = checkpoint.required_weight(WeightName::TokenEmbedding).unwrap();
    drop(checkpoint);
    assert_eq!(weight.row(0)[..4], [1, 2, 3, 4]);
}

#[test]
fn variants_of_the_metadata() {
    let config = |writer: Writer| open_gguf(&writer).map(|checkpoint| checkpoint.config().clone());
    // The same number for every layer is the number.
    let heads = writer::array(4, 2, &[2, 0, 0, 0, 2, 0, 0, 0]);
    let writer = Writer::model().key("llama.attention.head_count_kv", heads);
    assert_eq!(config(writer).unwrap().kv_heads, 2);
    let writer = Writer::model()
        .key("llama.rope.scaling.type", writer::text("linear"))
        .key("llama.rope.scaling.factor", writer::f32(4.0));
    assert_eq!(config(writer).unwrap().rope.scaling, RopeScaling::Linear { factor: 4.0 });
    let writer = Writer::model().key("llama.rope.dimension_count", writer::u32(4));
    assert_eq!(config(writer).unwrap().rope.rotary_dim, 4);
    let writer = Writer::model().without("general.name");
    assert_eq!(config(writer).unwrap().name, "model");
    let writer = Writer::model().tensor("output.weight", writer::F16, &[32, 6], 384);
    assert!(!config(writer).unwrap().tied_embeddings);

    let mut writer = Writer::model().tensor("rope_freqs.weight", writer::F32, &[4], 16);
    let bytes = &mut writer.tensors.last_mut().unwrap().bytes;
    *bytes = [1f32, 1.0, 2.5, 8.0].iter().flat_map(|factor| factor.to_le_bytes()).collect();
    let factors = RopeScaling::Factors(vec![1.0, 1.0, 2.5, 8.0]);
    assert_eq!(config(writer).unwrap().rope.scaling, factors);

    let mut biased = Writer::model();
    for layer in 0..2 {
        for (name, size) in [("q", 32), ("k", 16), ("v", 16), ("output", 32)] {
            let name = format!("blk.{layer}.attn_{name}.bias");
            biased = biased.tensor(&name, writer::F32, &[size], 4 * size as usize);
        }
    }
    let checkpoint = open_gguf(&biased).unwrap();
    assert!(checkpoint.config().attention_bias && !checkpoint.config().mlp_bias);
    let bias = checkpoint.required_weight(WeightName::Layer(1, LayerWeight::ValueBias)).unwrap();
    assert_eq!(bias.shape(), [1, 16]);
    let error = open_gguf(&biased.without("blk.1.attn_q.bias")).unwrap_err();
    assert!(matches!(error.root(), Error::MissingTensor { name } if name == "blk.1.attn_q.bias"));
}

/// The small model with something changed, and what the error says.
#[test]
fn gguf_models_that_cannot_be_run_are_refused() {
    let model = Writer::model;
    let u32 = writer::u32;
    for (writer, message) in [
        (
            model().key("general.architecture", writer::text("qwen3")),
            "architecture \"qwen3\" is not",
        ),
        (model().without("general.architecture"), "general.architecture is missing"),
        (model().without("llama.block_count"), "llama.block_count is missing"),
        (model().key("llama.block_count", writer::f32(2.0)), "llama.block_count is not an integer"),
        (model().key("llama.block_count", u32(0)), "number of layers is 0"),
        (model().key("llama.block_count", u32(3)), "tensor blk.2.attn_norm.weight is missing"),
        (model().key("llama.block_count", u32(1)), "tensor \"blk.1.attn_q.weight\", which"),
        (
            model().key("llama.embedding_length", u32(64)),
            "has shape [6, 32], the configuration needs [6, 64]",
        ),
        (model().key("llama.attention.head_count", u32(0)), "among 0 query heads"),
        (model().key("llama.attention.head_count_kv", u32(3)), "4 query heads cannot share 3 kv"),
        (
            model().key(
                "llama.attention.head_count_kv",
                writer::array(4, 2, &[2, 0, 0, 0, 1, 0, 0, 0]),
            ),
            "llama.attention.head_count_kv that differs between layers",
        ),
        (model().key("llama.attention.value_length", u32(4)), "value heads of 4 elements"),
        (model().key("llama.expert_count", u32(8)), "a mixture of 8 experts"),
        (model().key("llama.logit_scale", writer::f32(0.5)), "key \"llama.logit_scale\""),
        (model().key("llama.attention.sliding_window", u32(64)), "a sliding window of 64 tokens"),
        (model().key("llama.rope.scaling.type", writer::text("yarn")), "rope type \"yarn\""),
        (model().key("split.count", (2, vec![2, 0])), "split over several files"),
        (
            model().key("tokenizer.ggml.eos_token_id", u32(6)),
            "eos_token_id is 6, there are 6 tokens",
        ),
        (model().without("token_embd.weight"), "tensor token_embd.weight is missing"),
        (model().without("blk.0.ffn_up.weight"), "tensor blk.0.ffn_up.weight is missing"),
        (
            model().tensor("blk.0.attn_q_norm.weight", writer::F32, &[8], 32),
            "tensor \"blk.0.attn_q_norm.weight\", which a llama model",
        ),
        (
            model().without("output_norm.weight").tensor(
                "output_norm.weight",
                writer::F32,
                &[31],
                124,
            ),
            "output_norm.weight has shape [31], the configuration needs [1, 32]",
        ),
        (
            model().without("output_norm.weight").tensor("output_norm.weight", 26, &[32], 128),
            "tensor \"output_norm.weight\" of type I32",
        ),
        (model().tensor("rope_freqs.weight", writer::F32, &[3], 12), "3 rope factors for 4 pairs"),
        (
            model().without("token_embd.weight").tensor(
                "token_embd.weight",
                writer::F16,
                &[32, 5],
                320,
            ),
            "6 tokens for an embedding of 5 rows",
        ),
    ] {
        let error = open_gguf(&writer).expect_err(message).to_string();
        assert!(error.contains(message), "{error:?} does not contain {message:?}");
        assert!(error.contains("model.gguf: ") && !error.contains('\n'), "{error:?}");
    }
}

#[test]
fn what_is_not_a_model_is_refused() {
    let not_a_model = |result: Result<Checkpoint>, reason: &str| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::NotAModel { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    };
    not_a_model(open_file("model.gguf", b""), "the file is empty");
    not_a_model(open_file("model.gguf", b"GG"), "neither a directory nor a GGUF file");
    not_a_model(open_file("model.bin", b"something"), "neither a directory nor a GGUF file");
    not_a_model(open_file("model.safetensors", &[0; 64]), "give its directory");
    let directory = tempfile::tempdir().unwrap();
    not_a_model(Checkpoint::open(directory.path()), "no config.json");
    std::fs::write(directory.path().join("tiny.gguf"), b"GGUF").unwrap();
    not_a_model(Checkpoint::open(directory.path()), "it holds \"tiny.gguf\", give that file");
    let absent = Checkpoint::open(directory.path().join("absent")).unwrap_err();
    assert!(matches!(absent, Error::Io { .. }));
    assert!(absent.to_string().starts_with("cannot read "));
}

#[test]
fn a_model_without_vocabulary_opens_but_has_no_tokenizer() {
    let writer = Writer::model().without("tokenizer.ggml.model");
    let error = open_gguf(&writer).unwrap().tokenizer_source().unwrap_err();
    assert!(matches!(error, Error::MissingTokenizer { .. }));
    let scores = writer::array(6, 5, &[0; 20]);
    let writer = Writer::model().key("tokenizer.ggml.scores", scores);
    let error = open_gguf(&writer).unwrap().tokenizer_source().unwrap_err();
    assert!(error.to_string().ends_with("tokenizer.ggml.scores is not a list of 6 numbers"));
}

/// The same model, written by transformers and by the Python package `gguf`.
#[test]
fn both_layouts_of_one_model_agree() {
    let directory = Checkpoint::open(golden("llama3-tiny")).unwrap();
    let file = Checkpoint::open(golden("llama3-tiny.gguf")).unwrap();
    let RopeScaling::Factors(factors) = &file.config().rope.scaling else {
        panic!("{:?}", file.config().rope);
    };
    assert_eq!(factors.len(), 8);
    // Llama 3.1's scheme leaves short waves alone and stretches long ones by its factor, 8.
    assert_eq!((factors[0], factors[7]), (1.0, 8.0));
    let mut expected =
        ModelConfig { rope: file.config().rope.clone(), ..directory.config().clone() };
    // GGUF stores the epsilon in single precision.
    expected.norm_eps = f64::from(directory.config().norm_eps as f32);
    assert_eq!(*file.config(), expected);
    for name in directory.config().weight_names() {
        let (a, b) =
            (directory.required_weight(name).unwrap(), file.required_weight(name).unwrap());
        assert_eq!((a.format(), a.shape()), (b.format(), b.shape()), "{name}");
        let permuted = matches!(name, WeightName::Layer(_, LayerWeight::Query | LayerWeight::Key));
        assert_eq!(a.bytes() == b.bytes(), !permuted, "{name}");
    }
    assert_eq!(file.chat_template(), directory.chat_template());
    assert_eq!(
        (file.bos_token(), file.eos_token()),
        (directory.bos_token(), directory.eos_token())
    );
    assert_eq!(file.generation_defaults(), directory.generation_defaults());
}
