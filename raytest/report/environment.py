"""What differs between the processes of a run, by their fingerprints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raytest.fingerprint.diff import Group, by_position, group_of
from raytest.report.material import Material
from raytest.store import RunFolder

# Differ between any two processes, or say how a device is rather than what it is.
PRIVATE = (Group.NAMES, Group.NOISE)
HEALTH = (Group.HEALTH, Group.UNREAD, Group.SEEDS)


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same everywhere: its values, the most frequent first, each with who
    has it (``cell launch n rank r``)."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


def process_facts(folder: RunFolder) -> dict[tuple[str, int, int], dict[str, str]]:
    """Facts by cell, launch and rank (-1: the actor), without names and noise. Of each process the
    last attempt and stage count."""
    table = folder.fingerprints().sort_by([("attempt", "ascending"), ("stage", "ascending")])
    raw: dict[tuple[str, int, int], dict[str, str]] = {}
    columns = [table.column(c).to_pylist() for c in ("cell_id", "launch", "rank", "key", "value")]
    for cell, launch, rank, key, value in zip(*columns, strict=True):
        raw.setdefault((cell, launch, rank), {})[key] = value
    return {
        who: {k: v for k, v in by_position(facts).items() if group_of(k) not in PRIVATE}
        for who, facts in raw.items()
    }


def run_environment(folder: RunFolder) -> dict[str, list[str]]:
    """What a run ran in: every value of each fact, over all processes; the health of devices and
    the state of generators are left out."""
    found: dict[str, set[str]] = {}
    for facts in process_facts(folder).values():
        for key, value in facts.items():
            if group_of(key) not in HEALTH:
                found.setdefault(key, set()).add(value)
    return {key: sorted(values) for key, values in sorted(found.items())}


def fingerprint_differences(material: Material) -> tuple[list[Difference], int]:
    """Facts that differ between processes of one kind (actors, ranks), and how many facts there
    are."""
    facts: dict[tuple[str, bool], dict[str, str]] = {}
    for (cell, launch, rank), own in process_facts(material.folder).items():
        who = f"{cell} launch {launch}" + (f" rank {rank}" if rank >= 0 else "")
        for key, value in own.items():
            facts.setdefault((key, rank < 0), {})[who] = value
    found = [
        Difference(key, values)
        for (key, _), by_who in sorted(facts.items())
        if len(values := _by_value(by_who)) > 1
    ]
    return found, len({k for k, _ in facts})


def _by_value(by_who: Mapping[str, str]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    values: dict[str, list[str]] = {}
    for who, value in by_who.items():
        values.setdefault(value, []).append(who)
    ranked = sorted(values.items(), key=lambda v: (-len(v[1]), v[0]))
    return tuple((v, tuple(w)) for v, w in ranked)
