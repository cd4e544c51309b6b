#!/usr/bin/env python3
"""Writes the golden files of the tokenizer and chat-template tests.

    pip install tokenizers transformers sentencepiece jinja2
    python tools/golden_tokenizer.py kivi-models/tests/golden

Each tokenizer_NAME.json holds a tiny tokenizer twice, as a `tokenizer.json` and as the fields of a
GGUF file, and what the reference makes of a list of difficult strings: Hugging Face `tokenizers`
for the byte-level ones, SentencePiece itself for the other. chat.json holds chat templates and what
transformers' own Jinja environment renders.
"""

import io
import json
import sys
from pathlib import Path

import sentencepiece
import tokenizers
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from tokenizers import pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.utils.chat_template_utils import _compile_jinja_template

# The texts the tiny vocabularies are trained on: enough to get multi-character merges in several
# scripts, little enough to leave most words in pieces.
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog didn't mind at all.",
    "In 2024 there were 1234567 readers; they'll say it's 100% true, won't they?",
    "the the the then there them theme  double  spaces   triple\n\nnew paragraph\n\n\tindented",
    "def main():\n    for i in range(10):\n        print(i)\n    return 0\n",
    "Straße über Köln, naïve café, crème brûlée, señor, Ελληνικά και русский язык.",
    "日本語の文章です。中文句子也在这里。한국어 문장입니다.",
    "العربية لغة جميلة 😀 😀 👍🏽 emoji",
    "HELLO World HeLLo I'LL WE'RE YOU'VE",
] * 4

# Difficult strings, for every tokenizer. `SPECIALS` is put in front by each of them.
TEXTS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "a", " a", "a ", "  a  ", "a  b",
    "The quick brown fox", "the then there", "don't", "DON'T I'LL we'Re", "it's 'sup '", "'''",
    "\u2019s don\u2019t", "'\u017ft 'ſ", "1", "12", "123", "1234", "1234567890", " 42", "3.14", "1,000,000",
    "²³ ½ Ⅷ ١٢٣ 一二三", "x1y2z3", "foo_bar-baz", "!!!", "...\n", "?!\r\n\r\nok", "a\nb\r\nc\rd",
    "tabs\t\tand\n\n\nlines   ", "    indented", "x = {'a': [1, 2]}\n", "http://example.org/?q=a%20b#c",
    "Straße", "naïve café", "nai\u0308ve cafe\u0301", "\u0301", "\u1e9b\u0323", "Ελληνικά", "русский язык",
    "日本語の文章", "中文句子也在这里。", "한국어", "\u1112\u1161\u11ab", "العربية لغة", "עברית", "हिन्दी", "ไทย",
    "😀", "👍🏽", "👩‍👩‍👧‍👦 family", "🏳️‍🌈", "\ufe0f", "\u200d", "\u200b", "\u00a0nbsp\u00a0", "\u3000wide\u3000",
    "\u2028line\u2029", "\u0085next", "\ufeffbom", "\ufffd", "\u0000", "a\u0000b", "\u0001\u0007\u001b[0m", "\u007f",
    "a" * 50, " " * 40, "\n" * 9, "ab" * 30, "0" * 20, "😀" * 6, "▁", " ▁ ▁▁", "Ġ Ċ ĉ", "<0x0A>", "<unk>",
    "<0xFF>", "<|", "|>", "< |im_end|>", "\U0010ffff", "\U000e0001", "𝒳𝓎", "ﬁ ﬂ", "İi ıI", "ß ẞ",
]


def cases(specials, encode, decode):
    """Expected results: plain text, then with special tokens parsed and added."""
    lookalikes = [f"a{s}b" for s in specials] + [f"{s}{s} {s}\n" for s in specials]
    out = []
    for text in TEXTS + lookalikes:
        plain = encode(text, False, False)
        full = encode(text, True, True)
        out.append({
            "text": text,
            "plain": plain,
            "full": full,
            "decoded": decode(plain, False),
            "decoded_skip": decode(full, True),
        })
    return out


