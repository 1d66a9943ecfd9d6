"""How surprising it is that a set of factors fits the classes: whole workers are permuted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from raytest.explain.partition import (
    blocks,
    chance_of_refining,
    entropy,
    joint,
    refines,
    relabel,
    size,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

FEW, MANY = 199, 9999
BATCH = 200


def exact(members: Sequence[Ints], outcome: Ints, units: Sequence[Ints]) -> float:
    """P-value of a sufficient set: the chance that it would fit if one member's values were dealt
    anew to the units, the other members held; the largest over the members.

    ``units`` [n] each, coarsest first: the unit is the first within which the member is constant,
    and so is the outcome. For one member this is the plain permutation test.
    """
    worst = 0.0
    for i, member in enumerate(members):
        others = [m for j, m in enumerate(members) if j != i]
        worst = max(worst, _given(member, others, outcome, units))
    return worst


def _given(member: Ints, others: Sequence[Ints], outcome: Ints, units: Sequence[Ints]) -> float:
    import numpy as np

    strata = joint(others) if others else np.zeros(len(outcome), dtype=np.int64)
    p_values, disjoint = [1.0], True
    order = np.argsort(strata, kind="stable")
    for rows in np.split(order, np.cumsum(np.bincount(strata))[:-1]):
        if (outcome[rows] == outcome[rows[0]]).all():
            continue
        f, p = relabel(member[rows]), relabel(outcome[rows])
        for unit in (*units, np.arange(len(outcome))):
            block = relabel(unit[rows])
            by_factor, by_outcome = blocks(f, block), blocks(p, block)
            if by_factor is not None and by_outcome is not None:
                p_values.append(chance_of_refining(by_factor, by_outcome))
                disjoint = disjoint and refines(unit, strata)
                break
    # Strata that share units are dealt together: the joint event is within each of them.
    return float(np.prod(p_values)) if disjoint else min(p_values)


Statistic = Callable[["Ints"], "npt.NDArray[np.float64]"]


def sampled(
    statistic: Statistic, factor: Ints, units: Sequence[Ints], rng: np.random.Generator
) -> float:
    """P-value of ``statistic`` (large is extreme) by dealing the factor's values anew to whole
    units: 199 times, and 9,999 times where none of those reached what was observed.

    ``statistic`` takes codes [m, n] and gives a number for each row; the unit is the first of
    ``units`` within which the factor is constant.
    """
    import numpy as np

    observed = float(statistic(factor[None])[0])
    unit, values = next((u, v) for u in units if (v := blocks(factor, relabel(u))) is not None)
    place = relabel(unit)
    reached = done = 0
    for wanted in (FEW, MANY):
        while done < wanted and not (reached and done >= FEW):
            n = min(BATCH, wanted - done)
            dealt = rng.permuted(np.tile(values, (n, 1)), axis=1)[:, place]
            reached += int((statistic(dealt) >= observed - 1e-12).sum())
            done += n
    return (reached + 1) / (done + 1)


def mutual_information(outcome: Ints) -> Statistic:
    """I(outcome; factor) in bits, for factors [m, n]."""
    import numpy as np

    k = size(outcome)

    def statistic(factors: Ints) -> npt.NDArray[np.float64]:
        levels = int(factors.max()) + 1
        row = np.arange(len(factors))[:, None] * (levels * k)
        counts = np.bincount(
            (row + factors * k + outcome).reshape(-1), minlength=len(factors) * levels * k
        ).reshape(len(factors), levels, k)
        both = _plogp(counts / factors.shape[1])
        by_factor = _plogp(counts.sum(axis=2, keepdims=True) / factors.shape[1])
        return both - by_factor + entropy(outcome)

    return statistic


def variance_between(rate: npt.NDArray[np.float64]) -> Statistic:
    """The share of the variance of ``rate`` [n] that lies between the values of factors [m, n]."""
    import numpy as np

    centred = rate - rate.mean()
    whole = float((centred**2).sum())

    def statistic(factors: Ints) -> npt.NDArray[np.float64]:
        levels = int(factors.max()) + 1
        codes = (np.arange(len(factors))[:, None] * levels + factors).reshape(-1)
        counts = np.bincount(codes, minlength=len(factors) * levels)
        sums = np.bincount(
            codes, weights=np.tile(centred, len(factors)), minlength=len(factors) * levels
        )
        between = (sums**2 / np.maximum(counts, 1)).reshape(len(factors), levels)
        total: npt.NDArray[np.float64] = between.sum(axis=1) / whole
        return total

    return statistic


def _plogp(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum of p log2 p over all but the first axis."""
    import numpy as np

    logs = np.log2(np.where(shares > 0, shares, 1.0))
    total: npt.NDArray[np.float64] = (shares * logs).sum(axis=(1, 2))
    return total
