#!/usr/bin/env python3
"""Tiny random Llama-family checkpoints and what Hugging Face transformers computes with them.

Each model directory under `kivi-models/tests/golden/models/` holds what a checkpoint on the Hub
holds (config.json, weights, generation_config.json, tokenizer.json, tokenizer_config.json) and

    golden.safetensors    prompt  i64 [p]          the encoded `text` of the metadata
                          logits  f32 [p, vocab]   of every prompt position
                          greedy  i64 [n]          the tokens that follow, greedily

computed in float32 with eager attention and a DynamicCache, from the weights *as stored*.
`llama3-tiny.gguf` holds the weights of `llama3-tiny` the way llama.cpp's converter writes them.

The script needs no network and gives the same files on every run; it refuses a seed whose greedy
choice is so close that rounding could change it.
"""

import argparse
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
)

TEXT = "The 2-bit cache keeps 128 tokens: café 東."
GREEDY_TOKENS = 32
SMALLEST_MARGIN = 1e-3  # between the best and the second-best logit of a greedy step
WEIGHT_SCALE = 0.35  # standard deviation of the random weights: logits that are far from flat

BOS, EOS = "<s>", "</s>"
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("e", "r"), ("Ã", "©")]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@dataclass
class Model:
    """One checkpoint: the transformers configuration and how it is stored."""

    name: str
    architecture: type
    config: object
    dtype: torch.dtype
    shards: int = 1
    # Entries of config.json that replace what transformers 5 writes, so that the files cover both
    # spellings found on the Hub (`rope_theta` + `rope_scaling`, and `rope_parameters`).
    config_json: dict = field(default_factory=dict)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Small enough that the prompt's positions feel all three ranges of the scaling.
    "original_max_position_embeddings": 64,
}


def catalogue(vocab_size: int) -> list[Model]:
    common = {
        "vocab_size": vocab_size,
        "num_hidden_layers": 2,
        "max_position_embeddings": 512,
        "bos_token_id": vocab_size - 2,
        "eos_token_id": vocab_size - 1,
        "attn_implementation": "eager",
    }
    return [
        Model(
            "llama2-tiny",  # multi-head attention, untied embeddings, stored in f16
            LlamaForCausalLM,
            LlamaConfig(
                hidden_size=64,
                intermediate_size=80,
                num_attention_heads=2,
                num_key_value_heads=2,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                tie_word_embeddings=False,
                **common,
            ),
            torch.float16,
            config_json={"rope_theta": 10000.0, "rope_scaling": None},
        ),
        Model(
            "llama3-tiny",  # 4 query heads per kv head, scaled RoPE, tied embeddings, stored in f32
            LlamaForCausalLM,
            LlamaConfig(
                hidden_size=64,
                intermediate_size=48,
                num_attention_heads=4,
                num_key_value_heads=1,
                rms_norm_eps=1e-5,
                rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE},
                tie_word_embeddings=True,
                **common,
            ),
            torch.float32,
            config_json={"rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        ),
        Model(
            "mistral-tiny",  # head_dim != hidden / heads, bf16 in two shards, `rope_parameters`
            MistralForCausalLM,
            MistralConfig(
                hidden_size=48,
                intermediate_size=80,
                num_attention_heads=3,
                num_key_value_heads=1,
                head_dim=32,
                rms_norm_eps=1e-6,
                rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
                sliding_window=None,
                tie_word_embeddings=False,
                **common,
            ),
            torch.bfloat16,
            shards=2,
        ),
    ]


# --- tokenizer -----------------------------------------------------------------------------------


def tokenizer() -> Tokenizer:
    """Byte-level BPE with a handful of merges and SmolLM's pre-tokenizer (single digits)."""
    vocab = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab += ["".join(pair) for pair in MERGES]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=MERGES)
    result = Tokenizer(bpe)
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in (BOS, EOS)]
    )
    return result


