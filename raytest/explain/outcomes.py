"""The observations of a run as outcomes of workers: repeats folded, arrangements kept apart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytest.compare.observed import Member, Observed
from raytest.explain.partition import relabel
from raytest.explain.tables import UNKNOWN, UNSTABLE, Outcomes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raytest.plan import Plan

WorkerKey = tuple[str, int, str]


def worker_key(member: Member) -> WorkerKey:
    """Cell, launch, arrangement: what only repeats share."""
    return member.cell.cell_id, member.launch, member.trial.arrangement.value


def outcomes_of(observed: Observed, plan: Plan) -> tuple[Outcomes, list[Member]]:
    """Outcomes, and one member for each worker. Where logprobs were not asked for alike, results
    are compared by tokens alone."""
    import numpy as np

    places: dict[WorkerKey, list[int]] = {}
    for i, member in enumerate(observed.members):
        places.setdefault(worker_key(member), []).append(i)
    alike = len({m.logprobs for m in observed.members}) == 1
    source = observed.bitwise if alike else observed.tokens
    folded = [_fold(source[rows]) for rows in places.values()]
    codes = np.array(folded, dtype=np.int64).reshape(len(places), source.shape[1])
    members = [observed.members[rows[0]] for rows in places.values()]
    slots = {c.slot.name: c.slot for c in plan.cells}
    names = tuple(sorted(slots))
    on_node: dict[str, set[int]] = {}
    for slot in slots.values():
        for device in slot.devices:
            on_node.setdefault(device.node, set()).add(device.index)
    outcomes = Outcomes(
        workers=tuple(_name(m) for m in members),
        slot_names=names,
        slot=np.array([names.index(m.cell.slot.name) for m in members], dtype=np.int64),
        node=relabel([m.cell.slot.node for m in members]),
        launch=relabel([f"{m.cell.cell_id}/{m.launch}" for m in members]),
        codes=codes,
        repeats=min((len(rows) for rows in places.values()), default=0),
        devices=tuple(len(on_node[slots[n].devices[0].node]) for n in names),
        group=tuple(len(slots[n].devices) for n in names),
    )
    return outcomes, members


def _name(member: Member) -> str:
    cell, launch, arrangement = worker_key(member)
    return f"{cell}/{launch} {arrangement}"


def _fold(codes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Repeats [r, units] as one row: the common code, UNSTABLE where two differ, UNKNOWN where no
    repeat has a result."""
    import numpy as np

    high = codes.max(axis=0)
    top = np.iinfo(np.int64).max
    low = np.where(codes >= 0, codes, top).min(axis=0)
    folded = np.where(low == high, high, UNSTABLE)
    return np.where(high < 0, UNKNOWN, folded)
