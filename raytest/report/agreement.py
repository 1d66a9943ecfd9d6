"""Which cells say the same: classes of cells, and the share of results that two of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.loading import observe
from raytest.report.material import Material

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raytest.compare.observed import Observed

    Ints = npt.NDArray[np.int32]
    Shares = npt.NDArray[np.float64]

# Comparisons of one result with one other; beyond it positions are sampled evenly.
MOST_COMPARED = 400_000_000


@dataclass(frozen=True, slots=True)
class CellClass:
    """Cells of one variant whose results are all equal. ``rank`` 0 is the variant's largest."""

    name: str
    variant: str
    rank: int
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreement:
    """``bitwise`` and ``tokens`` are [classes, classes]: the share of results that are equal, NaN
    where nothing can be compared. ``sampled``: not every position was used."""

    classes: tuple[CellClass, ...]
    bitwise: Shares
    tokens: Shares
    sampled: bool

    def rank_of(self) -> dict[str, int]:
        """Rank of each cell's class within its variant."""
        return {cell: c.rank for c in self.classes for cell in c.cells}

    def name_of(self) -> dict[str, str]:
        """Name of each cell's class."""
        return {cell: c.name for c in self.classes for cell in c.cells}


def cell_agreement(material: Material) -> Agreement:
    """Form classes over all trials of all launches. Raises StoreError for damaged files."""
    import numpy as np

    observed = observe([material.folder])
    found = {m.cell.cell_id for m in observed.members if m.found}
    cells = [c for c in material.plan.cells if c.cell_id in found]
    names = [c.cell_id for c in cells]
    bitwise, tokens = (_rows(observed, names, kind) for kind in ("bitwise", "tokens"))
    groups: dict[tuple[str, bytes], list[int]] = {}
    for i, cell in enumerate(cells):
        groups.setdefault((cell.variant, bitwise[i].tobytes()), []).append(i)
    order = [v.name for v in material.spec.variants]
    ranked = sorted(groups.items(), key=lambda g: (order.index(g[0][0]), -len(g[1]), g[1][0]))
    classes: list[CellClass] = []
    for (variant, _), members in ranked:
        rank = sum(c.variant == variant for c in classes)
        name = f"{variant} {letters(rank)}"
        classes.append(CellClass(name, variant, rank, tuple(names[i] for i in members)))
    first = np.array([members[0] for _, members in ranked], dtype=np.int64)
    share, sampled = _shares(bitwise[first])
    by_tokens, _ = _shares(tokens[first])
    return Agreement(tuple(classes), share, by_tokens, sampled)


def letters(rank: int) -> str:
    """A, B, …, Z, AA, AB, … for 0, 1, …"""
    text = ""
    rank += 1
    while rank:
        rank, rest = divmod(rank - 1, 26)
        text = chr(65 + rest) + text
    return text


def _rows(observed: Observed, cells: Sequence[str], kind: str) -> Ints:
    """Class codes of all results [cells, positions]; -1 where a cell has none."""
    import numpy as np

    codes = getattr(observed, kind)
    places = sorted({(m.launch, m.trial.trial) for m in observed.members})
    place = {p: i for i, p in enumerate(places)}
    row = {c: i for i, c in enumerate(cells)}
    units = codes.shape[1]
    out = np.full((len(cells), len(places), units), -1, dtype=np.int32)
    for i, member in enumerate(observed.members):
        at = row.get(member.cell.cell_id)
        if at is not None:
            out[at, place[member.launch, member.trial.trial]] = codes[i]
    return out.reshape(len(cells), len(places) * units)


def _shares(rows: Ints) -> tuple[Shares, bool]:
    """Share of equal codes of each two rows, over positions that both have."""
    import numpy as np

    n, positions = rows.shape
    step = max(1, -(-n * n * positions // MOST_COMPARED))
    rows = np.ascontiguousarray(rows[:, ::step])
    valid = rows >= 0
    shares = np.full((n, n), np.nan)
    for i in range(n):
        both = valid & valid[i]
        total = both.sum(axis=1)
        equal = ((rows == rows[i]) & both).sum(axis=1)
        np.divide(equal, total, out=shares[i], where=total > 0)
    return shares, step > 1