def prompt_ids(tok: Tokenizer) -> list[int]:
    return [tok.token_to_id(BOS), *tok.encode(TEXT, add_special_tokens=False).ids]


# --- weights and golden values -------------------------------------------------------------------


def random_model(spec: Model, seed: int) -> torch.nn.Module:
    """The model in float32 with random weights that `spec.dtype` holds exactly."""
    model = spec.architecture(spec.config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                values = 1.0 + 0.25 * noise
            else:
                values = WEIGHT_SCALE * noise
            parameter.copy_(values.to(spec.dtype).to(torch.float32))
    return model


@torch.no_grad()
def golden(model: torch.nn.Module, prompt: list[int]) -> dict[str, torch.Tensor] | None:
    """Logits and greedy tokens, or None if a choice is too close or the model ends the text."""
    cache = DynamicCache(config=model.config)
    logits = model(torch.tensor([prompt]), cache=cache, use_cache=True).logits[0]
    step, greedy = logits[-1], []
    for _ in range(GREEDY_TOKENS):
        best = torch.topk(step, 2)
        token = int(best.indices[0])
        if best.values[0] - best.values[1] < SMALLEST_MARGIN or token == model.config.eos_token_id:
            return None
        greedy.append(token)
        step = model(torch.tensor([[token]]), cache=cache, use_cache=True).logits[0, -1]
    return {
        "prompt": torch.tensor(prompt),
        "logits": logits.contiguous(),
        "greedy": torch.tensor(greedy),
    }


def seeded(spec: Model, prompt: list[int]) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """The first seed whose greedy text is robust and not one token over and over."""
    for seed in range(100):
        model = random_model(spec, seed)
        result = golden(model, prompt)
        if result is not None and len(set(result["greedy"].tolist())) > GREEDY_TOKENS // 2:
            print(f"{spec.name}: seed {seed}, logit deviation {float(result['logits'].std()):.2f}")
            return model, result
    raise SystemExit(f"{spec.name}: no seed gives a robust greedy text")


# --- files ---------------------------------------------------------------------------------------


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(spec: Model, model: torch.nn.Module, folder: Path) -> None:
    """model.safetensors, or shards and their index."""
    tensors = {
        name: tensor.to(spec.dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if not (spec.config.tie_word_embeddings and name == "lm_head.weight")
    }
    if spec.shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(spec.shards):
        file = f"model-{shard + 1:05d}-of-{spec.shards:05d}.safetensors"
        part = names[shard :: spec.shards]
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
        weight_map |= {name: file for name in part}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_config(spec: Model, folder: Path) -> None:
    config = spec.config.to_dict()
    config["architectures"] = [spec.architecture.__name__]
    config["dtype"] = str(spec.dtype).removeprefix("torch.")
    if spec.config_json:
        config.pop("rope_parameters")
        config["torch_dtype"] = config.pop("dtype")
        config |= spec.config_json
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {
            "_from_model_config": True,
            "bos_token_id": spec.config.bos_token_id,
            "eos_token_id": spec.config.eos_token_id,
        },
    )


def write_tokenizer(tok: Tokenizer, folder: Path) -> None:
    tok.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "add_bos_token": True,
            "add_eos_token": False,
            "chat_template": CHAT_TEMPLATE,
            "model_max_length": 512,
        },
    )


# --- GGUF ----------------------------------------------------------------------------------------


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a q or k projection from rotate-half order to interleaved pairs, head by head.

    transformers pairs channel i with i + head_dim/2, GGUF's `llama` architecture 2i with 2i + 1.
    """
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def rope_factors(head_dim: int, theta: float, scaling: dict) -> np.ndarray:
    """Divisors of the rotation frequencies, f32 [head_dim / 2]: Llama 3.1's scaling rule."""
    frequency = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    wavelength = 2 * np.pi / frequency
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factor, old = scaling["factor"], scaling["original_max_position_embeddings"]
    smooth = np.clip((old / wavelength - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - smooth) / factor + smooth)).astype(np.float32)


