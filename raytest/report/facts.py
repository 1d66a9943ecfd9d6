"""Small facts of a verdict document, said the same way in every report."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any


def duration_s(run: Mapping[str, Any]) -> float | None:
    """Seconds from ``created_at`` to ``ended_at``; None where either is unknown."""
    began, ended = epoch_s(run.get("created_at")), epoch_s(run.get("ended_at"))
    return None if began is None or ended is None else max(0.0, ended - began)


def epoch_s(value: object) -> float | None:
    """An ISO time as seconds since 1970; None where it is none."""
    try:
        return datetime.fromisoformat(str(value)).timestamp()
    except ValueError:
        return None


def interval_words(axis: Mapping[str, Any]) -> str:
    """``8 of 12, 95% interval 35% to 90%``; with none that differ, the largest rate left open."""
    requests = axis["requests"]
    n = requests["compared"]
    if not n:
        return "nothing compared"
    return f"{n - requests['bitwise']} of {n}, 95% interval {bound_words(axis)}"


def bound_words(axis: Mapping[str, Any]) -> str:
    """``35% to 90%``, or ``< 22%`` where none differ."""
    if not axis["requests"]["compared"]:
        return "-"
    if axis["upper_bound"] is not None:
        return f"< {percent(axis['upper_bound'])}"
    rate = axis["divergence_rate"]
    return f"{percent(rate['low'])} to {percent(rate['high'])}"


def percent(share: float) -> str:
    """Two significant digits, and never 100% for what is less."""
    value = 100 * share
    if 99 < value < 100:
        return f"{min(value, 99.99):.4g}%"
    return f"{value:.0f}%" if value >= 99.5 else f"{value:.2g}%"


def duration_words(seconds: float | None) -> str:
    """``1 h 02 min``, ``3 min 20 s``, ``4.2 s``."""
    if seconds is None:
        return "unknown"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def trials_words(trials: Mapping[str, Any]) -> str:
    """How many trials ran, and how many were not needed."""
    spared = trials.get("not_needed", 0)
    left_out = f" ({spared} not needed)" if spared else ""
    return f"trials {trials['ran']} of {trials['planned']}{left_out}"
