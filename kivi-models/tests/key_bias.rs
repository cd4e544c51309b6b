//! Models with large key biases, as Qwen2's are: made-up checkpoints that differ in nothing else.

use kivi_core::{CacheConfig, DecoderBackend, Format};
use kivi_cpu::Cpu;
use kivi_cpu_ref::CpuRef;
use kivi_models::{Checkpoint, KeyBiasMode, Llama, Session};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use safetensors::tensor::{Dtype, TensorView};
use std::path::Path;

const HIDDEN: usize = 256;
const VOCABULARY: usize = 256;
const LAYERS: usize = 2;
const QUERY_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
/// Pairs of the rotation that hold biases. Every second one has the bias of the pair before it, turned
/// by [`PHASE`].
const BIASED_PAIRS: usize = 4;
/// An eighth of a circle, cosine and sine being equal: the channels of two such pairs are never
/// quantized alike.
const PHASE: f32 = std::f32::consts::FRAC_1_SQRT_2;

/// Approximately normal, with the given standard deviation.
fn normal(random: &mut ChaCha8Rng, deviation: f32) -> f32 {
    // The sum of 12 uniform numbers has variance 1.
    let uniform = |random: &mut ChaCha8Rng| random.next_u32() as f32 / u32::MAX as f32;
    ((0..12).map(|_| uniform(random)).sum::<f32>() - 6.0) * deviation
}

/// Writes a checkpoint whose key biases have this norm in every head.
///
/// The rotation has the same frequency for all pairs (`rope_theta` 1), and of two biased pairs the
/// second one's queries are the negative of the first one's, turned as its bias is: so the biases'
/// parts of a logit cancel, and all of these checkpoints compute the same, whatever the norm. What
/// quantizing does to the two pairs does not cancel.
fn write(folder: &Path, norm: f32) {
    let config = format!(
        r#"{{"model_type": "llama", "hidden_size": {HIDDEN}, "intermediate_size": {HIDDEN},
            "num_attention_heads": {QUERY_HEADS}, "num_key_value_heads": {KV_HEADS},
            "head_dim": {HEAD_DIM}, "num_hidden_layers": {LAYERS}, "vocab_size": {VOCABULARY},
            "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": true,
            "hidden_act": "silu", "rope_theta": 1.0, "tie_word_embeddings": false}}"#
    );
    std::fs::write(folder.join("config.json"), config).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(5);
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut add = |name: String, shape: &[usize], at: &mut dyn FnMut(usize) -> f32| {
        let count = shape.iter().product();
        let bytes = (0..count).flat_map(|index| at(index).to_le_bytes()).collect();
        tensors.push((name, shape.to_vec(), bytes));
    };
    let unit = 1.0 / (HIDDEN as f32).sqrt();
    let matrix = |random: &mut ChaCha8Rng, deviation: f32| {
        let mut random = random.clone();
        move |_: usize| normal(&mut random, deviation * unit)
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN], &mut matrix(&mut random, 16.0));
    add("model.norm.weight".into(), &[HIDDEN], &mut |_| 1.0);
    random.set_stream(1);
    add("lm_head.weight".into(), &[VOCABULARY, HIDDEN], &mut matrix(&mut random, 2.0));
    for layer in 0..LAYERS {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        let (queries, keys) = (QUERY_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
            add(name(norm), &[HIDDEN], &mut |_| 1.0);
        }
        for (stream, (part, rows)) in [
            ("self_attn.k_proj", keys),
            ("self_attn.v_proj", keys),
            ("self_attn.o_proj", HIDDEN),
            ("mlp.gate_proj", HIDDEN),
            ("mlp.up_proj", HIDDEN),
            ("mlp.down_proj", HIDDEN),
        ]
        .into_iter()
        .enumerate()
        {
            random.set_stream(10 * (layer as u64 + 1) + stream as u64);
            add(name(&format!("{part}.weight")), &[rows, HIDDEN], &mut matrix(&mut random, 1.0));
        }
        random.set_stream(10 * (layer as u64 + 1) + 9);
        let mut query = matrix(&mut random, 1.0);
        let mut rows: Vec<Vec<f32>> =
            (0..queries).map(|_| (0..HIDDEN).map(&mut query).collect()).collect();
        for first in (0..queries).step_by(HEAD_DIM) {
            for pair in (0..BIASED_PAIRS).step_by(2) {
                // The two channels of a pair lie half a head apart.
                let (x, y) = (first + pair, first + pair + HEAD_DIM / 2);
                let (a, b) = (rows[x].clone(), rows[y].clone());
                let turned =
                    |f: fn(f32, f32) -> f32| a.iter().zip(&b).map(|(&a, &b)| f(a, b)).collect();
                rows[x + 1] = turned(|a, b| PHASE * (b - a));
                rows[y + 1] = turned(|a, b| -PHASE * (a + b));
            }
        }
        let weights = rows.concat();
        let name_of = |part: &str| name(&format!("self_attn.{part}"));
        add(name_of("q_proj.weight"), &[queries, HIDDEN], &mut |index| weights[index]);
        for (part, width) in [("q_proj", queries), ("v_proj", keys), ("o_proj", HIDDEN)] {
            add(name_of(&format!("{part}.bias")), &[width], &mut |_| 0.0);
        }
        let length = norm / (BIASED_PAIRS as f32).sqrt();
        add(name_of("k_proj.bias"), &[keys], &mut |channel| {
            let (pair, second) = (channel % (HEAD_DIM / 2), channel % HEAD_DIM >= HEAD_DIM / 2);
            match (pair % 2, second) {
                _ if pair >= BIASED_PAIRS => 0.0,
                (0, false) => length,
                (0, true) => 0.0,
                _ => length * PHASE,
            }
        });
    }
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name.clone(), TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap())
    });
    let bytes = safetensors::serialize(views.collect::<Vec<_>>(), None).unwrap();
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

