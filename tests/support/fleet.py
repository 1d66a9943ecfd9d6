"""Synthetic fleets for attribution: slots on nodes, factors as values, outcomes as classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from raytest.explain.attribute import attribute
from raytest.explain.partition import relabel
from raytest.explain.tables import UNSTABLE, Explanation, Factor, Outcomes, Role
from raytest.plan import Launch
from raytest.schema import fingerprints_schema
from raytest.store import RunFolder

Values = Callable[[int, int], object]


@dataclass
class Fleet:
    """``nodes`` nodes of ``devices`` slots. ``facts`` gives each factor's value, ``result`` the
    class of a slot (or one per request), by node and device; ``unstable`` the requests on which a
    slot's repeats differ."""

    nodes: int
    devices: int
    facts: Mapping[str, Values] = field(default_factory=dict)
    result: Callable[[int, int], object] = lambda n, d: 0
    requests: int = 3
    unstable: Callable[[int, int], Sequence[int]] = lambda n, d: ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    group: int = 1

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(n, d) for n in range(self.nodes) for d in range(self.devices)]

    def factors(self) -> list[Factor]:
        named: dict[str, Values] = {
            "node": lambda n, d: f"node-{n}",
            "slot": lambda n, d: f"node-{n}:{d}",
            "GPU UUID": lambda n, d: f"GPU-{n}-{d}",
            "device index": lambda n, d: d,
            **self.facts,
        }
        roles = {
            "node": Role.LABEL,
            "device index": Role.LABEL,
            "slot": Role.IDENTITY,
            "GPU UUID": Role.IDENTITY,
            **self.roles,
        }
        return [
            factor(name, [str(of(n, d)) for n, d in self.places], roles.get(name, Role.SETTING))
            for name, of in named.items()
        ]

    def outcomes(self) -> Outcomes:
        rows = []
        for n, d in self.places:
            result = self.result(n, d)
            row = list(result) if isinstance(result, list | tuple) else [result] * self.requests
            rows.append([UNSTABLE if i in self.unstable(n, d) else x for i, x in enumerate(row)])
        names = tuple(f"node-{n}:{d}" for n, d in self.places)
        indices = np.arange(len(names))
        return Outcomes(
            workers=names,
            slot_names=names,
            slot=indices,
            node=np.array([n for n, _ in self.places], dtype=np.int64),
            launch=indices,
            codes=np.array(rows, dtype=np.int64),
            devices=tuple(self.devices for _ in names),
            group=tuple(self.group for _ in names),
        )

    def explained(self) -> Explanation:
        return attribute(self.outcomes(), self.factors())


def factor(name: str, values: Sequence[str], role: Role = Role.SETTING) -> Factor:
    levels = list(dict.fromkeys(values))
    return Factor(name, role, relabel([levels.index(v) for v in values]), tuple(levels))


def write_fingerprints(
    folder: RunFolder, facts: Callable[[Launch, int], Mapping[str, str]], *, attempt: int = 0
) -> None:
    """Fingerprints of every launch: ``facts`` of its actor (rank -1) and of each rank."""
    for launch in folder.plan().launches():
        cell = launch.cell
        rows = [
            {
                "cell_id": cell.cell_id,
                "launch": launch.launch,
                "attempt": attempt,
                "rank": rank,
                "stage": "before load" if rank < 0 else "loaded",
                "key": key,
                "value": value,
            }
            for rank in range(-1, len(cell.slot.devices))
            for key, value in facts(launch, rank).items()
        ]
        table = pa.Table.from_pylist(rows, schema=fingerprints_schema())
        folder.write_fingerprints((cell.cell_id, launch.launch), attempt, table)
