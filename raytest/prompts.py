"""The built-in prompts: mixed kinds and lengths, since a fault may show in one kind alone.

Nearly tied continuations (digits, choices, sequences without a rule) show the smallest rounding
difference; long ones reach kernels that short ones do not; lengths around the block size catch
cache mistakes.
"""

from __future__ import annotations

from collections.abc import Sequence

LANGUAGES = (
    "The harbour was quiet when the first ship of the morning came in, and",
    "Le boulanger ouvre sa porte à six heures et demie ; ce matin-là, pourtant,",
    "Als der Zug endlich hielt, stieg niemand aus außer einer Frau mit",
    "El profesor escribió en la pizarra tres palabras que nadie",
    "Поезд опаздывал уже на час, и пассажиры начали",
    "Η θάλασσα ήταν ήρεμη και τα παιδιά έπαιζαν στην",
    "كان الرجل العجوز يجلس كل يوم أمام البحر و",
    "הילדה פתחה את הדלת ומצאה מכתב שבו נכתב",
    "बारिश शुरू होते ही सब लोग घर की ओर",
    "清晨的街道上空无一人,只有一只猫",
    "駅前の小さな本屋で、彼女は古い地図を",
    "오늘 아침 우체부가 가져온 편지에는",
    "Gamla stan låg tyst under snön när klockan",
    "Đêm ấy trăng sáng quá nên không ai",
)
CODE = (
    "def quicksort(values):\n    if len(values) < 2:\n        return values\n    pivot =",
    "class LRUCache:\n    def __init__(self, capacity: int) -> None:\n        self.capacity =",
    "SELECT customer, SUM(amount) FROM orders WHERE day >= '2026-01-01' GROUP BY",
    "fn main() {\n    let mut total: u64 = 0;\n    for n in 1..=100 {",
    '{"name": "raytest", "versions": [1, 2, 3], "nested": {"a": null, "b": [',
    "#!/usr/bin/env bash\nset -euo pipefail\nfor file in *.log; do",
    "<table><tr><th>node</th><th>GPU</th></tr><tr><td>a1</td><td>",
    "__global__ void saxpy(int n, float a, float *x, float *y) {\n  int i =",
)
MATHS = (
    "Compute 48713 * 9127 step by step. First,",
    "List the first 30 prime numbers: 2, 3, 5, 7,",
    "If 3x + 7 = 2(x - 4) + 11, then x =",
    "The integral of x^2 * exp(-x) from 0 to infinity is",
    "A train leaves at 14:05 at 87 km/h, another at 14:35 at 112 km/h. They meet",
    "Digits of pi: 3.14159265358979323846264338327950288",
    "1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89,",
    "Prove that the square root of 2 is irrational. Suppose",
)
TIES = (
    "Pick a number between 1 and 100 at random:",
    "Heads or tails? Toss ten coins:",
    "A random sequence of letters: q x b m z t k",
    "Roll a die twenty times: 4, 1, 6, 3,",
    "Choose one of A, B, C, D with no reason at all:",
    "Shuffle the cards and name them in order:",
    "0110 1001 1100 0101 1010 0011",
    "Random hex: 9f3a 77c1 0b2e d485",
)
MARKS = (
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🧑🏿‍🚀 means",
    "e\u0301 is not é, and n\u0303 is not ñ, but",
    "Z͑ͫ̓ͪ̂ͫ̽͏̴̙̤̞͉͚̯̞̠͍A̴̵̜̰͔ͫ͗͢L̠ͨͧͩ͘G̴̻͈͍͔̹̑͗̎̅͛́Ǫ̵̹̻̝̳͂̌̌͘!͖̬̰̙̗̿̋ͥͥ̂",
    "\u202eright to left\u202c and back",
    "\t\ttabs\n\n\nand   spaces   \u00a0here",
    "“Quotes” — dashes – ‘and’ ellipses…",
    "ﬁ ﬂ ﬃ Ⅷ ½ № ℃ ㎏",
    "<b>bold</b> &amp; \\n \\u0041 %s {0} ${HOME}",
)
SINGLE = ("a", "The", "0", "\n", " ", "中", "?", "{")
PREFIX = (
    "You are a careful assistant for a hospital's pharmacy. Answer in one sentence, name the dose "
    "in milligrams, and say so when you are not sure. Never guess a dose for a child. Question: "
)
QUESTIONS = (
    "How much paracetamol may an adult take in a day?",
    "May ibuprofen be taken with aspirin?",
    "What is the usual dose of amoxicillin?",
    "Is melatonin safe every night?",
    "What should I do after a missed dose?",
    "Can tablets be crushed?",
    "How long does penicillin keep?",
    "Which of these is not a medicine?",
)
REVIEW = (
    "Review the following change as a maintainer would, in one line each for what is wrong, why, "
    "and what would be right.\n\n"
)
CHANGES = (
    "-    return a + b\n+    return a - b\n",
    "-for i in range(n):\n+for i in range(n + 1):\n",
    "-timeout = 30\n+timeout = 0.03\n",
    "-if user is None:\n+if not user:\n",
)
PARAGRAPH = (
    "{i} streets in, the survey counted {n} lamps, {m} benches and {k} doors. Each was drawn on "
    "the map with its number, its height in centimetres and the name of whoever looked after it. "
)
# Around the usual block size of 16 tokens, and around twice that.
BOUNDARY_LENGTHS = (15, 16, 17, 31, 32, 33, 255, 256, 257)
# About 130 tokens each with the synthetic tokenizer, so up to 1,500.
LONG_PARAGRAPHS = (2, 3, 4, 6, 7, 8, 10, 12)


def built_in(name: str) -> Sequence[tuple[str, str, int | None]] | None:
    """Prompts of ``builtin:<name>`` as (kind, text, length in tokens or None), or None if unknown.

    A length asks for the text to be cut to exactly that many tokens.
    """
    families: dict[str, list[tuple[str, str, int | None]]] = {
        "short": [
            *_plain("language", LANGUAGES),
            *_plain("code", CODE),
            *_plain("maths", MATHS),
            *_plain("tie", TIES),
            *_plain("marks", MARKS),
            *_plain("single", SINGLE),
        ],
        # each of its own streets: no two share a prefix, so a cache helps none of them
        "long": [("long", _long(n, 100 * n), None) for n in LONG_PARAGRAPHS],
        "prefix": [
            *_plain("prefix", [PREFIX + question for question in QUESTIONS]),
            *_plain("prefix", [REVIEW + change for change in CHANGES]),
            *_plain("prefix", [_long(4, 1) + question for question in QUESTIONS[:4]]),
        ],
    }
    boundary = [("boundary", _long(4, 2000 + n), n) for n in BOUNDARY_LENGTHS]
    families["mixed"] = [*families["short"], *families["prefix"], *families["long"], *boundary]
    return families.get(name)


def names() -> list[str]:
    """Names that :func:`built_in` knows."""
    return ["mixed", "short", "long", "prefix"]


def _plain(kind: str, texts: Sequence[str]) -> list[tuple[str, str, int | None]]:
    return [(kind, text, None) for text in texts]


def _long(paragraphs: int, first: int) -> str:
    return "".join(
        PARAGRAPH.format(n=17 * i % 101, m=31 * i % 89, k=53 * i % 97, i=i)
        for i in range(first, first + paragraphs)
    )
