"""The synthetic model's tokenizer: byte-level BPE trained on text that is made from a seed."""

from __future__ import annotations

import json
import os
import random
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
SYLLABLES = {
    "latin": [
        "ba",
        "be",
        "bi",
        "bo",
        "da",
        "de",
        "di",
        "do",
        "ka",
        "ke",
        "ki",
        "ko",
        "la",
        "le",
        "li",
        "lo",
        "ma",
        "me",
        "mi",
        "mo",
        "na",
        "ne",
        "ni",
        "no",
        "ra",
        "re",
        "ri",
        "ro",
        "sa",
        "se",
        "si",
        "so",
        "ta",
        "te",
        "ti",
        "to",
        "th",
        "sh",
        "ing",
        "er",
        "an",
        "on",
        "st",
        "qu",
        "ly",
        "ent",
        "ion",
    ],
    "cyrillic": [
        "ба",
        "бе",
        "да",
        "де",
        "ка",
        "ко",
        "ла",
        "ли",
        "ма",
        "ми",
        "на",
        "не",
        "по",
        "пр",
        "ро",
        "са",
        "ст",
        "та",
        "то",
        "ть",
        "ый",
        "ов",
        "ен",
        "ск",
    ],
    "greek": [
        "αι",
        "ει",
        "κα",
        "κο",
        "λα",
        "λο",
        "μα",
        "με",
        "να",
        "νο",
        "πα",
        "πο",
        "ρα",
        "σα",
        "στ",
        "τα",
        "το",
        "χα",
    ],
    "arabic": ["ال", "من", "في", "ما", "لا", "كا", "با", "دا", "را", "سا", "ها", "نا", "يا", "تا"],
    "hebrew": ["של", "את", "לא", "כי", "מה", "אל", "בא", "גם", "דר", "הי", "ון", "ות"],
    "devanagari": ["का", "की", "के", "को", "ना", "में", "से", "हि", "दी", "था", "यह", "वह"],
    "han": list("的一是不了人我在有他这中大来上国个到说们为子和你地出道也时年得就那要下以生会自"),
    "kana": list("あいうえおかきくけこさしすせそたちつてとなにのはまもやゆよらりるれろわをん"),
    "hangul": list("가나다라마바사아자차카타파하는이을를의에고도로서"),
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

    Raises UsageError where the tokenizers library is not installed.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError(
            "the synthetic model needs the 'tokenizers' package: install raytest[cpu] or "
            "raytest[cuda]"
        ) from None
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed), trainer)
    found = tokenizer.get_vocab_size()
    if found != vocabulary:
        raise UsageError(f"the tokenizer has {found} ids instead of {vocabulary}")
    text = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=True, sort_keys=True)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(_configuration(), sort_keys=True))


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
