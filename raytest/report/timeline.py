"""When each launch was placed, loading and running, from events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raytest.report.facts import epoch_s
from raytest.schema import CellState

PHASES = (CellState.PLACED.value, CellState.LOADING.value, CellState.RUNNING.value)
ENDS = {"launch done": "done", "attempt failed": "failed"}


@dataclass(frozen=True, slots=True)
class Span:
    """One attempt of a launch; ``phases`` are (name, begin, end) in seconds since the first event.
    ``outcome``: done, failed or unfinished."""

    name: str
    attempt: int
    phases: tuple[tuple[str, float, float], ...]
    outcome: str


def spans(events: Iterable[Mapping[str, Any]]) -> list[Span]:
    """Attempts in the order of their start."""
    timed = [(e, epoch_s(e.get("time"))) for e in events]
    known = [(e, t) for e, t in timed if t is not None]
    if not known:
        return []
    zero, last = min(t for _, t in known), max(t for _, t in known)
    open_: dict[tuple[str, int], list[tuple[str, float]]] = {}
    ended: dict[tuple[str, int], list[tuple[list[tuple[str, float]], float, str]]] = {}
    for event, at in known:
        key = (str(event.get("cell_id")), int(event.get("launch", -1)))
        name = event.get("event")
        if name in PHASES:
            if name == PHASES[0]:
                _close(open_, ended, key, at - zero, "unfinished")
            open_.setdefault(key, []).append((str(name), at - zero))
        elif name in ENDS:
            _close(open_, ended, key, at - zero, ENDS[name])
    for key in list(open_):
        _close(open_, ended, key, last - zero, "unfinished")
    found = [
        Span(f"{cell} launch {launch}", attempt, _phases(marks, end), outcome)
        for (cell, launch), attempts in ended.items()
        for attempt, (marks, end, outcome) in enumerate(attempts)
    ]
    return sorted(found, key=lambda s: (s.phases[0][1], s.name))


def _close(
    open_: dict[tuple[str, int], list[tuple[str, float]]],
    ended: dict[tuple[str, int], list[tuple[list[tuple[str, float]], float, str]]],
    key: tuple[str, int],
    at: float,
    outcome: str,
) -> None:
    marks = open_.pop(key, None)
    if marks:
        ended.setdefault(key, []).append((marks, at, outcome))


def _phases(marks: list[tuple[str, float]], end: float) -> tuple[tuple[str, float, float], ...]:
    ends = [t for _, t in marks[1:]] + [end]
    return tuple((name, begin, stop) for (name, begin), stop in zip(marks, ends, strict=True))
