"""Minimal sets of columns that determine the classes, level by level.

After TANE (Huhtala et al., Computer Journal 42 (1999)): no superset of a sufficient set is tried.
Sets are screened against a sample of worker pairs from different classes, each of which some member
must part; what survives is checked exactly, so the sample decides the speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from raytest.explain.columns import Column
from raytest.explain.partition import joint, refines, size

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MOST_ORDER = 3
SAMPLED_PAIRS = 1024
# Above this many columns, sets of three are not tried: their number grows with the cube.
MOST_FOR_TRIPLES = 160
MOST_SETS = 100
MOST_CHECKED = 2_000

Set = tuple[Column, ...]


def sufficient_sets(
    columns: Sequence[Column], outcome: Ints, names: Sequence[Ints] = ()
) -> list[Set]:
    """The coarsest sets of the lowest order that determine ``outcome``; [] where none up to three
    columns does.

    Sets of two or more that are finer than the outcome and tell apart all that one of ``names``
    (partitions by slot, by node) does, or have fewer than two workers a value, do no more than name
    workers: they are left out.
    """
    single = [(c,) for c in columns if refines(c.codes, outcome)]
    if single:
        return coarsest(single)
    columns = [c for c in columns if not _only_names(c.codes, outcome, ())]
    parted = _parted(columns, outcome)
    for order in range(2, MOST_ORDER + 1):
        if order > 2 and len(columns) > MOST_FOR_TRIPLES:
            break
        found: list[Set] = []
        for places in _screened(parted, order)[:MOST_CHECKED]:
            chosen = tuple(columns[i] for i in places)
            codes = joint([c.codes for c in chosen])
            if refines(codes, outcome) and not _only_names(codes, outcome, names):
                found.append(chosen)
                if len(found) == MOST_SETS:
                    break
        if found:
            return coarsest(found)
    return []


def _only_names(codes: Ints, outcome: Ints, names: Sequence[Ints]) -> bool:
    n = size(codes)
    return n > size(outcome) and (2 * n > len(codes) or any(refines(codes, x) for x in names))


def coarsest(sets: Sequence[Set]) -> list[Set]:
    """Those that no other refines less: a set goes where another, coarser one does as well."""
    codes = [joint([c.codes for c in s]) for s in sets]
    return [
        own
        for i, own in enumerate(sets)
        if not any(
            size(codes[j]) < size(codes[i]) and refines(codes[i], codes[j])
            for j in range(len(sets))
        )
    ]


def _parted(columns: Sequence[Column], outcome: Ints) -> npt.NDArray[np.float32]:
    """1 where a column [c] does not part a sampled pair [s] of workers of different classes."""
    import numpy as np

    rng = np.random.default_rng(0)
    n = len(outcome)
    a, b = rng.integers(n, size=(2, 20 * SAMPLED_PAIRS))
    different = np.flatnonzero(outcome[a] != outcome[b])[:SAMPLED_PAIRS]
    a, b = a[different], b[different]
    if not columns:
        return np.zeros((0, len(a)), dtype=np.float32)
    codes = np.stack([c.codes for c in columns])
    together: npt.NDArray[np.float32] = (codes[:, a] == codes[:, b]).astype(np.float32)
    return together


def _screened(together: npt.NDArray[np.float32], order: int) -> list[tuple[int, ...]]:
    """Sets of columns that leave no sampled pair together, in order of preference."""
    import numpy as np

    n = len(together)
    found: list[tuple[int, ...]] = []
    for first in combinations(range(n), order - 2):
        # only pairs that the first column leaves together are left for the others to part
        left = together[:, together[first[0]] > 0] if first else together
        start = first[-1] + 1 if first else 0
        missed = left[start:] @ left[start:].T
        rows, others = np.nonzero(np.triu(missed == 0, 1))
        pairs = zip((rows + start).tolist(), (others + start).tolist(), strict=True)
        found += [(*first, i, j) for i, j in pairs]
    return sorted(found, key=lambda places: (sum(places), places))
