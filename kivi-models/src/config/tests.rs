//! The `config.json` files of published models, by hand, with what they mean.

use super::{Activation, Architecture, GenerationDefaults, ModelConfig, RopeScaling, RopeStyle};
use crate::Error;
use proptest::prelude::*;
use serde_json::{Value, json};

fn parse(config: &Value) -> crate::Result<ModelConfig> {
    ModelConfig::from_hf_json(config.to_string().as_bytes())
}

/// `meta-llama/Llama-2-7b-hf`.
fn llama_2_7b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16", "use_cache": true,
        "vocab_size": 32000
    })
}

/// `meta-llama/Llama-3.1-8B-Instruct`.
fn llama_31_8b() -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3"
        },
        "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256
    })
}

/// `mistralai/Mistral-7B-v0.3`.
fn mistral_7b_v03() -> Value {
    json!({
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,
        "vocab_size": 32768
    })
}

#[test]
fn llama_2() {
    let config = parse(&llama_2_7b()).unwrap();
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.hidden_size, config.intermediate_size), (4096, 11008));
    assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (32, 32, 128));
    assert_eq!((config.layers, config.vocab_size, config.context_length), (32, 32000, 4096));
    assert_eq!(config.norm_eps, 1e-5);
    assert_eq!(config.rope.theta, 10_000.0);
    assert_eq!(config.rope.scaling, RopeScaling::None);
    assert_eq!(config.rope.style, RopeStyle::Halves);
    assert_eq!(config.rope.rotary_dim, 128);
    assert_eq!(config.activation, Activation::Silu);
    assert!(!config.tied_embeddings && !config.attention_bias && !config.mlp_bias);
    assert_eq!(config.sliding_window, None);
}

#[test]
fn llama_31() {
    let config = parse(&llama_31_8b()).unwrap();
    assert_eq!((config.query_size(), config.kv_size()), (4096, 1024));
    assert_eq!((config.vocab_size, config.context_length), (128_256, 131_072));
    assert_eq!(config.rope.theta, 500_000.0);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    assert_eq!(config.rope.scaling, scaling);
    let json = llama_31_8b().to_string();
    let generation = GenerationDefaults::from_json(json.as_bytes()).unwrap();
    assert_eq!(generation.eos_token_ids, [128_001, 128_008, 128_009]);
    assert_eq!(generation.bos_token_id, Some(128_000));
}

/// `HuggingFaceTB/SmolLM2-135M-Instruct`.
#[test]
fn smollm2() {
    let config = parse(&json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
        "initializer_range": 0.041666666666666664, "intermediate_size": 1536,
        "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30,
        "num_key_value_heads": 3, "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
        "tie_word_embeddings": true, "torch_dtype": "bfloat16",
        "transformers.js_config": { "kv_cache_dtype": { "q4f16": "float16" } },
        "use_cache": true, "vocab_size": 49152
    }))
    .unwrap();
    assert_eq!((config.query_heads, config.kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!(config.rope.theta, 100_000.0);
    assert!(config.tied_embeddings);
}

/// `TinyLlama/TinyLlama-1.1B-Chat-v1.0`.
#[test]
fn tinyllama() {
    let config = parse(&json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5632, "max_position_embeddings": 2048, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 22, "num_key_value_heads": 4,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000
    }))
    .unwrap();
    assert_eq!((config.layers, config.head_dim, config.kv_size()), (22, 64, 256));
}

#[test]
fn mistral_and_its_window() {
    let config = parse(&mistral_7b_v03()).unwrap();
    assert_eq!(config.architecture, Architecture::Mistral);
    assert_eq!((config.head_dim, config.kv_heads, config.rope.theta), (128, 8, 1e6));
    assert_eq!(config.sliding_window, None);

    let window = |window: Option<Value>| {
        let mut json = mistral_7b_v03();
        let fields = json.as_object_mut().unwrap();
        match window {
            Some(value) => fields.insert("sliding_window".to_owned(), value),
            None => fields.remove("sliding_window"),
        };
        parse(&json)
    };
    // A window that holds the whole context masks nothing.
    assert_eq!(window(Some(json!(32768))).unwrap().sliding_window, None);
    assert!(matches!(window(Some(json!(4096))), Err(Error::UnsupportedFeature { .. })));
    assert!(matches!(window(Some(json!(0))), Err(Error::InvalidConfig { .. })));
    // `MistralConfig` takes an absent field for 4,096.
    let message = window(None).unwrap_err().to_string();
    assert_eq!(
        message,
        "not supported: a sliding window of 4096 tokens in a context of 32768 (supported: none, or \
         one that holds the context)"
    );
}

