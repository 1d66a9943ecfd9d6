"""Partitions of workers as integer codes: how one refines another, and how likely by chance.

Codes are int64 [n], one a worker, 0..k-1 in order of first appearance. Entropies are in bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

# Counting assignments exactly stops here; beyond, an upper bound of the chance is given.
MOST_STATES = 20_000


def relabel(codes: npt.ArrayLike) -> Ints:
    """The same partition with codes 0..k-1 in order of first appearance."""
    import numpy as np

    _, first, inverse = np.unique(np.asarray(codes), return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]


def size(codes: Ints) -> int:
    """How many classes."""
    return int(codes.max()) + 1 if len(codes) else 0


def joint(codes: Sequence[Ints]) -> Ints:
    """The common refinement: workers are together where they are in each of ``codes``."""
    together = codes[0]
    for other in codes[1:]:
        together = relabel(together * size(other) + other)
    return together


def rows_as_codes(matrix: npt.NDArray[np.int64]) -> Ints:
    """Workers [n] with equal rows of ``matrix`` [n, m] are together."""
    import numpy as np

    if not matrix.size:
        return np.zeros(len(matrix), dtype=np.int64)
    rows = np.ascontiguousarray(matrix)
    return relabel(rows.view(np.dtype((np.void, rows.dtype.itemsize * rows.shape[1]))).reshape(-1))


def refines(fine: Ints, coarse: Ints) -> bool:
    """Whether each class of ``fine`` lies within one class of ``coarse``: H(coarse | fine) = 0."""
    return size(joint([fine, coarse])) == size(fine)


def entropy(codes: Ints) -> float:
    """Shannon entropy in bits."""
    import numpy as np

    share = np.bincount(codes) / max(len(codes), 1)
    share = share[share > 0]
    return float(-(share * np.log2(share)).sum())


def explained(outcome: Ints, factor: Ints) -> float:
    """I(outcome; factor) / H(outcome): the share of the outcome's entropy that ``factor``
    removes."""
    import numpy as np

    whole = entropy(outcome)
    pairs = np.bincount(factor * size(outcome) + outcome)
    share = pairs[pairs > 0] / len(outcome)
    both = float(-(share * np.log2(share)).sum())
    return 1.0 if whole == 0 else (whole + entropy(factor) - both) / whole


def blocks(codes: Ints, block: Ints) -> Ints | None:
    """``codes`` [n] as one code a block, or None where it varies within a block."""
    import numpy as np

    if not refines(block, codes):
        return None
    out = np.zeros(size(block), dtype=np.int64)
    out[block] = codes
    return relabel(out)


def chance_of_refining(factor: Ints, outcome: Ints) -> float:
    """The exact permutation p-value of a factor that refines the outcome: the share of all ways to
    deal the outcome's classes to the workers in which it still would.

    Favourable are the ways to give every level of the factor one class so that the classes keep
    their sizes; all are n! / prod(n_k!). Where counting would be long, an upper bound: the count is
    a coefficient of prod_levels(sum_k x_k^m), at most its value at any x > 0 over prod_k x_k^n_k.
    """
    import numpy as np

    levels = sorted((int(m) for m in np.bincount(factor)), reverse=True)
    classes = [int(n) for n in np.bincount(outcome)]
    if len(classes) == 1 or len(levels) == len(outcome):
        return 1.0
    total = math.lgamma(len(outcome) + 1) - sum(math.lgamma(n + 1) for n in classes)
    ways = _ways(levels, classes)
    logarithm = math.log(ways) if ways else _bound(levels, classes)
    return min(1.0, math.exp(min(0.0, logarithm - total)))


def _ways(levels: Sequence[int], classes: Sequence[int]) -> int:
    """Assignments of levels to classes that fill every class exactly; 0 where there are too many
    states to count."""
    states = {tuple(classes): 1}
    for size_ in levels:
        following: dict[tuple[int, ...], int] = {}
        for left, count in states.items():
            for k, room in enumerate(left):
                if room >= size_:
                    after = (*left[:k], room - size_, *left[k + 1 :])
                    following[after] = following.get(after, 0) + count
        if len(following) > MOST_STATES // max(1, len(classes)):
            return 0
        states = following
    return states.get(tuple([0] * len(classes)), 0)


def _bound(levels: Sequence[int], classes: Sequence[int]) -> float:
    """Logarithm of an upper bound of the number that :func:`_ways` counts."""
    n = sum(classes)
    shares = [c / n for c in classes]
    at_shares = sum(math.log(sum(s**m for s in shares)) for m in levels) - sum(
        c * math.log(s) for c, s in zip(classes, shares, strict=True)
    )
    return min(len(levels) * math.log(len(classes)), at_shares)


def holm(p_values: Sequence[float], n_tests: int) -> list[float]:
    """Holm's adjusted p-values of the smallest of ``n_tests`` tests, the others taken as 1."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, max(1, n_tests - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted
