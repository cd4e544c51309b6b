#!/usr/bin/env python3
"""Golden vectors of promoted key channels: packed keys, written from the description of the format.

For each group of G tokens of a kv head, the ceil(p * D) key channels with the largest range get
4-bit codes, the others 2-bit codes. A 4-bit code is kept as two planes, 4*hi + lo: `hi` lies with
the 2-bit codes, the stored scale is that of `hi`, 4*s; `lo` lies in a plane of its own, over the
promoted channels in ascending order; a bit mask per group says which channels these are. See
`docs/src/reference/packed-format.md`.

Codes are computed as the format defines them, by the nearest level in exact rational arithmetic
(ties to the even level), and not by the thresholds of the Rust. It shares no code with the
workspace.
"""

import argparse
import json
import math
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

SEED = 20250211
KV_HEADS = 2
LARGEST_F16 = np.float32(65504.0)
LARGEST_STEP = LARGEST_F16 / np.float32(4.0)  # of a promoted channel: four times it is an f16
SMALLEST_SCALE = np.float32(2.0**-14)


@dataclass(frozen=True)
class Case:
    """One array of keys, two groups long."""

    name: str
    head_dim: int
    group: int
    share: Fraction
    data: str


CASES = [
    Case("outliers", 64, 16, Fraction(1, 4), "outliers"),
    Case("outliers_eighth", 128, 32, Fraction(1, 8), "outliers"),
    Case("damaged", 72, 64, Fraction(1, 4), "damaged"),
    Case("ties", 20, 128, Fraction(1, 8), "ties"),
    Case("wide", 33, 32, Fraction(1, 4), "wide"),
]


def keys_of(case: Case, rng: np.random.Generator) -> np.ndarray:
    """`[kv_heads, tokens, head_dim]`, f16, or f32 for what f16 cannot hold."""
    shape = (KV_HEADS, 2 * case.group, case.head_dim)
    keys = rng.standard_normal(shape)
    if case.data == "outliers":
        keys *= rng.lognormal(0.0, 1.0, case.head_dim)
        keys[0, :, 5] = 0.75  # a constant channel
        keys[1, :, 6] *= 1.0e-5  # a scale below 2^-14
    if case.data == "damaged":
        # The first group of the first head: three channels that cannot be promoted, although two
        # of them would have the largest range, and one at the edge of f16.
        keys[0, 3, 10] = np.nan
        keys[0, 7, 20] = np.inf
        keys[0, 9, 71] = -np.inf
        keys[0, 11, 64] = 65504.0
        keys[0, 12, 64] = -65504.0
        # Its second group, and all of the second head but two channels: constant, so that the
        # rest of the promoted ones are the lowest.
        keys[0, case.group :, :] = 0.0
        keys[1] = -2.5
        keys[1, ::3, 70] = 1.0
        keys[1, ::5, 33] = 2.0
    if case.data == "ties":
        # Integers of few values: equal ranges, and elements halfway between two levels.
        keys = np.round(3.0 * keys).clip(-4, 4)
    if case.data == "wide":
        keys[:, :, 3] *= 1.0e5  # 4*s saturates where s would not
        keys[:, :, 7] *= 1.0e30  # so does the zero
        keys[0, 1, 8], keys[0, 2, 8] = -3.0e38, 3.0e38  # a range beyond f32
        keys[0, 3, 9], keys[0, 4, 9] = -3.2e38, 3.2e38  # the same range, a higher channel
        return keys.astype(np.float32)
    return keys.astype(np.float16)


def spread(group: np.ndarray) -> np.float32:
    """`max - min` in f32; 0 for a group that holds a NaN or an infinity."""
    if not np.isfinite(group).all():
        return np.float32(0.0)
    with np.errstate(over="ignore"):
        return group.max() - group.min()


