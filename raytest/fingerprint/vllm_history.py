"""Which version of vLLM knows which name, from the source distributions 0.20.0 to 0.33.0.

``vllm_names.json`` is made by ``.ci/vllm_names.py``, which reads those distributions.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Literal

Version = tuple[int, int]
# "unlisted_variables" are read somewhere in vLLM's code and missing in its table of variables.
Kind = Literal["variables", "unlisted_variables", "engine_arguments", "attention_backends"]
# First and last version that know a name, both included.
Span = tuple[Version, Version]

DATA = Path(__file__).with_name("vllm_names.json")


@cache
def _spans(kind: Kind) -> dict[str, tuple[Span, ...]]:
    groups = json.loads(DATA.read_text(encoding="utf-8"))[kind]
    spans: dict[str, tuple[Span, ...]] = {}
    for text, names in groups.items():
        first, last = (_version(part) for part in text.split("-"))
        for name in names:
            spans[name] = tuple(sorted((*spans.get(name, ()), (first, last))))
    return spans


def _version(text: str) -> Version:
    major, minor = text.split(".")
    return int(major), int(minor)


@cache
def covered() -> Span:
    """The first and last version that the data is about."""
    spans = [span for known in _spans("variables").values() for span in known]
    return min(first for first, _ in spans), max(last for _, last in spans)


def spans(kind: Kind, name: str) -> tuple[Span, ...]:
    """The versions that know ``name``, in order; () where none of those covered does."""
    return _spans(kind).get(name, ())


@cache
def known(kind: Kind, version: Version) -> frozenset[str]:
    """Every name that ``version`` knows; for one outside :func:`covered`, the nearest inside."""
    oldest, newest = covered()
    nearest = min(max(version, oldest), newest)
    return frozenset(
        name
        for name, ranges in _spans(kind).items()
        if any(first <= nearest <= last for first, last in ranges)
    )
