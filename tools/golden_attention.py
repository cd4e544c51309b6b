#!/usr/bin/env python3
"""Golden vectors of KIVI attention: one layer, written from the paper, not from the Rust.

The script simulates the cache of one attention layer (KIVI, arXiv 2402.02750, section 3.2 and
algorithm 1) token by token and writes what every query must read and what the cache must hold at
the end. It shares no code with the workspace; it is meant to be read next to
`docs/src/explanation/`.

A prompt of `PROMPT` tokens is one segment: its tokens see each other in full precision. The rest
is generated one token at a time. With `n` tokens in the cache, `S` sink tokens and the residual
length `R`,

    keys   j are quantized for S <= j < S + floor(max(0, n - S) / R) * R      (blocks of R)
    values j are quantized for S <= j < n - R                                 (window)
                            or exactly when the keys are                      (block)

and generated token `t` reads the state with n = t, and itself in full precision.

Attention runs in float64, so that the golden outputs are exact to the last bit of f32 that a
tolerance can ask for; the quantizer runs in float32 because its rounding is part of the format.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

KV_HEADS = 2
QUERY_HEADS = 4
HEAD_DIM = 32
PROMPT = 100
TOKENS = 264
GROUP = 32  # G
RESIDUAL = 64  # R
SEED = 20240205

SMALLEST_SCALE = np.float32(2.0**-14)
LARGEST_F16 = np.float32(65504.0)


@dataclass(frozen=True)
class Case:
    """One cache configuration; everything else is the constants above."""

    name: str
    key_bits: int = 2
    value_bits: int = 2
    sinks: int = 0
    value_residual: str = "window"
    promote: float = 0.0  # share of the key channels of a group with 4 bits instead of 2


CASES = [
    Case("window"),
    Case("sinks", sinks=4),
    Case("block", value_residual="block"),
    Case("k4v2", key_bits=4),
    Case("promoted", promote=0.25),
    Case("promoted_sinks", promote=0.125, sinks=4),
]


# --- quantizer -----------------------------------------------------------------------------------


def quantize_group(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16, np.float16]:
    """Codes, scale and zero of one group `x` (f16 values, finite)."""
    levels = 2**bits - 1
    x = x.astype(np.float32)
    zero = np.float16(x.min())
    wide = (x.max() - x.min()) * (np.float32(1.0) / np.float32(levels))
    scale = np.float16(min(wide, LARGEST_F16))  # numpy rounds f32 -> f16 to nearest, ties to even
    if np.float32(scale) < SMALLEST_SCALE:
        return np.zeros(x.shape, np.uint32), np.float16(0.0), zero
    # The nearest level, ties to the even one, without a division: count the thresholds
    # (k + 1/2)*s that x - z passes; a tie passes only if it leads from an odd level to an even one.
    distance = x - np.float32(zero)
    codes = np.zeros(x.shape, np.uint32)
    for k in range(levels):
        threshold = np.float32(k + 0.5) * np.float32(scale)
        passed = distance >= threshold if k % 2 == 1 else distance > threshold
        codes += passed.astype(np.uint32)
    return codes, scale, zero


def dequantize(codes: np.ndarray, scale: np.float16, zero: np.float16) -> np.ndarray:
    """`code * scale + zero` in f32."""
    return codes.astype(np.float32) * np.float32(scale) + np.float32(zero)


def pack(codes: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """u32 words along `axis`: element j of a word at bits [bits*j, bits*j + bits)."""
    per_word = 32 // bits
    codes = np.moveaxis(codes, axis, -1)
    words = np.zeros(codes.shape[:-1] + (codes.shape[-1] // per_word,), np.uint32)
    for j in range(per_word):
        words |= codes[..., j::per_word] << np.uint32(bits * j)
    return np.moveaxis(words, -1, axis)


# --- cache ---------------------------------------------------------------------------------------


class QuantizedKeys:
    """Keys `[kv_heads, tokens, head_dim]`: per channel, groups of G consecutive tokens.

    Of each group the `ceil(promote * head_dim)` channels with the largest range, ties to the lower
    one, have 4 bits: the upper two in `codes` with the scale times 4, the lower two in `lo`.
    """

    def __init__(self, keys: np.ndarray, begin: int, end: int, bits: int, promote: float):
        heads, _, dim = keys.shape
        groups = (end - begin) // GROUP
        self.codes = np.zeros((heads, end - begin, dim), np.uint32)
        self.scale = np.zeros((heads, groups, dim), np.float16)
        self.zero = np.zeros((heads, groups, dim), np.float16)
        self.values = np.zeros((heads, end - begin, dim), np.float32)
        count = math.ceil(promote * dim)
        self.mask = np.zeros((heads, groups, -(-dim // 32)), np.uint32)
        self.lo = np.zeros((heads, end - begin, count), np.uint32)
        for h in range(heads):
            for g in range(groups):
                rows = slice(g * GROUP, (g + 1) * GROUP)
                block = keys[h, begin + g * GROUP : begin + (g + 1) * GROUP].astype(np.float32)
                spread = block.max(axis=0) - block.min(axis=0)
                promoted = sorted(np.argsort(-spread, kind="stable")[:count])
                for d in range(dim):
                    if d in promoted:
                        codes, scale, zero = quantize_group(block[:, d], 4)
                        self.values[h, rows, d] = dequantize(codes, scale, zero)
                        self.mask[h, g, d // 32] |= np.uint32(1 << (d % 32))
                        self.lo[h, rows, promoted.index(d)] = codes % 4
                        codes, scale = codes // 4, np.float16(4 * np.float32(scale))
                    else:
                        codes, scale, zero = quantize_group(block[:, d], bits)
                        self.values[h, rows, d] = dequantize(codes, scale, zero)
                    self.codes[h, rows, d] = codes
                    self.scale[h, g, d] = scale
                    self.zero[h, g, d] = zero
        self.words = pack(self.codes, bits, axis=1)
        self.lo_words = pack(self.lo, 2, axis=1)


class QuantizedValues:
    """Values `[kv_heads, tokens, head_dim]`: per token, groups of G consecutive channels."""

    def __init__(self, values: np.ndarray, begin: int, end: int, bits: int):
        heads, _, dim = values.shape
        groups = dim // GROUP
        self.codes = np.zeros((heads, end - begin, dim), np.uint32)
        self.scale = np.zeros((heads, end - begin, groups), np.float16)
        self.zero = np.zeros((heads, end - begin, groups), np.float16)
        self.values = np.zeros((heads, end - begin, dim), np.float32)
        for h in range(heads):
            for t in range(end - begin):
                for g in range(groups):
                    channels = slice(g * GROUP, (g + 1) * GROUP)
                    codes, scale, zero = quantize_group(values[h, begin + t, channels], bits)
                    self.codes[h, t, channels] = codes
                    self.scale[h, t, g] = scale
                    self.zero[h, t, g] = zero
                    self.values[h, t, channels] = dequantize(codes, scale, zero)
        self.words = pack(self.codes, bits, axis=2)


def key_end(n: int, case: Case) -> int:
    """End of the quantized keys with `n` tokens in the cache."""
    return case.sinks + max(0, n - case.sinks) // RESIDUAL * RESIDUAL


def value_end(n: int, case: Case) -> int:
    """End of the quantized values with `n` tokens in the cache."""
    if case.value_residual == "block":
        return key_end(n, case)
    return max(case.sinks, n - RESIDUAL)


# --- attention -----------------------------------------------------------------------------------


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One query `[query_heads, head_dim]` over `[kv_heads, tokens, head_dim]`, in f64."""
    per_kv_head = QUERY_HEADS // KV_HEADS
    out = np.zeros((QUERY_HEADS, HEAD_DIM))
    for h in range(QUERY_HEADS):
        k = keys[h // per_kv_head].astype(np.float64)
        v = values[h // per_kv_head].astype(np.float64)
        logits = k @ query[h].astype(np.float64) / np.sqrt(HEAD_DIM)
        weights = np.exp(logits - logits.max())
        out[h] = weights @ v / weights.sum()
    return out


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random q `[tokens, query_heads, head_dim]`, k and v `[kv_heads, tokens, head_dim]`, f16."""
    rng = np.random.default_rng(SEED)
    q = rng.standard_normal((TOKENS, QUERY_HEADS, HEAD_DIM))
    k = rng.standard_normal((KV_HEADS, TOKENS, HEAD_DIM))
    v = rng.standard_normal((KV_HEADS, TOKENS, HEAD_DIM))
    k[:, :, 3] += 6.0  # an outlier channel, as real keys have
    k[0, :, 5] = 0.75  # a constant channel: scale 0
    k[1, :, 6] *= 2.0e-5  # a range whose scale is below 2^-14
    v[0, 10] = -1.5  # a constant token
    return q.astype(np.float16), k.astype(np.float16), v.astype(np.float16)


def simulate(case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> dict[str, np.ndarray]:
    """Outputs of the generated rows and the final packed cache of one configuration."""
    # A token is quantized once and never again, so the codes of the final state are the codes of
    # every earlier state, as far as it reaches.
    end = key_end(TOKENS, case)
    quantized_keys = QuantizedKeys(k, case.sinks, end, case.key_bits, case.promote)
    quantized_values = QuantizedValues(v, case.sinks, value_end(TOKENS, case), case.value_bits)

    out = np.zeros((TOKENS - PROMPT, QUERY_HEADS, HEAD_DIM))
    for t in range(PROMPT, TOKENS):
        seen_keys = k[:, : t + 1].astype(np.float32)
        seen_values = v[:, : t + 1].astype(np.float32)
        end = key_end(t, case)
        seen_keys[:, case.sinks : end] = quantized_keys.values[:, : end - case.sinks]
        end = value_end(t, case)
        seen_values[:, case.sinks : end] = quantized_values.values[:, : end - case.sinks]
        out[t - PROMPT] = attend(q[t], seen_keys, seen_values)

    tensors = {
        "out": out.astype(np.float32),
        "k_codes": quantized_keys.words,
        "k_scale": quantized_keys.scale,
        "k_zero": quantized_keys.zero,
        "v_codes": quantized_values.words,
        "v_scale": quantized_values.scale,
        "v_zero": quantized_values.zero,
    }
    if case.promote:
        tensors["k_mask"] = quantized_keys.mask
        tensors["k_lo"] = quantized_keys.lo_words
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    default = root / "kivi-core/tests/golden/kivi_attention.safetensors"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()

    q, k, v = inputs()
    prompt_out = np.stack([attend(q[t], k[:, : t + 1], v[:, : t + 1]) for t in range(PROMPT)])
    tensors = {"q": q, "k": k, "v": v, "prompt_out": prompt_out.astype(np.float32)}
    config = {"prompt_tokens": PROMPT, "group_size": GROUP, "residual_length": RESIDUAL}
    for case in CASES:
        for name, tensor in simulate(case, q, k, v).items():
            tensors[f"{case.name}.{name}"] = np.ascontiguousarray(tensor)
        config[case.name] = {
            "key_bits": case.key_bits,
            "value_bits": case.value_bits,
            "sink_length": case.sinks,
            "value_residual": case.value_residual,
            "promote": case.promote,
        }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    # One metadata entry only: safetensors writes several in no fixed order.
    save_file(tensors, args.output, {"config": json.dumps(config)})
    print(f"{args.output.name}: {args.output.stat().st_size} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
