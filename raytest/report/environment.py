"""What differs between the processes of a run, by their fingerprints."""

from __future__ import annotations

from dataclasses import dataclass

from raytest.report.material import Material

# Differ between any two processes and say nothing about results.
PRIVATE = ("process.", "seed.state", "time.", "capture.")
MOST_KEYS = 200


@dataclass(frozen=True, slots=True)
class Difference:
    """A fact that is not the same everywhere: its values, the most frequent first, each with who
    has it (``cell launch n rank r``)."""

    key: str
    values: tuple[tuple[str, tuple[str, ...]], ...]


def fingerprint_differences(material: Material) -> tuple[list[Difference], int]:
    """Facts that differ between processes of one kind (actors, ranks), and how many facts there
    are. Of each process the last attempt and stage count."""
    table = material.folder.fingerprints()
    facts: dict[tuple[str, bool], dict[str, str]] = {}
    for row in table.sort_by([("attempt", "ascending")]).to_pylist():
        if row["key"].startswith(PRIVATE):
            continue
        who = f"{row['cell_id']} launch {row['launch']} rank {row['rank']}"
        facts.setdefault((row["key"], row["rank"] < 0), {})[who] = row["value"]
    found = []
    for (key, actor), by_who in sorted(facts.items()):
        values: dict[str, list[str]] = {}
        for who, value in by_who.items():
            values.setdefault(value, []).append(who.replace(" rank -1", "") if actor else who)
        if len(values) > 1:
            ranked = sorted(values.items(), key=lambda v: (-len(v[1]), v[0]))
            found.append(Difference(key, tuple((v, tuple(w)) for v, w in ranked)))
    return found, len({k for k, _ in facts})