def byte_level(name, pre, normalizer, pre_tokenizer, ignore_merges, specials, user, bos):
    """A byte-level tokenizer, its GGUF fields and its cases."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    vocab = [t for t, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    merges = [tuple(m) for m in model["merges"]]
    if ignore_merges:
        # Words that no merge leads to.
        vocab += ["Ġparagraph", "HeLLo", "Ġ文章"]
    # As in SmolLM2 the special tokens come first, or as in Llama 3 last.
    first = name == "smollm"
    added = [AddedToken(t, special=True, normalized=False) for t in specials]
    added += [AddedToken(t, special=False, normalized=False) for t in user]
    contents = [t.content for t in added]
    tokens = contents + vocab if first else vocab + contents
    ids = {t: i for i, t in enumerate(tokens)}
    model_vocab = {t: i for t, i in ids.items() if first or t not in contents}

    tokenizer = Tokenizer(models.BPE(model_vocab, merges, ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    post = [processors.ByteLevel(trim_offsets=False)]
    if bos:
        post.append(processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, ids[bos])]))
    tokenizer.post_processor = processors.Sequence(post)
    tokenizer.add_tokens(added)

    def encode(text, add_special, parse_special):
        tokenizer.encode_special_tokens = not parse_special
        return tokenizer.encode(text, add_special_tokens=add_special).ids

    kind = {**{t: 3 for t in specials}, **{t: 4 for t in user}}
    gguf = {
        "model": "gpt2", "pre": pre, "tokens": tokens,
        "token_types": [kind.get(t, 1) for t in tokens], "scores": [],
        "merges": [f"{a} {b}" for a, b in merges],
        "bos_id": ids[specials[0]], "eos_id": ids[specials[-1]], "add_bos": bool(bos),
    }
    decode = lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip)
    return {"json": json.loads(tokenizer.to_str()), "gguf": gguf,
            "cases": cases(specials + user, encode, decode)}


def sentencepiece_bpe():
    """A SentencePiece model with byte fallback, configured as Llama 2's."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for text in CORPUS for line in text.split("\n") if line),
        model_writer=written, model_type="bpe", vocab_size=440, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", add_dummy_prefix=True,
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        minloglevel=2)
    sp = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    size = sp.get_piece_size()
    tokens = [sp.id_to_piece(i) for i in range(size)]
    scores = [sp.get_score(i) for i in range(size)]
    types = [2 if sp.is_unknown(i) else 3 if sp.is_control(i) else 6 if sp.is_byte(i) else 1
             for i in range(size)]
    ids = {t: i for i, t in enumerate(tokens)}
    special = [t for t, kind in zip(tokens, types) if kind in (2, 3)]
    skip = {t for t, kind in zip(tokens, types) if kind != 1}
    merges = generate_merges(ids, dict(zip(tokens, scores)), skip)

    tokenizer = Tokenizer(models.BPE(
        ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", ids["<s>"])])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])

    def encode(text, add_special, parse_special):
        if parse_special:
            # SentencePiece never parses control tokens; this is what transformers does with them.
            return tokenizer.encode(text, add_special_tokens=add_special).ids
        # SentencePiece cannot encode NUL with its C strings; the other reference can.
        plain = sp.encode(text)
        tokenizer.encode_special_tokens = True
        converted = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        if plain != converted:
            print(f"note: {text!r}: SentencePiece {plain}, converted {converted}", file=sys.stderr)
        return plain

    gguf = {
        "model": "llama", "pre": None, "tokens": tokens, "token_types": types, "scores": scores,
        "merges": [], "bos_id": ids["<s>"], "eos_id": ids["</s>"], "unk_id": ids["<unk>"],
    }
    decode = lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip)
    return {"json": json.loads(tokenizer.to_str()), "gguf": gguf,
            "cases": cases(["<s>", "</s>"], encode, decode)}


def llama_split(digits):
    return Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def tokenizer_files():
    byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    raw = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chatml = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    split = lambda digits: pre_tokenizers.Sequence(
        [pre_tokenizers.Split(llama_split(digits), "isolated"), raw])
    yield "smollm", byte_level(
        "smollm", "smollm", None,
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte]),
        False, chatml, ["<file_sep>"], None)
    yield "llama3", byte_level(
        "llama3", "llama-bpe", None, split(r"\p{N}{1,3}"), True,
        ["<|begin_of_text|>", "<|eot_id|>"], [], "<|begin_of_text|>")
    yield "qwen2", byte_level(
        "qwen2", "qwen2", normalizers.NFC(), split(r"\p{N}"), False, chatml, ["<tool_call>"], None)
    yield "spm", sentencepiece_bpe()


CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}")

