"""Golden beams: what Hugging Face transformers' beam search answers on the tiny models.

    python tools/golden_beams.py

Writes kivi-models/tests/golden/beams.json. Needs the checkpoints that golden_models.py made.
"""

import json
import os

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

GOLDEN = os.path.join(os.path.dirname(__file__), "..", "kivi-models", "tests", "golden")


def main():
    cases = []
    for name in ["llama2-tiny", "llama3-tiny", "mistral-tiny"]:
        folder = os.path.join(GOLDEN, "models", name)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        prompt = load_file(os.path.join(folder, "golden.safetensors"))["prompt"].tolist()
        for beams, tokens, stops, penalty in [
            (3, 20, 0, 1.0),
            (4, 30, 40, 1.0),
            (4, 30, 40, 0.0),
            (5, 30, 80, 2.0),
        ]:
            # A spread of the vocabulary, so that answers of several lengths end.
            vocabulary = model.config.vocab_size
            stop = list(range(3, vocabulary, vocabulary // stops))[:stops] if stops else []
            with torch.no_grad():
                output = model.generate(
                    torch.tensor([prompt]),
                    attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                    num_beams=beams,
                    num_return_sequences=beams,
                    max_new_tokens=tokens,
                    length_penalty=penalty,
                    early_stopping=False,
                    do_sample=False,
                    eos_token_id=stop or -1,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_scores=True,
                )
            answers = []
            scores = output.sequences_scores.tolist()
            for sequence, score in zip(output.sequences.tolist(), scores):
                answer = sequence[len(prompt):]
                ends = [i for i, token in enumerate(answer) if token in stop]
                answers.append({"tokens": answer[: ends[0]] if ends else answer, "score": score})
            cases.append({
                "model": name,
                "beams": beams,
                "max_tokens": tokens,
                "stop": stop,
                "length_penalty": penalty,
                "answers": answers,
            })
    with open(os.path.join(GOLDEN, "beams.json"), "w", encoding="utf-8") as file:
        json.dump(cases, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
