"""Which recorded factors explain the partition of workers into classes of equal results.

Pure: tables in, plain values out. A factor is *sufficient* where no value of it has workers of two
classes (H(P|F) = 0); among sufficient ones the coarsest is preferred, and those that part the
workers alike are confounded and stay together. What merely names a worker always is sufficient, and
says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytest.explain.chance import exact, mutual_information, sampled
from raytest.explain.columns import Column, fold
from raytest.explain.noise import SIGNIFICANT, rates_by_factor
from raytest.explain.partition import (
    blocks,
    explained,
    holm,
    joint,
    refines,
    relabel,
    rows_as_codes,
    size,
)
from raytest.explain.regroup import regroupings
from raytest.explain.search import Set, sufficient_sets
from raytest.explain.tables import (
    UNKNOWN,
    UNSTABLE,
    Alike,
    Candidate,
    Conclusion,
    Explanation,
    Factor,
    Level,
    Noise,
    Outcomes,
    Retest,
    Role,
    WorkerClass,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

MOST_REPORTED = 8
MOST_TESTED = 8


def attribute(outcomes: Outcomes, factors: Sequence[Factor]) -> Explanation:
    """Explain ``outcomes`` by ``factors`` (each a value per worker).

    Classes are the common refinement over the requests that every worker has and answers alike in
    all its repeats. Workers without any result are left out and counted.
    """
    work = _Work.of(outcomes, factors)
    found = _classify(work, _conclude(work) if size(work.partition) > 1 else _Found())
    noise = _noise(work)
    conclusion = found.conclusion
    if conclusion is Conclusion.EQUAL and noise is not None:
        conclusion = Conclusion.NOT_STABLE
    return Explanation(
        conclusion=conclusion,
        n_workers=len(work.keep),
        n_slots=size(work.slot),
        n_factors=len(factors),
        n_requests=outcomes.codes.shape[1],
        n_divergent=work.divergent.shape[1],
        n_left_out=len(outcomes.workers) - len(work.keep),
        repeats=outcomes.repeats,
        by_slot=work.by_slot,
        tied=work.tied,
        classes=found.classes,
        causes=found.causes,
        labels=found.labels,
        partial=found.partial,
        noise=noise,
        retest=found.retest,
    )


@dataclass(frozen=True, slots=True)
class _Work:
    """The workers that have results [n], their classes and the folded factors."""

    outcomes: Outcomes
    keep: Ints
    slot: Ints
    node: Ints
    launch: Ints
    partition: Ints
    by_slot: bool
    tied: bool
    divergent: Ints
    unstable: npt.NDArray[np.bool_]
    columns: tuple[Column, ...]

    @classmethod
    def of(cls, outcomes: Outcomes, factors: Sequence[Factor]) -> _Work:
        import numpy as np

        keep = np.flatnonzero((outcomes.codes != UNKNOWN).any(axis=1))
        codes = outcomes.codes[keep]
        shared = (codes >= 0).all(axis=0)
        found = rows_as_codes(codes[:, shared])
        counts = np.bincount(found) if len(found) else np.zeros(0, dtype=np.int64)
        # numbered by size, the largest first; equal sizes in order of appearance
        rank = np.empty(len(counts), dtype=np.int64)
        rank[np.argsort(-counts, kind="stable")] = np.arange(len(counts))
        partition = rank[found]
        slot, node, launch = (
            relabel(x[keep]) for x in (outcomes.slot, outcomes.node, outcomes.launch)
        )
        largest = np.sort(counts)[::-1]
        high = np.where(codes >= 0, codes, -1).max(axis=0, initial=-1)
        low = np.where(codes >= 0, codes, np.iinfo(np.int64).max).min(
            axis=0, initial=np.iinfo(np.int64).max
        )
        return cls(
            outcomes=outcomes,
            keep=keep,
            slot=slot,
            node=node,
            launch=launch,
            partition=partition,
            by_slot=refines(slot, partition) if len(slot) else True,
            tied=len(largest) > 1 and largest[0] == largest[1],
            divergent=codes[:, (high >= 0) & (low < high)],
            unstable=codes == UNSTABLE,
            columns=tuple(fold(factors, keep, outcomes.slot, outcomes.node)),
        )

    @property
    def names(self) -> tuple[Ints, ...]:
        """Partitions that a set of settings may not merely spell out: by slot, and by node."""
        by_node = (self.node,) if 2 < size(self.node) < size(self.slot) else ()
        return (self.slot, *by_node) if size(self.slot) > 2 else ()

    @property
    def units(self) -> tuple[Ints, ...]:
        """What is dealt anew as a whole in a permutation, coarsest first."""
        import numpy as np

        return self.slot, self.launch, np.arange(len(self.slot))

    def of_role(self, most: Role) -> list[Column]:
        """Columns up to a role."""
        return [c for c in self.columns if c.role <= most]

    def slots_of(self, rows: Ints) -> list[str]:
        """Names of the slots of some workers, sorted."""
        own = self.outcomes.slot[self.keep[rows]]
        return sorted({self.outcomes.slot_names[int(s)] for s in own})


@dataclass(frozen=True, slots=True)
class _Found:
    conclusion: Conclusion = Conclusion.EQUAL
    classes: tuple[WorkerClass, ...] = ()
    causes: tuple[Candidate, ...] = ()
    labels: tuple[Candidate, ...] = ()
    partial: tuple[Candidate, ...] = ()
    retest: Retest | None = None


def _classify(work: _Work, found: _Found) -> _Found:
    """Add the classes, largest first."""
    import numpy as np

    classes = []
    for code in range(size(work.partition)):
        rows = np.flatnonzero(work.partition == code)
        names = sorted(work.outcomes.workers[int(i)] for i in work.keep[rows])
        classes.append(WorkerClass(tuple(names), tuple(work.slots_of(rows))))
    return replace(found, classes=tuple(classes))


def _conclude(work: _Work) -> _Found:
    n_slots = size(work.slot)
    settings = work.of_role(Role.PASS)
    if len(work.partition) == 2 or (work.by_slot and n_slots == 2):
        return _Found(Conclusion.TWO, causes=_candidates(work, _singles(work, settings)))
    lonely = _lonely(work)
    if lonely is not None:
        causes = _candidates(work, _singles(work, settings))
        return _Found(Conclusion.SINGLE, causes=causes, retest=_retest(work, lonely))
    causes = _candidates(work, sufficient_sets(settings, work.partition, work.names))
    named = [c for c in work.columns if c.role is Role.LABEL]
    if causes:
        labels = _candidates(work, _singles(work, named))
    else:
        sets = sufficient_sets([*settings, *named], work.partition, work.names[:1])
        labels = _candidates(work, sets)
    if any(c.adjusted < SIGNIFICANT for c in causes):
        return _Found(Conclusion.CAUSE, causes=causes, labels=labels)
    if any(c.adjusted < SIGNIFICANT for c in labels):
        return _Found(Conclusion.LABEL, causes=causes, labels=labels)
    partial = _partial(work)
    if partial:
        return _Found(Conclusion.PARTLY, causes=causes, labels=labels, partial=partial)
    conclusion = Conclusion.CHANCE if causes or labels else Conclusion.NONE
    return _Found(conclusion, causes=causes, labels=labels)


def _singles(work: _Work, columns: Sequence[Column]) -> list[Set]:
    """Every column that is sufficient on its own, coarsest ones first in the report."""
    return [(c,) for c in columns if refines(c.codes, work.partition)]


def _lonely(work: _Work) -> int | None:
    """The one slot (its first worker) on which all workers outside the largest class are, where
    there are three or more slots."""
    import numpy as np

    if size(work.slot) < 3 or work.tied:
        return None
    outside = np.flatnonzero(work.partition != 0)
    if len(np.unique(work.slot[outside])) != 1:
        return None
    return int(outside[0])


def _retest(work: _Work, row: int) -> Retest:
    slot = int(work.outcomes.slot[work.keep[row]])
    devices = work.outcomes.devices[slot] if work.outcomes.devices else 0
    group = work.outcomes.group[slot] if work.outcomes.group else 1
    try:
        rounds = regroupings(devices, group) if group > 1 else ()
    except ValueError:
        rounds = ()
    return Retest(work.outcomes.slot_names[slot], group, devices, rounds)


def _candidates(work: _Work, sets: Sequence[Set]) -> tuple[Candidate, ...]:
    """Sufficient sets with their chance, adjusted over all sets of that order; best first."""
    rows = []
    for columns in sets:
        members = [c.codes for c in columns]
        p = exact(members, work.partition, work.units[:2])
        by_node = _by_node(work, members)
        # a set is found among very many: it must hold node by node too
        counted = p if len(columns) == 1 or by_node is None else max(p, by_node)
        rows.append((columns, counted, by_node))
    n_columns = len(work.of_role(Role.LABEL))
    order = len(sets[0]) if sets else 1
    adjusted = holm([p for _, p, _ in rows], math.comb(n_columns, order))
    made = [
        (columns, _candidate(work, columns, p, q, by_node))
        for (columns, p, by_node), q in zip(rows, adjusted, strict=True)
    ]
    made.sort(key=lambda m: (len(m[1].levels), m[1].adjusted, [c.preference for c in m[0]]))
    return tuple(candidate for _, candidate in made[:MOST_REPORTED])


def _by_node(work: _Work, members: Sequence[Ints]) -> float | None:
    """The chance where nodes are dealt anew, for what is constant within each of several nodes."""
    outcome = blocks(work.partition, work.node)
    own = [blocks(m, work.node) for m in members]
    if size(work.node) < 2 or outcome is None or any(m is None for m in own):
        return None
    return exact([m for m in own if m is not None], outcome, ())


def _candidate(
    work: _Work, columns: Set, p: float, adjusted: float, by_node: float | None
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


def _levels(work: _Work, columns: Set, codes: Ints) -> tuple[tuple[Level, ...], list[int]]:
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


def _partial(work: _Work) -> tuple[Candidate, ...]:
    """Single columns that explain a part of the partition beyond chance, the largest first."""
    import numpy as np

    n = len(work.partition)
    tried = [c for c in work.of_role(Role.LABEL) if size(c.codes) <= max(2, n // 3)]
    classes = size(work.partition)

    def weight(column: Column) -> float:
        # the G statistic per degree of freedom: a factor of many values fits more by itself
        freedom = (size(column.codes) - 1) * (classes - 1)
        return explained(work.partition, column.codes) / freedom

    tried.sort(key=lambda c: (-weight(c), c.preference))
    tested = tried[:MOST_TESTED]
    statistic = mutual_information(work.partition)
    rng = np.random.default_rng(0)
    p_values = [sampled(statistic, c.codes, work.units, rng) for c in tested]
    adjusted = holm(p_values, len(tried))
    kept: list[tuple[Column, Candidate]] = []
    for column, p, q in zip(tested, p_values, adjusted, strict=True):
        made = _candidate(work, (column,), p, q, None)
        # a finer factor that parts no request more than a coarser one adds nothing
        idle = any(
            made.requests <= other.requests and refines(column.codes, coarser.codes)
            for coarser, other in kept
        )
        if q < SIGNIFICANT and not idle:
            kept.append((column, made))
    kept.sort(key=lambda k: (-k[1].requests, k[0].role, -k[1].explained, k[0].preference))
    return tuple(candidate for _, candidate in kept)


def _noise(work: _Work) -> Noise | None:
    import numpy as np

    if not work.unstable.any():
        return None
    measured = np.maximum((work.outcomes.codes[work.keep] != UNKNOWN).sum(axis=1), 1)
    rate = work.unstable.sum(axis=1) / measured
    marked = np.asarray(work.unstable.any(axis=1), dtype=np.int64)
    rows = np.flatnonzero(marked)
    causes: tuple[Candidate, ...] = ()
    if 0 < len(rows) < len(marked):
        other = replace(
            work,
            partition=marked,
            by_slot=refines(work.slot, marked),
            divergent=marked[:, None],
        )
        sets = sufficient_sets(other.of_role(Role.PASS), other.partition, other.names)
        found = _candidates(other, sets)
        causes = tuple(c for c in found if c.adjusted < SIGNIFICANT)
    return Noise(
        workers=tuple(sorted(work.outcomes.workers[int(i)] for i in work.keep[rows])),
        n_workers=len(rows),
        n_requests=int(work.unstable.any(axis=0).sum()),
        rate=float(rate.mean()),
        causes=causes,
        rates=rates_by_factor(work.of_role(Role.LABEL), rate, work.units),
    )