#[test]
fn rope_parameters_of_transformers_5() {
    let mut json = llama_31_8b();
    let fields = json.as_object_mut().unwrap();
    let mut rope = fields.remove("rope_scaling").unwrap();
    rope["rope_theta"] = fields.remove("rope_theta").unwrap();
    fields.insert("rope_parameters".to_owned(), rope);
    assert_eq!(parse(&json).unwrap(), parse(&llama_31_8b()).unwrap());

    // The field's own entry, then the one inside, then the context.
    let original_context = |json: &Value| match parse(json).unwrap().rope.scaling {
        RopeScaling::Llama3 { original_context, .. } => original_context,
        other => panic!("{other:?}"),
    };
    json["original_max_position_embeddings"] = 4096.into();
    assert_eq!(original_context(&json), 4096);
    json["original_max_position_embeddings"] = Value::Null;
    json["rope_parameters"]["original_max_position_embeddings"] = Value::Null;
    assert_eq!(original_context(&json), 131_072);

    json["rope_parameters"] = json!({ "full_attention": { "rope_type": "default" } });
    assert!(matches!(parse(&json), Err(Error::UnsupportedFeature { .. })));
    json["rope_parameters"] = json!({ "rope_type": "default", "partial_rotary_factor": 0.5 });
    assert!(matches!(parse(&json), Err(Error::UnsupportedFeature { .. })));
    json["rope_parameters"] = json!({ "type": "linear", "factor": 2 });
    assert_eq!(parse(&json).unwrap().rope.scaling, RopeScaling::Linear { factor: 2.0 });
}

