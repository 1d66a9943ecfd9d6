"""What the processes of a run tell of themselves: engines of one variant that are not the same
engine, random states that should agree, variables that vLLM set anew, devices whose health changed.

Read from the run's events, where each engine left a digest of its settings; fingerprints are opened
only where two digests differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raytest.audit import is_engine_setting
from raytest.compare.findings import MOST_ENTITIES, Finding
from raytest.store import RunFolder

_MOST_NAMED = 3
K = TypeVar("K")

Engine = tuple[str, int]
"""Cell id and launch."""


@dataclass(slots=True)
class _Told:
    """What one engine's last attempt left in the events."""

    started: Mapping[str, Any]
    states: dict[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    worsened: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check_processes(folder: RunFolder) -> tuple[list[Finding], list[str]]:
    """Findings, and what forbids a comparison: random states that differ where the level demands
    that they agree."""
    told = _read(folder)
    by_cell: dict[str, dict[Engine, _Told]] = {}
    for engine, what in told.items():
        by_cell.setdefault(engine[0], {})[engine] = what
    variants: dict[str, dict[Engine, _Told]] = {}
    for cell in folder.plan().cells:
        variants.setdefault(cell.variant, {}).update(by_cell.get(cell.cell_id, {}))
    findings: list[Finding] = []
    problems: list[str] = []
    for variant, engines in variants.items():
        findings += _different_engines(folder, variant, engines)
        findings += _rewritten(variant, engines)
        problems += _different_states(variant, engines)
    findings += [f for engine, what in told.items() for f in _health(engine, what)]
    return findings, problems


def _read(folder: RunFolder) -> dict[Engine, _Told]:
    told: dict[Engine, _Told] = {}
    for event in folder.events():
        engine = (str(event.get("cell_id")), int(event.get("launch", -1)))
        kind = event["event"]
        if kind == "started" and "engine" in event:
            before = told.get(engine)
            told[engine] = _Told(event, {} if before is None else before.states)
            told[engine].states["before the model was loaded"] = event["seed_states"]
        elif kind == "trial done" and engine in told:
            told[engine].states[f"before trial {event['trial']}"] = event["seed_states"]
        elif kind == "health worsened" and engine in told:
            told[engine].worsened = event["changes"]
    return dict(sorted(told.items()))


def _name(engine: Engine) -> str:
    return f"{engine[0]}/{engine[1]}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _apart(values: Mapping[K, str]) -> tuple[str, list[K]]:
    """The most common value, and who has another."""
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, [key for key, value in values.items() if value != usual]


def _different_engines(
    folder: RunFolder, variant: str, engines: Mapping[Engine, _Told]
) -> Iterator[Finding]:
    if len({what.started["engine"] for what in engines.values()}) < 2:
        return
    settings = _settings(folder, engines)
    others: set[Engine] = set()
    sentences = []
    for key in sorted({k for facts in settings.values() for k in facts}):
        values = {engine: facts.get(key, "(none)") for engine, facts in settings.items()}
        usual, apart = _apart(values)
        if apart:
            others.update(apart)
            found = ", ".join(sorted({values[e] for e in apart})[:_MOST_NAMED])
            names = _listed([_name(e) for e in apart])
            sentences.append(f"{key} is {found} in {names}, {usual} in the others")
    if sentences:
        rest = len(sentences) - _MOST_NAMED
        yield Finding(
            code="different-engines",
            category="environment",
            severity="config",
            axis=None,
            entities=tuple(sorted({cell for cell, _ in others}))[:MOST_ENTITIES],
            detail=f"variant {variant}: {'; '.join(sentences[:_MOST_NAMED])}"
            + (f"; {rest} more settings differ" if rest > 0 else ""),
            action="pin it among the variant's engine arguments (profile 'strict' pins most); "
            "'raytest fingerprint --diff' shows all",
        )


def _settings(folder: RunFolder, engines: Mapping[Engine, _Told]) -> dict[Engine, dict[str, str]]:
    """Effective settings of every rank, by ``rank 0: effective.…``, of each engine's last
    attempt."""
    table = folder.fingerprints()
    names = ("cell_id", "launch", "attempt", "rank", "key", "value")
    found: dict[Engine, dict[str, str]] = {engine: {} for engine in engines}
    for cell, launch, attempt, rank, key, value in zip(
        *(table.column(n).to_pylist() for n in names), strict=True
    ):
        what = engines.get((cell, launch))
        if what is not None and what.started["attempt"] == attempt and is_engine_setting(key):
            found[cell, launch][f"rank {rank}: {key}"] = value
    return found


def _different_states(variant: str, engines: Mapping[Engine, _Told]) -> Iterator[str]:
    """Every process of every engine was seeded alike before it loaded the model, and again before
    each trial: what differs by then was not seeded, or drew."""
    seeded = {e: what for e, what in engines.items() if what.started["level"] > 0}
    moments = dict.fromkeys(m for what in seeded.values() for m in what.states)
    for moment in moments:
        digests: dict[str, dict[str, str]] = {}
        for engine, what in seeded.items():
            for process, states in what.states.get(moment, {}).items():
                for generator, digest in states.items():
                    digests.setdefault(generator, {})[f"{_name(engine)} {process}"] = digest
        for generator, by_process in sorted(digests.items()):
            _, apart = _apart(by_process)
            if apart:
                yield (
                    f"seed audit {moment}: {generator} in {_listed(apart)} differs from the other "
                    f"{len(by_process) - len(apart)} processes of variant {variant}"
                )


def _rewritten(variant: str, engines: Mapping[Engine, _Told]) -> Iterator[Finding]:
    changes = {
        f"{name}: {change}" for what in engines.values()
        for name, change in what.started.get("rewritten", {}).items()
    }  # fmt: skip
    if changes:
        yield Finding(
            code="variable-rewritten",
            category="environment",
            severity="monitor",
            axis=None,
            entities=tuple(sorted({cell for cell, _ in engines}))[:MOST_ENTITIES],
            detail=f"variant {variant}: vLLM set in its ranks {', '.join(sorted(changes))}",
            action="what the spec demands there has no effect: take it out of the variant's env",
        )


def _health(engine: Engine, what: _Told) -> Iterator[Finding]:
    if what.worsened:
        changes = ", ".join(f"{k} {a or '(none)'} -> {b}" for k, (a, b) in what.worsened.items())
        errors = any(".ecc.uncorrected" in k or ".ecc.remapp" in k for k in what.worsened)
        yield Finding(
            code="device-health-worsened",
            category="environment",
            severity="isolate" if errors else "monitor",
            axis=None,
            entities=(engine[0],),
            detail=f"while the trials ran: {changes}",
            action="take the GPU out and look at it: 'raytest doctor'"
            if errors
            else "check cooling and power before trusting its speed",
        )
