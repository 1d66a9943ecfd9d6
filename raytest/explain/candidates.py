"""Sets of columns as candidates: their values, what they explain, and how surprising that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytest.explain.chance import exact
from raytest.explain.columns import Column
from raytest.explain.partition import blocks, explained, holm, joint, refines, size
from raytest.explain.search import Set
from raytest.explain.tables import Alike, Candidate, Level, Role
from raytest.explain.work import Work

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MOST_REPORTED = 8
MOST_WEIGHED = 24


def candidates_of(work: Work, sets: Sequence[Set]) -> tuple[Candidate, ...]:
    """Sufficient sets with their chance, adjusted over all sets of that order; best first."""
    rows = []
    fewest = sorted(sets, key=lambda s: (size(joint([c.codes for c in s])), _preference(s)))
    for columns in fewest[:MOST_WEIGHED]:
        members = [c.codes for c in columns]
        p = exact(members, work.partition, (work.slot, work.launch))
        by_node = _by_node(work, members)
        # a set is found among very many: it must hold node by node too
        counted = p if len(columns) == 1 or by_node is None else max(p, by_node)
        rows.append((columns, counted, by_node))
    n_columns = len(work.of_role(Role.LABEL))
    order = len(sets[0]) if sets else 1
    adjusted = holm([p for _, p, _ in rows], math.comb(n_columns, order))
    made = [
        (columns, candidate_of(work, columns, p, q, by_node))
        for (columns, p, by_node), q in zip(rows, adjusted, strict=True)
    ]
    made.sort(key=lambda m: (len(m[1].levels), m[1].adjusted, _preference(m[0])))
    return tuple(candidate for _, candidate in made[:MOST_REPORTED])


def _preference(columns: Set) -> list[tuple[int, int, str]]:
    return [c.preference for c in columns]


def _by_node(work: Work, members: Sequence[Ints]) -> float | None:
    """The chance where nodes are dealt anew, for what is constant within each of several nodes."""
    outcome = blocks(work.partition, work.node)
    own = [blocks(m, work.node) for m in members]
    if size(work.node) < 2 or outcome is None or any(m is None for m in own):
        return None
    return exact([m for m in own if m is not None], outcome, ())


def candidate_of(
    work: Work, columns: Set, p: float, adjusted: float, by_node: float | None
) -> Candidate:
    codes = joint([c.codes for c in columns])
    levels, rows = _levels(work, columns, codes)
    return Candidate(
        members=tuple(_alike(c, rows) for c in columns),
        role=max(c.role for c in columns),
        levels=levels,
        sufficient=refines(codes, work.partition),
        explained=explained(work.partition, codes),
        p_value=p,
        adjusted=adjusted,
        p_by_node=by_node,
        requests=_requests_parted(codes, work.divergent),
        n_requests=work.divergent.shape[1],
    )


def _levels(work: Work, columns: Set, codes: Ints) -> tuple[tuple[Level, ...], list[int]]:
    """Each value of the set with its workers and classes, the largest class's first; and a worker
    that has it."""
    import numpy as np

    levels = []
    for code in range(size(codes)):
        rows = np.flatnonzero(codes == code)
        first = int(rows[0])
        values = tuple(c.texts[0][int(c.codes[first])] for c in columns)
        classes = tuple(int(k) for k in np.unique(work.partition[rows]))
        slots = len(np.unique(work.slot[rows]))
        levels.append((Level(values, len(rows), slots, classes), first))
    levels.sort(key=lambda x: (x[0].classes, -x[0].n_workers, x[0].values))
    return tuple(level for level, _ in levels), [row for _, row in levels]


def _alike(column: Column, rows: Sequence[int]) -> tuple[Alike, ...]:
    """The column's factors with their values on ``rows``."""
    codes = [int(column.codes[row]) for row in rows]
    return tuple(
        Alike(factor.name, factor.role, tuple(texts[c] for c in codes))
        for factor, texts in zip(column.factors, column.texts, strict=True)
    )


def _requests_parted(codes: Ints, divergent: Ints) -> int:
    """Divergent requests (columns of [n, u]) of which no value of the factor has two different
    stable results."""
    import numpy as np

    if not divergent.shape[1]:
        return 0
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    results = divergent[order]
    high = np.maximum.reduceat(np.where(results >= 0, results, -1), starts, axis=0)
    top = np.iinfo(np.int64).max
    low = np.minimum.reduceat(np.where(results >= 0, results, top), starts, axis=0)
    return int((low >= high).all(axis=0).sum())
