"""One thing about an environment that a person should know before trusting a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do about it.

    ``code`` is stable and made for machines (``unknown-variable``); ``where`` names the variable,
    argument, node or GPU; ``sentence`` and ``remedy`` are each one line for a person, and
    ``remedy`` is empty where there is nothing to do.
    """

    severity: Severity
    code: str
    where: str
    sentence: str
    remedy: str
