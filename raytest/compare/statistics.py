"""Exact intervals and tests, on plain numbers and small arrays.

The independent unit is the request, not the token and not the worker: members of a fleet answer the
same prompts, and tokens after a flip are not trials.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its bounds at ``confidence``."""

    value: float
    low: float
    high: float
    confidence: float = CONFIDENCE


def clopper_pearson(k: float, n: float, confidence: float = CONFIDENCE) -> Interval:
    """Exact two-sided interval of a rate from ``k`` events in ``n`` independent units.

    Clopper & Pearson, Biometrika 26 (1934): the beta quantiles at (1-c)/2 and (1+c)/2. Without
    units the interval is [0, 1].
    """
    from scipy.special import betaincinv

    if n <= 0:
        return Interval(float("nan"), 0.0, 1.0, confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if k <= 0 else float(betaincinv(k, n - k + 1, tail))
    high = 1.0 if k >= n else float(betaincinv(k + 1, n - k, 1 - tail))
    return Interval(k / n, low, high, confidence)


def rate_bounds(k: float, n: float, confidence: float) -> tuple[float, float]:
    """One-sided exact bounds of a rate, each at ``confidence``."""
    both = clopper_pearson(k, n, 2 * confidence - 1)
    return both.low, both.high


def upper_bound_of_none(n: int, confidence: float = CONFIDENCE) -> float:
    """The rate that zero events in ``n`` units still allow: 1-(1-c)^(1/n), about 3/n at 95%."""
    return 1.0 if n <= 0 else float(1 - (1 - confidence) ** (1 / n))


def poisson_interval(events: float, exposure: float, confidence: float = CONFIDENCE) -> Interval:
    """Exact interval of a rate of ``events`` over ``exposure`` (Garwood, Biometrika 28 (1936)).

    [chi2_{a/2}(2k)/2T, chi2_{1-a/2}(2k+2)/2T], written with the gamma quantile so that ``events``
    may be a fraction (counts divided by a design effect).
    """
    from scipy.special import gammaincinv

    if exposure <= 0:
        return Interval(float("nan"), 0.0, float("inf"), confidence)
    tail = (1 - confidence) / 2
    low = 0.0 if events <= 0 else float(gammaincinv(events, tail)) / exposure
    high = float(gammaincinv(events + 1, 1 - tail)) / exposure
    return Interval(events / exposure, low, high, confidence)


def student_interval(values: npt.NDArray[np.float64], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean of per-request values [n]; approximate, not exact. With
    fewer than two values the bounds are infinite."""
    import numpy as np
    from scipy.special import stdtrit

    n = len(values)
    mean = float(np.mean(values)) if n else float("nan")
    if n < 2:
        return Interval(mean, float("-inf"), float("inf"), confidence)
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * float(np.std(values, ddof=1)) / n**0.5
    return Interval(mean, mean - half, mean + half, confidence)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (Scand. J. Stat. 6 (1979)), in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [1.0] * len(p_values)
    worst = 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def poisson_binomial_tail(chances: npt.NDArray[np.float64], k: int) -> float:
    """P(X >= k) for a sum of independent events with probabilities ``chances`` [n], by convolution
    (exact; O(n^2))."""
    import numpy as np

    if k <= 0:
        return 1.0
    if k > len(chances):
        return 0.0
    mass = np.zeros(len(chances) + 1)
    mass[0] = 1.0
    for i, p in enumerate(chances, start=1):
        mass[1 : i + 1] = mass[1 : i + 1] * (1 - p) + mass[:i] * p
        mass[0] *= 1 - p
    return float(min(1.0, mass[k:].sum()))


def kaplan_meier(
    times: npt.NDArray[np.int64],
    diverged: npt.NDArray[np.bool_],
    weights: npt.NDArray[np.float64],
    at: Sequence[int],
) -> list[float]:
    """Share still identical after t tokens, for each t of ``at``: the product-limit estimate
    (Kaplan & Meier, JASA 53 (1958)). ``times`` [n] are tokens at risk (first divergence + 1, or the
    length where none came), ``weights`` [n] how many comparisons each stands for."""
    import numpy as np

    if not len(times):
        return [float("nan")] * len(at)
    order = np.argsort(times, kind="stable")
    steps, start = np.unique(times[order], return_index=True)
    events = np.add.reduceat(np.where(diverged, weights, 0.0)[order], start)
    leaving = np.add.reduceat(weights[order], start)
    at_risk = weights.sum() - np.concatenate([[0.0], np.cumsum(leaving)[:-1]])
    survival = np.cumprod(1 - events / at_risk)
    place = np.searchsorted(steps, np.asarray(at), side="right")
    return [float(survival[i - 1]) if i else 1.0 for i in place]


def units_needed(decided: Callable[[int], bool], have: int, most: int = 100_000_000) -> int | None:
    """Smallest number of units above ``have`` for which ``decided`` holds (assumed monotone), less
    ``have``; None where even ``most`` would not do."""
    low, high = have, max(1, have) * 2
    while not decided(high):
        if high >= most:
            return None
        low, high = high, min(most, high * 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) else (middle, high)
    return high - have


def plain(value: Any) -> Any:
    """A float as JSON carries it: NaN and infinities become None."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
