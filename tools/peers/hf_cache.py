"""Perplexity over the quantized caches of Hugging Face transformers, beside kivi's.

Runs `QuantizedCache` with quanto and HQQ at 2 and 4 bits and the uncompressed `DynamicCache` on the
same model, text and convention as `kivi eval perplexity --mode decode`: chunks of CTX tokens
without a begin token, as if fed one token at a time, the second half of each scored.

    python3 -m venv target/hf-venv
    target/hf-venv/bin/pip install -r tools/peers/requirements-hf.txt
    target/hf-venv/bin/python tools/peers/hf_cache.py MODEL.gguf TEXT --chunks 4 --out hf.json

`QuantizedCache` quantizes the whole cache anew, codes included, whenever its window is full; that
is its behaviour and part of what is measured. Bits per element are those in the limit with the
parameters in half precision: `bits + 32 / group` for two f16 numbers per group.
"""

import argparse
import datetime
import json
import math
import os
import sys
import time

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, QuantizedCache


def load(path):
    """Model in f32 and tokenizer, of a folder or a GGUF file."""
    if os.path.isfile(path):
        folder, file = os.path.split(os.path.abspath(path))
        source, options = folder, {"gguf_file": file}
    else:
        source, options = path, {}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    return model.eval(), tokenizer


def caches(model, arguments):
    """(name, bits per element in the limit, a function that makes an empty cache)."""
    yield "uncompressed (f32)", 32.0, lambda: DynamicCache(config=model.config)
    # quanto groups along the channels of a token or the tokens of a channel by its axis; 0 is the
    # library's default for both. HQQ's documentation uses axis 1 for both.
    axes = {"quanto": 0, "hqq": 1}
    for backend in arguments.backends.split(","):
        for bits in map(int, arguments.bits.split(",")):
            group = arguments.group_size
            options = {
                "backend": backend,
                "config": model.config,
                "nbits": bits,
                "axis_key": axes[backend],
                "axis_value": axes[backend],
                "q_group_size": group,
                "residual_length": arguments.residual_length,
            }
            name = f"{backend} {bits} bits, group {group}, window {arguments.residual_length}"
            yield name, bits + 32 / group, lambda options=options: QuantizedCache(**options)


@torch.no_grad()
def perplexity(model, chunks, cache, window):
    """`exp` of the mean negative log-likelihood of the second halves.

    As if fed token by token: `QuantizedCache` quantizes the first token at once and then every
    `window` tokens, and in between all tokens see the same dequantized past and each other in full
    precision. So the steps of a window can be taken in one call with the same result.
    """
    ctx = chunks.shape[1]
    total, count = 0.0, 0
    starts = [0, *range(1, ctx - 1, window)]
    for start, end in zip(starts, [*starts[1:], ctx - 1]):
        output = model(chunks[:, start:end], past_key_values=cache, use_cache=True)
        first = max(start, ctx // 2)
        if first < end:
            scores = torch.log_softmax(output.logits[:, first - start :].float(), -1).double()
            targets = chunks[:, first + 1 : end + 1, None]
            total -= scores.gather(2, targets).sum().item()
            count += targets.numel()
    return math.exp(total / count), count


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--backends", default="quanto,hqq")
    parser.add_argument("--bits", default="4,2")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--residual-length", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", help="a JSON file that gets the table")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    # quanto compiles an extension with ninja, which pip has put beside the interpreter.
    os.environ["PATH"] = os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
    model, tokenizer = load(arguments.model)
    with open(arguments.text, encoding="utf-8") as file:
        ids = tokenizer(file.read(), add_special_tokens=False)["input_ids"]
    ctx, count = arguments.ctx, min(arguments.chunks, len(ids) // arguments.ctx)
    chunks = torch.tensor(ids[: ctx * count]).reshape(count, ctx)
    rows = []
    for name, bits, make in caches(model, arguments):
        start = time.time()
        value, tokens = perplexity(model, chunks, make(), arguments.residual_length)
        print(f"{name}: perplexity {value:.4f} over {tokens} tokens, {bits:.2f} bits per element "
              f"in the limit, {time.time() - start:.0f} s", flush=True)
        rows.append({"cache": name, "bits_per_element_limit": bits, "perplexity": value})
    if arguments.out:
        report = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "date": datetime.date.today().isoformat(),
            "model": os.path.basename(arguments.model),
            "text": os.path.basename(arguments.text),
            "ctx": ctx,
            "chunks": count,
            "rows": rows,
        }
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
