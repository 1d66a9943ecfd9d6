"""Factors folded into columns: those that part the workers in the same way count once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.explain.partition import refines, relabel, size
from raytest.explain.tables import Factor, Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Column:
    """Confounded factors, the most telling first, and the partition that they share.

    ``texts`` has the values of each factor, by code. ``role`` is at least LABEL where the
    partition tells every node apart, IDENTITY where it tells every slot apart: whatever it is
    called, it does no more than name them.
    """

    factors: tuple[Factor, ...]
    codes: Ints
    role: Role
    texts: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The factors' names in order."""
        return tuple(f.name for f in self.factors)

    @property
    def preference(self) -> tuple[int, int, str]:
        """Sorts the most telling column first."""
        best = self.factors[0]
        return int(self.role), best.rank, best.name


def fold(factors: Sequence[Factor], keep: Ints, slot: Ints, node: Ints) -> list[Column]:
    """Columns of the workers ``keep`` [m], constant ones left out, the most telling first."""
    folded: dict[bytes, tuple[Ints, list[Factor]]] = {}
    for factor in factors:
        codes = relabel(factor.codes[keep])
        if size(codes) > 1:
            folded.setdefault(codes.tobytes(), (codes, []))[1].append(factor)
    columns = []
    for codes, members in folded.values():
        members.sort(key=lambda f: (f.role, f.rank, f.name))
        role = max(members[0].role, _floor(codes, slot[keep], node[keep]))
        columns.append(Column(tuple(members), codes, role, _texts(members, keep, codes)))
    return sorted(columns, key=lambda c: c.preference)


def _texts(members: Sequence[Factor], keep: Ints, codes: Ints) -> tuple[tuple[str, ...], ...]:
    """Each factor's value for each code."""
    import numpy as np

    _, first = np.unique(codes, return_index=True)
    rows = keep[first]
    return tuple(tuple(f.levels[int(i)] for i in f.codes[rows]) for f in members)


def _floor(codes: Ints, slot: Ints, node: Ints) -> Role:
    """The role that the partition alone leaves. With two nodes or slots every difference names
    them, so nothing is held against a factor then."""
    slots, nodes = relabel(slot), relabel(node)
    if size(slots) > 2 and refines(codes, slots):
        return Role.IDENTITY
    if 2 < size(nodes) < size(slots) and refines(codes, nodes):
        return Role.LABEL
    return Role.SETTING