# The shapes of the templates published with these models.
TEMPLATES = {
    "smollm2": CHATML,
    "llama2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}"
        "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
        "{% endif %}{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}"
        "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% elif message['role'] == 'assistant' %}"
        "{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"),
    "llama3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
        "message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}"
        "{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"),
    "mistral": (
        "{%- if messages[0][\"role\"] == \"system\" %}\n"
        "    {%- set system_message = messages[0][\"content\"] %}\n"
        "    {%- set loop_messages = messages[1:] %}\n"
        "{%- else %}\n    {%- set loop_messages = messages %}\n{%- endif %}\n"
        "{%- set ns = namespace(index=0) %}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if (message[\"role\"] == \"user\") != (ns.index % 2 == 0) %}\n"
        "        {{- raise_exception(\"After the optional system message, conversation roles must "
        "alternate user/assistant/user/assistant/...\") }}\n"
        "    {%- endif %}\n    {%- set ns.index = ns.index + 1 %}\n{%- endfor %}\n\n"
        "{{- bos_token }}\n"
        "{%- for message in loop_messages %}\n"
        "    {%- if message[\"role\"] == \"user\" %}\n"
        "        {%- if loop.last and system_message is defined %}\n"
        "            {{- \"[INST] \" + system_message + \"\\n\\n\" + message[\"content\"] + \"[/INST]\" }}\n"
        "        {%- else %}\n"
        "            {{- \"[INST] \" + message[\"content\"] + \"[/INST]\" }}\n"
        "        {%- endif %}\n"
        "    {%- else %}\n"
        "        {{- \" \" + message[\"content\"] + eos_token}}\n"
        "    {%- endif %}\n{%- endfor %}\n"),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n"
        "{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n"
        "{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
        "{% endfor %}"),
    # Not a model's: the Python habits that templates of newer models have.
    "pythonic": (
        "{%- macro show(text, prefix='') -%}\n{{ prefix }}{{ text.split('</think>')[-1].lstrip('\\n') }}\n"
        "{%- endmacro -%}\n"
        "{% for m in messages[::-1] %}\n"
        "    {% if not m.content.startswith('skip') and not m.content.endswith('!') %}\n"
        "  {{ m.role.upper() }}:{{ show(m.content, prefix=loop.index ~ ' ') }}|{{ m.content | tojson }}\n"
        "    {% else %}\n    {% continue %}\n    {% endif %}\n"
        "{%- generation %}{{ m.get('name', 'none') }}{% endgeneration %}\n"
        "{% endfor %}\n"
        "{{ {'b': [1, 2.5, true, none], 'a': 'é<&>\"'} | tojson }}\n"
        "{{ [{'k': []}] | tojson(indent=2) }}{% if tools is defined and tools %}never{% endif %}\n"
        "{{ messages | map(attribute='role') | join(',') }} {{ messages | selectattr('role', 'equalto',"
        " 'user') | list | length }} {{ undefined_name }}{{ ' x '.strip() }}\n\n"),
}

CONVERSATIONS = [
    [("user", "Hello!")],
    [("system", "Be brief."), ("user", " What is 2+2? \n")],
    [("user", "Hi"), ("assistant", " Hello \"you\" & <b> 'me' "), ("user", "日本語 😀</s>")],
    [("system", "S\n"), ("user", "skip"), ("assistant", "a</think>\n\nb"), ("user", "{{ 1 }}{% x %}")],
    [("assistant", "wrong order"), ("user", "x")],
    [("user", "")],
]


def chat_file():
    out = []
    for name, source in TEMPLATES.items():
        template = _compile_jinja_template(source)
        rendered = []
        for conversation in CONVERSATIONS:
            for prompt in (False, True):
                messages = [{"role": r, "content": c} for r, c in conversation]
                try:
                    text, error = template.render(
                        messages=messages, add_generation_prompt=prompt, bos_token="<s>",
                        eos_token="</s>", tools=None, documents=None), None
                except Exception as e:
                    text, error = None, str(e)
                rendered.append({"messages": messages, "add_generation_prompt": prompt,
                                 "text": text, "error": error})
        out.append({"name": name, "source": source, "rendered": rendered})
    return out


def write(path, value):
    # One line per case, so that a change can be read in a diff.
    lines = []
    for key, item in value.items():
        if isinstance(item, list):
            body = ",\n".join(json.dumps(x, ensure_ascii=True) for x in item)
            lines.append(f"{json.dumps(key)}: [\n{body}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(item, ensure_ascii=True)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__,
                "sentencepiece": sentencepiece.__version__}
    for name, content in tokenizer_files():
        write(folder / f"tokenizer_{name}.json", {"made_with": versions, **content})
    write(folder / "chat.json", {"made_with": versions, "templates": chat_file()})


if __name__ == "__main__":
    main()