/// Tokens of `sequences` texts of a length.
fn texts(sequences: usize, length: usize) -> Vec<Vec<u32>> {
    let mut random = ChaCha8Rng::seed_from_u64(11);
    let token = |random: &mut ChaCha8Rng| random.next_u32() % VOCABULARY as u32;
    (0..sequences).map(|_| (0..length).map(|_| token(&mut random)).collect()).collect()
}

/// Logits of every token of the texts, one token at a time: `[positions][texts · vocabulary]`.
fn decode<B: DecoderBackend>(
    model: &Llama<B>,
    format: Format,
    texts: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let config =
        CacheConfig::builder().key(format).value(format).residual_length(32).build().unwrap();
    let mut session = Session::new(model, config, texts.len(), texts[0].len()).unwrap();
    let sequences: Vec<_> = texts.iter().map(|_| session.create_sequence().unwrap()).collect();
    (0..texts[0].len())
        .map(|position| {
            let steps: Vec<_> = sequences
                .iter()
                .zip(texts)
                .map(|(&sequence, text)| (sequence, &text[position..=position]))
                .collect();
            session.generate_step(&steps).unwrap()
        })
        .collect()
}

/// Mean `KL(p ‖ q)` over all rows, in nats.
fn divergence(p: &[Vec<f32>], q: &[Vec<f32>]) -> f64 {
    let log_softmax = |logits: &[f32]| -> Vec<f64> {
        let total = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        logits.iter().map(|&x| f64::from(x) - total).collect()
    };
    let mut sum = (0.0, 0);
    for (p, q) in p.iter().zip(q) {
        for (p, q) in p.chunks_exact(VOCABULARY).zip(q.chunks_exact(VOCABULARY)) {
            let (p, q) = (log_softmax(p), log_softmax(q));
            sum.0 += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            sum.1 += 1;
        }
    }
    sum.0 / f64::from(sum.1)
}

/// KL divergence of `kivi2` to the f16 cache of the same checkpoint.
fn loss(norm: f32, mode: KeyBiasMode) -> f64 {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), norm);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let model = Llama::load_with(Cpu::new(2).unwrap(), &checkpoint, mode).unwrap();
    let expected = if norm > 0.0 && mode == KeyBiasMode::Beside { LAYERS } else { 0 };
    assert_eq!(model.key_biases_beside(), expected);
    let texts = texts(4, 400);
    let [exact, coded] = [Format::F16, Format::KIVI2].map(|format| decode(&model, format, &texts));
    divergence(&exact[64..], &coded[64..])
}

#[test]
fn large_key_biases_cost_no_accuracy_beside_the_cache() {
    let zero = loss(0.0, KeyBiasMode::Beside);
    let beside = loss(600.0, KeyBiasMode::Beside);
    let in_keys = loss(600.0, KeyBiasMode::InKeys);
    println!("KL divergence: without biases {zero:.5}, beside {beside:.5}, in keys {in_keys:.5}");
    assert!(zero > 1e-4, "2 bits make a difference at all: {zero}");
    assert!(beside <= 1.2 * zero, "{beside} against {zero}");
    assert!(in_keys > 10.0 * zero, "{in_keys} against {zero}");
}

/// Nothing is quantized, so both ways compute the same; and the two backends agree.
#[test]
fn where_the_bias_is_added_changes_nothing_in_full_precision() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), 600.0);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let texts = texts(1, 150);
    let logits = |mode| {
        let model = Llama::load_with(Cpu::new(1).unwrap(), &checkpoint, mode).unwrap();
        decode(&model, Format::F32, &texts)
    };
    let (beside, in_keys) = (logits(KeyBiasMode::Beside), logits(KeyBiasMode::InKeys));
    let oracle = Llama::load(CpuRef, &checkpoint).unwrap();
    let oracle = decode(&oracle, Format::F32, &texts);
    for other in [in_keys, oracle] {
        let largest = beside.iter().flatten().fold(0f32, |max, x| max.max(x.abs()));
        for (a, b) in beside.iter().flatten().zip(other.iter().flatten()) {
            assert!((a - b).abs() <= 2e-3 * largest, "{a} and {b} of {largest}");
        }
    }
}
