#!/usr/bin/env python3
"""Golden snapshot: a file of the format in `docs/src/reference/snapshot-format.md`, written from that
page alone. It shares no code with the workspace.

Two layers of unlike formats, so that every kind of array occurs: promoted 2-bit keys over f16 with
4-bit values over bf16, and uncompressed f32 keys with 8-bit values over f16. What the arrays hold is
a formula that the test knows, too: element k of array number a of layer l is

    words    (2654435761 * k + 65537 * a + 257 * l) mod 2^32
    floats   ((k + 7 * a + 3 * l) mod 97 - 48) / 8

except that masks have the right number of bits, and value words zero bits at their end.
"""

import argparse
import hashlib
import struct
from pathlib import Path

import numpy as np

GROUP, RESIDUAL, SINKS, ROLLBACK, PAGE, SEGMENT = 16, 32, 3, 40, 16, 64
KV_HEADS, HEAD_DIM = 2, 20
TOKENS = 3 + 2 * 32 + 9
# Two blocks of keys; values older than R. What the state ROLLBACK tokens ago had quantized.
PACKED_KEYS, PACKED_VALUES = 3 + 64, TOKENS - 32
KEPT_KEYS, KEPT_VALUES = 3 + (TOKENS - ROLLBACK - 3) // 32 * 32, max(3, TOKENS - ROLLBACK - 32)
PROMOTED = 5  # a quarter of 20
STORE = {"f16": 0, "bf16": 1, "f32": 2}


def format_of(bits: int, store: str, promoted: float = 0.0) -> bytes:
    return struct.pack("<BBH", bits, STORE[store], round(10_000 * promoted))


def words(shape: tuple[int, ...], array: int, layer: int) -> np.ndarray:
    k = np.arange(np.prod(shape), dtype=np.uint64)
    return ((2654435761 * k + 65537 * array + 257 * layer) % 2**32).astype("<u4").reshape(shape)


def floats(shape: tuple[int, ...], array: int, layer: int) -> np.ndarray:
    k = np.arange(np.prod(shape), dtype=np.int64)
    return (((k + 7 * array + 3 * layer) % 97 - 48) / 8.0).astype("<f4").reshape(shape)


def stored(values: np.ndarray, store: str) -> bytes:
    """The formula's numbers have few bits, so every type holds them exactly."""
    if store == "f16":
        return values.astype("<f2").tobytes()
    if store == "bf16":
        return (values.view("<u4") >> 16).astype("<u2").tobytes()
    return values.tobytes()


def layer_bytes(index: int, keys: tuple, values: tuple) -> bytes:
    key_bits, key_store, promoted = keys
    value_bits, value_store = values
    out = bytearray()
    array = 0

    def number() -> int:
        nonlocal array
        array += 1
        return array - 1

    sinks = (KV_HEADS, SINKS, HEAD_DIM)
    out += stored(floats(sinks, number(), index), key_store)
    out += stored(floats(sinks, number(), index), value_store)
    if key_bits:
        quantized = PACKED_KEYS - SINKS
        params = (KV_HEADS, quantized // GROUP, HEAD_DIM)
        out += words((KV_HEADS, quantized * key_bits // 32, HEAD_DIM), number(), index).tobytes()
        out += stored(floats(params, number(), index), "f16")
        out += stored(floats(params, number(), index), "f16")
        if promoted:
            # The mask of group g of head h starts at bit g + h.
            masks = [[0b11111 << (g + h) for g in range(quantized // GROUP)] for h in range(KV_HEADS)]
            out += np.array(masks, "<u4").tobytes()
            number()
            out += words((KV_HEADS, quantized * 2 // 32, PROMOTED), number(), index).tobytes()
    if value_bits:
        quantized = PACKED_VALUES - SINKS
        params = (KV_HEADS, quantized, -(-HEAD_DIM // GROUP))
        row = -(-HEAD_DIM * value_bits // 32)
        codes = words((KV_HEADS, quantized, row), number(), index)
        codes[:, :, -1] &= np.uint32(2 ** (HEAD_DIM * value_bits - 32 * (row - 1)) - 1)
        out += codes.tobytes()
        out += stored(floats(params, number(), index), "f16")
        out += stored(floats(params, number(), index), "f16")
    first = KEPT_KEYS if key_bits else SINKS
    out += stored(floats((KV_HEADS, TOKENS - first, HEAD_DIM), number(), index), key_store)
    first = KEPT_VALUES if value_bits else SINKS
    out += stored(floats((KV_HEADS, TOKENS - first, HEAD_DIM), number(), index), value_store)
    return bytes(out)


def snapshot() -> bytes:
    frequencies = [10_000.0 ** (-2 * i / 16) for i in range(8)]
    header = bytes(range(32))
    header += struct.pack("<5Q", TOKENS, PACKED_KEYS, PACKED_VALUES, KEPT_KEYS, KEPT_VALUES)
    header += struct.pack("<6I", GROUP, RESIDUAL, SINKS, ROLLBACK, PAGE, SEGMENT)
    header += struct.pack("<I", 0)  # values in a window
    header += format_of(2, "f16") + format_of(4, "f16")  # the defaults of the configuration
    header += struct.pack("<IfII", 1, 1.25, len(frequencies), 2)
    header += struct.pack("<8f", *frequencies)
    header += struct.pack("<IIQ", KV_HEADS, HEAD_DIM, 0)
    header += format_of(2, "f16", 0.25) + format_of(4, "bf16") + struct.pack("<I", 1)
    header += struct.pack("<IIQ", KV_HEADS, HEAD_DIM, 50)
    header += format_of(0, "f32") + format_of(8, "f16") + struct.pack("<I", 0)

    out = b"\x89KIVI\r\n\x1a" + struct.pack("<II", 1, len(header)) + header
    out += hashlib.sha256(out).digest()
    out += struct.pack(f"<{TOKENS}I", *(1000 + 3 * i for i in range(TOKENS)))
    out += layer_bytes(0, (2, "f16", True), (4, "bf16"))
    out += layer_bytes(1, (0, "f32", False), (8, "f16"))
    return out + hashlib.sha256(out).digest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    root = Path(__file__).resolve().parent.parent
    default = root / "kivi-core/tests/golden/snapshot.kivi"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    args.output.write_bytes(snapshot())
    print(f"{args.output.name}: {args.output.stat().st_size} bytes")


if __name__ == "__main__":
    main()
