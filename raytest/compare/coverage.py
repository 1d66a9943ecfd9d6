"""What a run covered, and what its rows prove or fail to: nothing here looks at a token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytest.compare.observed import Observed, State
from raytest.store import RunFolder

MOST_LISTED = 20


@dataclass(frozen=True, slots=True)
class Coverage:
    """Counts of what took part; ``n_tokens`` are generated tokens of usable observations."""

    n_nodes: int
    n_devices: int
    n_slots: int
    n_cells: int
    n_launches: int
    n_trials_planned: int
    n_trials_found: int
    n_trials_not_needed: int
    n_requests: int
    n_requests_skipped: int
    n_samples: int
    n_observations: int
    n_tokens: int
    batch_sizes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Integrity:
    """``problems`` forbid a comparison, ``incomplete`` only leave it open. The lists name what is
    behind them: trials that are missing, observations that failed, launches given up, prompts that
    were unusable from the start."""

    problems: tuple[str, ...]
    incomplete: tuple[str, ...]
    missing_trials: tuple[str, ...]
    errors: tuple[Mapping[str, Any], ...]
    failures: tuple[Mapping[str, Any], ...]
    skipped: tuple[Mapping[str, str], ...]


def check_integrity(observed: Observed, folders: Sequence[RunFolder]) -> Integrity:
    """Hold what was found against the plan: devices, duplicates, completeness."""
    problems = [*observed.problems, *_devices(observed)]
    incomplete: list[str] = []
    counts = {s: (observed.state == s).sum(axis=1) for s in State}
    for state, text in (
        (State.DUPLICATE, "observations occur more than once"),
        (State.INVALID, "observations have neither a result nor an error"),
    ):
        where = [
            (m.name, int(n)) for m, n in zip(observed.members, counts[state], strict=True) if n
        ]
        if where:
            total = sum(n for _, n in where)
            problems.append(f"{total} {text} (first: {where[0][0]})")
    for what, n in observed.unmatched.items():
        if n:
            problems.append(f"{n} {what}")
    missing = [m.name for m in observed.members if not m.found and m.needed]
    if missing:
        incomplete.append(f"{len(missing)} of {len(observed.members)} trials are missing")
    holes = sum(
        int(n) for m, n in zip(observed.members, counts[State.MISSING], strict=True) if m.found
    )
    if holes:
        incomplete.append(f"{holes} observations are missing in trials that ran")
    failed = sum(e["n"] for e in observed.errors)
    if failed:
        incomplete.append(f"{failed} observations are errors")
    failures = [
        {
            "cell_id": str(f.get("cell_id")),
            "launch": int(f.get("launch", -1)),
            "slot": str(f.get("slot", "")),
            "phase": str(f.get("phase", "")),
            "kind": str(f.get("kind", "")),
            "reason": str(f.get("reason", "")),
        }
        for folder in folders
        for f in folder.failures()
    ]
    if failures:
        incomplete.append(f"{len(failures)} launches failed")
    skipped = [
        {"request_id": i, "error": e}
        for i, e in zip(observed.workload.request_id, observed.workload.error, strict=True)
        if e is not None
    ]
    return Integrity(
        tuple(problems),
        tuple(incomplete),
        tuple(missing),
        observed.errors,
        tuple(failures),
        tuple(skipped),
    )


def _devices(observed: Observed) -> list[str]:
    """Trials that ran elsewhere than planned, and slots that are one device twice."""
    problems = []
    seen: dict[tuple[Any, ...], str] = {}
    for m in observed.members:
        planned = tuple(d.uuid for d in m.cell.slot.devices)
        if not m.found or not m.gpu_uuids:
            continue
        if all(planned) and m.gpu_uuids != planned:
            problems.append(
                f"{m.name}: ran on {', '.join(m.gpu_uuids)}, planned on {', '.join(planned)}"
            )
        share = tuple(d.share for d in m.cell.slot.devices)
        key = (m.run, m.cell.variant, m.gpu_uuids, share)
        other = seen.setdefault(key, m.keys["slot"])
        if other != m.keys["slot"]:
            problems.append(f"slots {other} and {m.keys['slot']} report the same devices")
    return list(dict.fromkeys(problems))[:MOST_LISTED]


def coverage_of(observed: Observed) -> Coverage:
    """Count what took part."""
    found = [m for m in observed.members if m.found]
    ok = observed.state == State.OK
    sizes: Counter[str] = Counter()
    for m in found:
        name = m.trial.arrangement.value
        sizes[name] = max(sizes[name], m.batch_size or 0)
    return Coverage(
        n_nodes=len({n for m in found for n in m.cell.slot.nodes}),
        n_devices=len({u for m in found for u in m.gpu_uuids}),
        n_slots=len({m.keys["slot"] for m in found}),
        n_cells=len({(m.run, m.cell.cell_id) for m in found}),
        n_launches=len({(m.run, m.cell.cell_id, m.launch) for m in found}),
        n_trials_planned=len(observed.members),
        n_trials_found=len(found),
        n_trials_not_needed=sum(not m.needed for m in observed.members),
        n_requests=observed.n_requests,
        n_requests_skipped=sum(e is not None for e in observed.workload.error),
        n_samples=observed.workload.n_samples,
        n_observations=int(ok.sum()),
        n_tokens=int(observed.n_tokens[ok].sum()),
        batch_sizes=dict(sorted(sizes.items())),
    )
