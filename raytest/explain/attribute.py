"""Which recorded factors explain the partition of workers into classes of equal results.

Pure: tables in, plain values out. A factor is *sufficient* where no value of it has workers of two
classes (H(P|F) = 0); among sufficient ones the coarsest is preferred, and those that part the
workers alike are confounded and stay together. What merely names a worker always is sufficient, and
says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raytest.explain.candidates import candidates_of
from raytest.explain.columns import Column
from raytest.explain.noise import SIGNIFICANT, rates_by_factor
from raytest.explain.partial import partial_of
from raytest.explain.partition import refines, size
from raytest.explain.regroup import regroupings
from raytest.explain.search import Set, sufficient_sets
from raytest.explain.tables import (
    UNKNOWN,
    Candidate,
    Conclusion,
    Explanation,
    Factor,
    Noise,
    Outcomes,
    Retest,
    Role,
    WorkerClass,
)
from raytest.explain.work import Work


def attribute(outcomes: Outcomes, factors: Sequence[Factor]) -> Explanation:
    """Explain ``outcomes`` by ``factors`` (each a value per worker).

    Classes are the common refinement over the requests that every worker has and answers alike in
    all its repeats. Workers without any result are left out and counted.
    """
    work = Work.of(outcomes, factors)
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
class _Found:
    conclusion: Conclusion = Conclusion.EQUAL
    classes: tuple[WorkerClass, ...] = ()
    causes: tuple[Candidate, ...] = ()
    labels: tuple[Candidate, ...] = ()
    partial: tuple[Candidate, ...] = ()
    retest: Retest | None = None


def _classify(work: Work, found: _Found) -> _Found:
    """Add the classes, largest first."""
    import numpy as np

    classes = []
    for code in range(size(work.partition)):
        rows = np.flatnonzero(work.partition == code)
        names = sorted(work.outcomes.workers[int(i)] for i in work.keep[rows])
        classes.append(WorkerClass(tuple(names), tuple(work.slots_of(rows))))
    return replace(found, classes=tuple(classes))


def _conclude(work: Work) -> _Found:
    n_slots = size(work.slot)
    settings = work.of_role(Role.PASS)
    if len(work.partition) == 2 or (work.by_slot and n_slots == 2):
        return _Found(Conclusion.TWO, causes=candidates_of(work, _singles(work, settings)))
    lonely = _lonely(work)
    if lonely is not None:
        causes = candidates_of(work, _singles(work, settings))
        return _Found(Conclusion.SINGLE, causes=causes, retest=_retest(work, lonely))
    causes = candidates_of(work, sufficient_sets(settings, work.partition, work.names))
    named = [c for c in work.columns if c.role is Role.LABEL]
    if causes:
        labels = candidates_of(work, _singles(work, named))
    else:
        sets = sufficient_sets([*settings, *named], work.partition, work.names[:1])
        labels = candidates_of(work, sets)
    if any(c.adjusted < SIGNIFICANT for c in causes):
        return _Found(Conclusion.CAUSE, causes=causes, labels=labels)
    if any(c.adjusted < SIGNIFICANT for c in labels):
        return _Found(Conclusion.LABEL, causes=causes, labels=labels)
    partial = partial_of(work)
    if partial:
        return _Found(Conclusion.PARTLY, causes=causes, labels=labels, partial=partial)
    conclusion = Conclusion.CHANCE if causes or labels else Conclusion.NONE
    return _Found(conclusion, causes=causes, labels=labels)


def _singles(work: Work, columns: Sequence[Column]) -> list[Set]:
    """Every column that is sufficient on its own, coarsest ones first in the report."""
    return [(c,) for c in columns if refines(c.codes, work.partition)]


def _lonely(work: Work) -> int | None:
    """The one slot (its first worker) on which all workers outside the largest class are, where
    there are three or more slots."""
    import numpy as np

    if size(work.slot) < 3 or work.tied:
        return None
    outside = np.flatnonzero(work.partition != 0)
    if len(np.unique(work.slot[outside])) != 1:
        return None
    return int(outside[0])


def _retest(work: Work, row: int) -> Retest:
    slot = int(work.outcomes.slot[work.keep[row]])
    devices = work.outcomes.devices[slot] if work.outcomes.devices else 0
    group = work.outcomes.group[slot] if work.outcomes.group else 1
    try:
        rounds = regroupings(devices, group) if group > 1 else ()
    except ValueError:
        rounds = ()
    return Retest(work.outcomes.slot_names[slot], group, devices, rounds)


def _noise(work: Work) -> Noise | None:
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
        found = candidates_of(other, sets)
        causes = tuple(c for c in found if c.adjusted < SIGNIFICANT)
    return Noise(
        workers=tuple(sorted(work.outcomes.workers[int(i)] for i in work.keep[rows])),
        n_workers=len(rows),
        n_requests=int(work.unstable.any(axis=0).sum()),
        rate=float(rate.mean()),
        causes=causes,
        rates=rates_by_factor(work.of_role(Role.LABEL), rate, work.units),
    )