def write_gguf(spec: Model, model: torch.nn.Module, tok: Tokenizer, path: Path) -> None:
    config = spec.config
    head_dim = config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(spec.name)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)

    tokens = [tok.id_to_token(i) for i in range(config.vocab_size)]
    control = {config.bos_token_id, config.eos_token_id}
    types = [
        gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL
        for i in range(config.vocab_size)
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)

    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    scaling = config.rope_parameters
    factors = rope_factors(head_dim, scaling["rope_theta"], scaling)
    writer.add_tensor("rope_freqs.weight", factors)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    names = {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for layer in range(config.num_hidden_layers):
        for theirs, ours in names.items():
            tensor = state[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                tensor = permute(tensor, heads[ours[-1]])
            writer.add_tensor(f"blk.{layer}.{ours}.weight", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- checks --------------------------------------------------------------------------------------


@torch.no_grad()
def check_directory(spec: Model, folder: Path, result: dict[str, torch.Tensor]) -> None:
    """What was written, loaded by transformers the ordinary way, gives the golden logits."""
    loaded = spec.architecture.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    logits = loaded(result["prompt"][None]).logits[0]
    assert torch.equal(logits, result["logits"]), f"{spec.name}: reloaded logits differ"
    tok = AutoTokenizer.from_pretrained(folder)
    assert isinstance(tok, PreTrainedTokenizerFast)
    ids = tok(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == result["prompt"][1:].tolist(), f"{spec.name}: reloaded tokenizer differs"


@torch.no_grad()
def check_rope_scaling_matters(spec: Model, model: torch.nn.Module, result: dict) -> None:
    """Without the scaling the last logits must be clearly different, or the test tests nothing."""
    config = LlamaConfig(**spec.config.to_dict())
    config.rope_parameters = {
        "rope_type": "default",
        "rope_theta": spec.config.rope_parameters["rope_theta"],
    }
    config._attn_implementation = "eager"
    plain = LlamaForCausalLM(config).eval()
    plain.load_state_dict(model.state_dict())
    difference = (plain(result["prompt"][None]).logits[0] - result["logits"]).abs().max()
    assert difference > 0.1, f"{spec.name}: rope scaling changes logits by {difference} only"


def check_gguf(spec: Model, model: torch.nn.Module, path: Path) -> None:
    """transformers' own GGUF reader undoes the permutation and finds the same weights."""
    loaded = spec.architecture.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), f"{path.name}: {name} differs"
    # The factors are those by which transformers divides its own frequencies.
    head_dim = spec.config.hidden_size // spec.config.num_attention_heads
    theta = spec.config.rope_parameters["rope_theta"]
    plain = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    factors = rope_factors(head_dim, theta, spec.config.rope_parameters)
    scaled = model.model.rotary_emb.inv_freq.to(torch.float64)
    assert np.allclose(plain / scaled, factors, rtol=1e-6), f"{path.name}: rope factors differ"
    assert 1.0 in factors and factors.max() > 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    default = root / "kivi-models/tests/golden/models"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # one order of summation

    tok = tokenizer()
    prompt = prompt_ids(tok)
    print(f"vocabulary {tok.get_vocab_size()}, prompt of {len(prompt)} tokens")
    for spec in catalogue(tok.get_vocab_size()):
        folder = args.output / spec.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        model, result = seeded(spec, prompt)
        write_config(spec, folder)
        write_tokenizer(tok, folder)
        write_weights(spec, model, folder)
        save_file(result, folder / "golden.safetensors", {"text": TEXT})
        check_directory(spec, folder, result)
        if spec.name == "llama3-tiny":
            check_rope_scaling_matters(spec, model, result)
            path = args.output / "llama3-tiny.gguf"
            write_gguf(spec, model, tok, path)
            check_gguf(spec, model, path)


if __name__ == "__main__":
    main()