/// Llama 2 with some fields changed (null removes one), and what the error says.
#[test]
fn refusals() {
    for (change, message) in [
        (json!({ "model_type": "qwen2" }), "architecture \"qwen2\" is not supported"),
        (json!({ "architectures": ["LlamaModel"] }), "architecture \"LlamaModel\" is not"),
        (json!({ "architectures": ["A", "B"] }), "architecture \"A, B\" is not supported"),
        (json!({ "model_type": null, "architectures": null }), "model_type is missing"),
        (json!({ "hidden_size": null }), "hidden_size is missing"),
        (json!({ "hidden_size": 0 }), "hidden size is 0, not 1 to 1048576"),
        (json!({ "hidden_size": -1 }), "invalid JSON: invalid value"),
        (json!({ "hidden_size": "4096" }), "invalid JSON: invalid type"),
        (json!({ "num_attention_heads": 0 }), "cannot be divided among 0 query heads"),
        (json!({ "num_attention_heads": 33 }), "cannot be divided among 33 query heads"),
        (json!({ "num_key_value_heads": 5 }), "32 query heads cannot share 5 kv heads"),
        (json!({ "num_key_value_heads": 0 }), "number of kv heads is 0"),
        (json!({ "head_dim": 127 }), "127 of 127 elements of a head are rotated"),
        (json!({ "head_dim": u64::MAX }), "head dimension is 18446744073709551615, not 1 to"),
        (json!({ "num_hidden_layers": 1u64 << 40 }), "number of layers is 1099511627776"),
        (json!({ "vocab_size": 1u64 << 40 }), "vocabulary size is 1099511627776"),
        (
            json!({ "num_attention_heads": 4096, "num_key_value_heads": 1, "head_dim": 1024 }),
            "more than",
        ),
        (json!({ "rms_norm_eps": 0.0 }), "epsilon is 0"),
        (json!({ "rope_theta": -1.0 }), "rope theta is -1"),
        (json!({ "hidden_act": "gelu" }), "activation \"gelu\""),
        (json!({ "quantization_config": { "bits": 4 } }), "quantization_config in config.json"),
        (json!({ "num_local_experts": 8 }), "num_local_experts in config.json"),
        (json!({ "logit_scale": 0.5 }), "logit_scale in config.json"),
        (json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor in config.json"),
        (json!({ "layer_types": ["sliding_attention"] }), "layer_types in config.json"),
        (json!({ "rope_interleaved": true }), "rope_interleaved in config.json"),
        (json!({ "sliding_window": 1024 }), "sliding window of 1024 tokens"),
        (json!({ "rope_scaling": { "type": "yarn", "factor": 2.0 } }), "rope type \"yarn\""),
        (json!({ "rope_scaling": { "type": "linear" } }), "rope factor is missing"),
        (json!({ "rope_scaling": { "type": "linear", "factor": 0 } }), "rope factor is 0"),
        (json!({ "rope_scaling": { "factor": 2.0 } }), "rope_type is missing"),
        (
            json!({ "rope_scaling": {
                "rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4
            } }),
            "rope high_freq_factor 4 is not above low_freq_factor 4",
        ),
    ] {
        let mut json = llama_2_7b();
        json.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let error = parse(&json).expect_err(message).to_string();
        assert!(error.contains(message), "{error:?} does not contain {message:?}");
        assert!(!error.contains('\n'));
    }
    // Values that switch such a field off are fine.
    let mut json = llama_2_7b();
    let off = json!({ "logit_scale": 1.0, "num_experts": 0, "quantization_config": null,
        "layer_types": ["full_attention", "full_attention"] });
    json.as_object_mut().unwrap().extend(off.as_object().unwrap().clone());
    parse(&json).unwrap();
}

/// `generation_config.json` of `meta-llama/Llama-2-7b-chat-hf`, and values out of range.
#[test]
fn generation_defaults() {
    let parse = |json: Value| GenerationDefaults::from_json(json.to_string().as_bytes());
    let defaults = parse(json!({
        "bos_token_id": 1, "do_sample": true, "eos_token_id": 2, "pad_token_id": 0,
        "temperature": 0.6, "max_length": 4096, "top_p": 0.9, "transformers_version": "4.32.0"
    }))
    .unwrap();
    let expected = GenerationDefaults {
        do_sample: Some(true),
        temperature: Some(0.6),
        top_p: Some(0.9),
        eos_token_ids: vec![2],
        bos_token_id: Some(1),
        pad_token_id: Some(0),
        ..GenerationDefaults::default()
    };
    assert_eq!(defaults, expected);
    assert_eq!(parse(json!({ "pad_token_id": -1 })).unwrap(), GenerationDefaults::default());
    for bad in [
        json!({ "temperature": -0.1 }),
        json!({ "top_p": 0.0 }),
        json!({ "top_p": 1.1 }),
        json!({ "min_p": 2 }),
        json!({ "repetition_penalty": 0 }),
        json!({ "eos_token_id": [1, -2] }),
        json!({ "eos_token_id": 1u64 << 32 }),
    ] {
        assert!(matches!(parse(bad.clone()), Err(Error::InvalidConfig { .. })), "{bad}");
    }
}

proptest! {
    /// Whatever parses is valid: nothing downstream sees a size of 0 or a product that overflows.
    #[test]
    fn sizes_that_parse_are_valid(
        sizes in proptest::array::uniform6(prop_oneof![0u64..300, any::<u64>()]),
    ) {
        let mut json = llama_2_7b();
        for (name, size) in [
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads",
        ].into_iter().zip(sizes) {
            json[name] = size.into();
        }
        if let Ok(config) = parse(&json) {
            prop_assert!(config.validate().is_ok());
            for name in config.weight_names().take(20) {
                let [rows, columns] = config.weight_shape(name).unwrap();
                prop_assert!(rows > 0 && columns > 0);
                prop_assert!((rows as u64).checked_mul(columns as u64 * 4).is_some());
            }
        }
    }

    #[test]
    fn any_bytes_are_refused_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = ModelConfig::from_hf_json(&bytes);
        let _ = GenerationDefaults::from_json(&bytes);
    }
}
