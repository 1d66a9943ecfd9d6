"""The synthetic model's tokenizer: byte-level BPE trained on text that is made from a seed."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raytest.errors import UsageError

SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LINES = 20_000

# Pieces of words in several scripts, so that every script gets merges of its own.
_PIECES = {
    "latin": (
        "ba be bi bo da de di do ka ke ki ko la le li lo ma me mi mo na ne ni no ra re ri ro sa "
        "se si so ta te ti to th sh ing er an on st qu ly ent ion"
    ),
    "cyrillic": "ба бе да де ка ко ла ли ма ми на не по пр ро са ст та то ть ый ов ен ск",
    "greek": "αι ει κα κο λα λο μα με να νο πα πο ρα σα στ τα το χα",
    "arabic": "ال من في ما لا كا با دا را سا ها نا يا تا",
    "hebrew": "של את לא כי מה אל בא גם דר הי ון ות",
    "devanagari": "का की के को ना में से हि दी था यह वह",
    "han": "的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自",
    "kana": "あいうえおかきくけこさしすせそたちつてとなにのはまもやゆよらりるれろわをん",
    "hangul": "가나다라마바사아자차카타파하는이을를의에고도로서",
}
SYLLABLES = {
    script: text.split() if " " in text else list(text) for script, text in _PIECES.items()
}
CODE = (
    "def {a}({b}): return {b} + {n}",
    "for {a} in range({n}): {b} += {a}",
    "if ({a} < {n}) {{ return {b}; }}",
    "let {a} = {b}.map(x => x * {n});",
    "SELECT {a} FROM {b} WHERE id = {n};",
    '{{"{a}": {n}, "{b}": [{n}, null, true]}}',
)


def write_tokenizer(folder: Path, vocabulary: int, seed: int) -> None:
    """Write tokenizer.json and tokenizer_config.json with exactly ``vocabulary`` ids.

    Raises UsageError where the tokenizers library is not installed, OSError where the disk refuses.
    """
    document = _document(_train(vocabulary, seed))
    found = len(document["model"]["vocab"])
    if found != vocabulary:
        raise UsageError(f"the tokenizer has {found} ids instead of {vocabulary}")
    text = json.dumps(document, ensure_ascii=True, sort_keys=True)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(_configuration(), sort_keys=True))


def _train(vocabulary: int, seed: int) -> Any:
    """The trained tokenizer as the library's own JSON."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(
            "the synthetic model needs the 'tokenizers' package: install raytest[cpu] or "
            "raytest[cuda]"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    with _one_thread():
        tokenizer.train_from_iterator(training_text(seed), trainer)
    return json.loads(tokenizer.to_str())


@contextmanager
def _one_thread() -> Iterator[None]:
    """The variable is put back: processes started later must not inherit it only where a model was
    made, and a library that ran threads warns of every fork after that."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _document(trained: Any) -> dict[str, Any]:
    """tokenizer.json from what was learnt alone, so that its form is not the library's release."""
    merges = [m.split(" ") if isinstance(m, str) else m for m in trained["model"]["merges"]]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, "special": True, **flags} for i, token in enumerate(SPECIAL)
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": trained["model"]["vocab"],
            "merges": merges,
        },
    }


def training_text(seed: int) -> list[str]:
    """Lines of invented words, code and numbers.

    Only ``Random.random`` is used: its sequence is the one that Python promises to keep.
    """
    source = random.Random(f"raytest-tokenizer/{seed}")

    def pick(options: Any) -> Any:
        return options[int(source.random() * len(options))]

    def word(script: str) -> str:
        return "".join(pick(SYLLABLES[script]) for _ in range(1 + int(source.random() * 4)))

    scripts = ["latin"] * 6 + list(SYLLABLES)
    lines = []
    for _ in range(LINES):
        if source.random() < 0.2:
            number = int(source.random() * 10_000)
            lines.append(pick(CODE).format(a=word("latin"), b=word("latin"), n=number))
        else:
            script = pick(scripts)
            words = [word(script) for _ in range(3 + int(source.random() * 8))]
            lines.append(" ".join(words) + pick([".", "?", "!", ",", ":", ""]))
    return lines


def _configuration() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[1],
        "pad_token": SPECIAL[1],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
