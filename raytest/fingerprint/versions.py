"""Versions of vLLM as (major, minor)."""

from __future__ import annotations

import re
from difflib import get_close_matches

from raytest.fingerprint import vllm_history, vllm_source
from raytest.fingerprint.vllm_history import Kind, Version


def parse_version(text: str) -> Version:
    """(major, minor) of a version such as ``0.32.0+cpu``; the newest known where it has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else vllm_history.covered()[1]


def dotted(version: Version) -> str:
    """``0.32``."""
    return f"{version[0]}.{version[1]}"


def is_installed(version: Version) -> bool:
    """Whether that version is the one installed here, whose source can be read."""
    installed = vllm_source.installed_version()
    return bool(installed) and parse_version(installed) == version


def is_certain(version: Version) -> bool:
    """Whether all names of that version are known, so that an unknown one is wrong."""
    oldest, newest = vllm_history.covered()
    return oldest <= version <= newest or is_installed(version)


def when_known(kind: Kind, name: str, version: Version) -> str:
    """When a name that ``version`` does not know was or will be known; '' where never."""
    spans = vllm_history.spans(kind, name)
    earlier = [last for _, last in spans if last < version]
    later = [first for first, _ in spans if first > version]
    if earlier:
        return f"it is gone since {_after(earlier[-1])}"
    return f"it came with {dotted(later[0])}" if later else ""


def _after(version: Version) -> str:
    return dotted((version[0], version[1] + 1))


def closest(name: str, known: frozenset[str]) -> str:
    """``Did you mean X?``, or '' where nothing is close."""
    matches = get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"Did you mean {matches[0]}?" if matches else ""


def use(instead: str | None) -> str:
    """What to do about a name that does nothing here."""
    return f"Use {instead}." if instead else "Remove it."
