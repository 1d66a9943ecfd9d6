"""Where a worker's own repeats differ: no factor can explain that, so rates take the place of
classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytest.explain.chance import sampled, variance_between
from raytest.explain.columns import Column
from raytest.explain.partition import holm, refines, size
from raytest.explain.tables import Rates, Role

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float64]

SIGNIFICANT = 0.05
MOST_TESTED = 8


def rates_by_factor(
    columns: Sequence[Column], rate: Floats, units: Sequence[Ints]
) -> tuple[Rates, ...]:
    """Factors whose values go with the share ``rate`` [n] of requests that differ between repeats:
    the share of its variance that lies between a factor's values, by permuting whole workers."""
    import numpy as np

    tried = [c for c in columns if c.role < Role.IDENTITY and size(c.codes) <= len(rate) // 2]
    if not tried or np.ptp(rate) == 0:
        return ()
    statistic = variance_between(rate)

    def weight(column: Column) -> float:
        # per degree of freedom: a factor of many values fits more by itself
        return float(statistic(column.codes[None])[0]) / (size(column.codes) - 1)

    tried.sort(key=lambda c: (-weight(c), c.preference))
    tested = tried[:MOST_TESTED]
    rng = np.random.default_rng(0)
    p_values = [sampled(statistic, c.codes, units, rng) for c in tested]
    adjusted = holm(p_values, len(tried))
    kept: list[Column] = []
    found = []
    for column, p, q in zip(tested, p_values, adjusted, strict=True):
        if q < SIGNIFICANT and not any(refines(column.codes, other.codes) for other in kept):
            kept.append(column)
            found.append(_rates(column, rate, p, q))
    return tuple(found)


def _rates(column: Column, rate: Floats, p: float, adjusted: float) -> Rates:
    import numpy as np

    factor = column.factors[0]
    mean = np.bincount(column.codes, weights=rate) / np.bincount(column.codes)
    order = np.argsort(-mean, kind="stable")
    values = [column.texts[0][int(i)] for i in order]
    return Rates(factor.name, tuple(values), tuple(float(mean[i]) for i in order), p, adjusted)
