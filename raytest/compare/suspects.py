"""Slots and nodes that stand outside the majority more often than chance allows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.axis_result import AxisData
from raytest.compare.observed import Member, Observed
from raytest.compare.statistics import holm, poisson_binomial_tail
from raytest.schema import Axis

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

SIGNIFICANT = 0.05
# More suspects than this share of all: no single fault explains them, so nobody is named.
SYSTEMIC_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Suspect:
    """One slot or node. ``p_value`` is adjusted over all of them (Holm); ``persistence`` says
    whether its own repeats agree (``persistent``), differ (``transient``) or were not made
    (``unknown``)."""

    axis: Axis
    entity: str
    variant: str
    n_outside: int
    n_requests: int
    p_value: float
    persistence: str


@dataclass(frozen=True, slots=True)
class Attribution:
    """Suspects of one axis. ``unattributable``: requests of which nobody can say who is right (two
    members, or a tied vote). ``systemic``: too many suspects for a single fault."""

    axis: Axis
    suspects: tuple[Suspect, ...]
    unattributable: int
    systemic: bool


def entity_of(axis: Axis, member: Member) -> str:
    """Who is voting along ``axis``."""
    return str(member.keys["node"] if axis is Axis.NODE else member.keys["slot"])


def find_suspects(
    data: AxisData, observed: Observed, unstable: Mapping[str, set[int]] | None
) -> Attribution:
    """Test every slot (axis gpu) or node (axis node).

    Null hypothesis: the outsiders of a request are any of its voters with equal chance. A voter's
    count of requests outside is then a sum of independent events with chances (outsiders / voters)
    per request; its upper tail, adjusted over all voters, is the p-value. Repeats, launches and
    arrangements of one voter on one request are not independent and count once. ``unstable``: cell
    id -> requests whose repeats differ; None where nothing was repeated.
    """
    import numpy as np

    d = data.classes.divergences
    voters = _voters(data, observed.members)
    n_voters = np.array([len(voters[g.members[0]]) for g in data.grouping.groups], dtype=np.int64)
    valid = ~d.tied & (n_voters[d.group] >= 3)
    request = observed.request_of(d.unit)
    seen: dict[tuple[str, int], dict[str, None]] = {}
    cells: dict[tuple[str, str], dict[str, None]] = {}
    for i in _distinct(data, request, np.flatnonzero(valid)):
        group = data.grouping.groups[int(d.group[i])]
        stratum = _stratum(data.axis, observed.members[group.members[0]])
        for m in d.all_members[d.offsets[i] : d.offsets[i + 1]]:
            member = observed.members[int(m)]
            entity = entity_of(data.axis, member)
            seen.setdefault((stratum, int(request[i])), {})[entity] = None
            cells.setdefault((stratum, entity), {})[member.cell.cell_id] = None
    population = _population(data, observed.members)
    suspects = _test(data.axis, seen, population, cells, unstable)
    entities = {e for names in population.values() for e in names}
    named = {s.entity for s in suspects}
    tied = set(map(int, request[~valid])) - {r for _, r in seen}
    systemic = len(named) > 1 and len(named) > SYSTEMIC_SHARE * len(entities)
    return Attribution(data.axis, suspects, len(tied), systemic)


def _stratum(axis: Axis, member: Member) -> str:
    variant = f"{member.cell.variant} {member.keys['models']}"
    return variant if axis is Axis.NODE else f"{variant} {member.keys['node']}"


def _voters(data: AxisData, members: Sequence[Member]) -> dict[int, set[str]]:
    return {
        g.members[0]: {entity_of(data.axis, members[i]) for i in g.members}
        for g in data.grouping.groups
    }


def _population(data: AxisData, members: Sequence[Member]) -> dict[str, set[str]]:
    """Who votes in each stratum."""
    found: dict[str, set[str]] = {}
    for group in data.grouping.groups:
        names = {entity_of(data.axis, members[i]) for i in group.members}
        found.setdefault(_stratum(data.axis, members[group.members[0]]), set()).update(names)
    return found


def _distinct(data: AxisData, request: Ints, valid: Ints) -> Sequence[int]:
    """Divergences with another request, group or class; repeats of one pattern count once."""
    import numpy as np

    d = data.classes.divergences
    if not len(valid):
        return []
    kinds = np.stack([request[valid], d.group[valid], d.member[valid]], axis=1)
    _, first = np.unique(kinds, axis=0, return_index=True)
    return [int(i) for i in valid[np.sort(first)]]


def _test(
    axis: Axis,
    seen: Mapping[tuple[str, int], Mapping[str, None]],
    population: Mapping[str, set[str]],
    cells: Mapping[tuple[str, str], Mapping[str, None]],
    unstable: Mapping[str, set[int]] | None,
) -> tuple[Suspect, ...]:
    import numpy as np

    rows = []
    for stratum in sorted(population):
        requests = [(r, who) for (s, r), who in seen.items() if s == stratum]
        chances = np.array([len(who) / len(population[stratum]) for _, who in requests])
        outside: dict[str, list[int]] = {e: [] for e in sorted(population[stratum])}
        for r, who in requests:
            for entity in who:
                outside[entity].append(r)
        tails: dict[int, float] = {}
        for entity, at in outside.items():
            if len(at) not in tails:
                tails[len(at)] = poisson_binomial_tail(chances, len(at))
            rows.append((stratum, entity, at, tails[len(at)], len(requests)))
    adjusted = holm([p for _, _, _, p, _ in rows])
    return tuple(
        Suspect(
            axis,
            entity,
            stratum.split(" ", 1)[0],
            len(at),
            n,
            p_adjusted,
            _persistence(at, cells[stratum, entity], unstable),
        )
        for (stratum, entity, at, _, n), p_adjusted in zip(rows, adjusted, strict=True)
        if p_adjusted < SIGNIFICANT
    )


def _persistence(
    requests: Sequence[int],
    cells: Mapping[str, None],
    unstable: Mapping[str, set[int]] | None,
) -> str:
    if unstable is None:
        return "unknown"
    own = {r for cell in cells for r in unstable.get(cell, ())}
    return "transient" if own & set(requests) else "persistent"