def quantize(
    group: np.ndarray, levels: int, cap: np.float32
) -> tuple[list[int], np.float32, np.float16]:
    """Codes `0 ... levels`, the scale, at most `cap`, and the zero."""
    if not np.isfinite(group).all():
        return [0] * len(group), np.float32(0.0), np.array(0x7E00, np.uint16).view(np.float16)[()]
    zero = np.float16(np.clip(group.min(), -LARGEST_F16, LARGEST_F16)) + np.float16(0.0)
    wide = spread(group) * (np.float32(1.0) / np.float32(levels))
    scale = min(np.float32(np.float16(min(wide, LARGEST_F16))), cap)
    if scale < SMALLEST_SCALE:
        return [0] * len(group), np.float32(0.0), zero
    with np.errstate(over="ignore"):
        distances = group - np.float32(zero)
    codes = []
    for distance in distances:
        if np.isinf(distance):
            codes.append(levels)
            continue
        # round() of a Fraction is to the nearest integer, ties to the even one.
        steps = round(Fraction(float(distance)) / Fraction(float(scale)))
        codes.append(min(max(steps, 0), levels))
    return codes, scale, zero


def pack(codes: np.ndarray) -> np.ndarray:
    """2-bit codes `[tokens, columns]` to words `[tokens / 16, columns]`, the first token lowest."""
    shifts = (2 * np.arange(16, dtype=np.uint32))[None, :, None]
    return (codes.reshape(-1, 16, codes.shape[1]) << shifts).sum(axis=1, dtype=np.uint32)


def packed(case: Case, keys: np.ndarray) -> dict[str, np.ndarray]:
    """Both planes, masks, scales and zeros."""
    count = math.ceil(case.share * case.head_dim)
    words = -(-case.head_dim // 32)
    out: dict[str, list[np.ndarray]] = {"codes": [], "lo": [], "mask": [], "scale": [], "zero": []}
    for head in keys.astype(np.float32):
        for start in range(0, len(head), case.group):
            group = head[start : start + case.group]
            spreads = [spread(group[:, d]) for d in range(case.head_dim)]
            order = sorted(range(case.head_dim), key=lambda d: (-spreads[d], d))
            promoted = sorted(order[:count])
            mask = np.zeros(words, np.uint32)
            for d in promoted:
                mask[d // 32] |= np.uint32(1 << (d % 32))
            hi = np.zeros(group.shape, np.uint32)
            lo = np.zeros((case.group, count), np.uint32)
            scales = np.zeros(case.head_dim, np.float16)
            zeros = np.zeros(case.head_dim, np.float16)
            for d in range(case.head_dim):
                if d in promoted:
                    codes, scale, zeros[d] = quantize(group[:, d], 15, LARGEST_STEP)
                    scales[d] = np.float16(4.0 * scale)
                    hi[:, d] = [code // 4 for code in codes]
                    lo[:, promoted.index(d)] = [code % 4 for code in codes]
                else:
                    hi[:, d], scales[d], zeros[d] = quantize(group[:, d], 3, LARGEST_F16)
            out["codes"].append(pack(hi))
            out["lo"].append(pack(lo))
            out["mask"].append(mask[None])
            out["scale"].append(scales[None])
            out["zero"].append(zeros[None])
    rows = {name: np.concatenate(parts) for name, parts in out.items()}
    return {name: x.reshape(KV_HEADS, -1, x.shape[1]) for name, x in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    default = root / "kivi-core/tests/golden/promoted_keys.safetensors"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()

    rng = np.random.default_rng(SEED)
    tensors, config = {}, {}
    for case in CASES:
        keys = keys_of(case, rng)
        tensors[f"{case.name}.k"] = keys
        for name, tensor in packed(case, keys).items():
            tensors[f"{case.name}.{name}"] = np.ascontiguousarray(tensor)
        config[case.name] = {"group_size": case.group, "share": float(case.share)}
    # One metadata entry only: safetensors writes several in no fixed order.
    save_file(tensors, args.output, {"config": json.dumps(config)})
    print(f"{args.output.name}: {args.output.stat().st_size} bytes, {len(tensors)} tensors")


if __name__ == "__main__":
    main()
