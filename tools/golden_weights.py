"""Golden values of every weight format: random blocks and what the package `gguf` makes of them.

    python -m pip install gguf safetensors numpy
    python tools/golden_weights.py

writes kivi-core/tests/golden/weights.safetensors: for each format `NAME.bytes`, u8 [rows, row bytes],
and `NAME.values`, f32 [rows, columns]. The bytes are random, so scales take any sign and size; only
the exponents of the f16 fields that would be infinite or NaN are replaced, since NaN payloads have no
defined bits. kivi-core/tests/golden_weights.rs asserts bit equality.
"""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file

OUT = Path(__file__).parent.parent / "kivi-core/tests/golden/weights.safetensors"
ROWS = 2
# Offsets of the f16 fields within a block (ggml-common.h).
HALF_FIELDS = {
    Type.F16: [0],
    Type.Q4_0: [0],
    Type.Q4_1: [0, 2],
    Type.Q5_0: [0],
    Type.Q5_1: [0, 2],
    Type.Q8_0: [0],
    Type.Q2_K: [80, 82],
    Type.Q3_K: [108],
    Type.Q4_K: [0, 2],
    Type.Q5_K: [0, 2],
    Type.Q6_K: [208],
}
FLOATS = [Type.F32, Type.F16, Type.BF16]


def random_blocks(rng: np.random.Generator, format: Type, blocks: int) -> np.ndarray:
    """u8 [blocks, block bytes] of `format`, without NaN or infinity."""
    data = rng.integers(0, 256, (blocks, GGML_QUANT_SIZES[format][1]), dtype=np.uint8)
    for field in HALF_FIELDS.get(format, []):
        top = data[:, field + 1]
        top[top & 0x7C == 0x7C] ^= 0x40
    if format in (Type.F32, Type.BF16):
        top, next_ = data[:, -1], data[:, -2]
        next_[top & 0x7F == 0x7F] &= 0x7F
    return data


def main() -> None:
    rng = np.random.default_rng(20240205)
    tensors = {}
    for format in FLOATS + [t for t in HALF_FIELDS if t not in FLOATS]:
        # Two blocks a row, or 64 elements of a float format.
        blocks = 64 if format in FLOATS else 2
        data = random_blocks(rng, format, ROWS * blocks).reshape(ROWS, -1)
        if format == Type.F16:
            values = data.view(np.float16).astype(np.float32)  # `dequantize` keeps F16 as it is
        else:
            values = dequantize(data, format).astype(np.float32)
        assert np.isfinite(values).all(), format
        tensors[f"{format.name}.bytes"] = data
        tensors[f"{format.name}.values"] = np.ascontiguousarray(values)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, OUT)
    print(f"{OUT.name}: {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
