"""Detailed comparison of many pairs of payloads at once, up to and including the first divergence.

Same formulas as :mod:`raytest.compare.metrics`, on flat arrays: no loop over pairs or tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from raytest.compare.flat import Flat, first_true, take
from raytest.compare.metrics import SERIES_LIMIT, k3_terms, logprob_differences, ulp_distance
from raytest.compare.top import compare_candidates, margins_at

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

# Arrays of one chunk stay in a core's cache.
CHUNK_TOKENS = 1 << 16
# Differences are counted by the upper half of float32: sign, 8 bits of exponent, 7 of significand.
# So a quantile is known to 0.8%, in memory that does not grow.
HISTOGRAM_BINS = 1 << 16
_SHIFT = 16


@dataclass(slots=True)
class PairMetrics:
    """One entry per pair [p]; a is the reference.

    ``first`` is the first divergent position (-1: tokens equal), ``token_a`` and ``token_b`` what
    stands there (-1: ended). ``positions`` logprob pairs were compared, ``sampled_positions`` of
    them before the flip; ``first_bits`` is the first whose bits differ (-1: none). ``sum_abs``
    covers all of them, ``prefix_abs`` those before the flip. ``margin_a`` and ``margin_b`` are NaN
    where unknown; ``candidates``: both sides list some; ``mutual``: each side lists the other's
    token. ``epsilon`` is the largest residual on the common prefix over ``prefix_positions``
    positions with candidates.
    """

    first: Ints
    length_a: Ints
    length_b: Ints
    token_a: Ints
    token_b: Ints
    positions: Ints
    sampled_positions: Ints
    first_bits: Ints
    max_abs: Doubles
    sum_abs: Doubles
    prefix_abs: Doubles
    sum_delta: Doubles
    sum_k3: Doubles
    max_ulp: Ints
    margin_a: Doubles
    margin_b: Doubles
    candidates: Bools
    mutual: Bools
    epsilon: Doubles
    prefix_positions: Ints
    max_shift: Doubles
    overlap_sum: Doubles
    overlap_positions: Ints

    @classmethod
    def empty(cls, n: int) -> PairMetrics:
        """``n`` pairs not yet compared."""
        import numpy as np

        unset = {"first": -1, "token_a": -1, "token_b": -1, "first_bits": -1}
        values: dict[str, Any] = {}
        for f in fields(cls):
            kind = {"Ints": np.int64, "Doubles": np.float64, "Bools": np.bool_}[str(f.type)]
            fill = np.nan if f.name.startswith("margin") else unset.get(f.name, 0)
            values[f.name] = np.full(n, fill, dtype=kind)
        return cls(**values)

    def pick(self, where: Ints | slice) -> PairMetrics:
        """The entries at ``where``, in its order; a slice shares memory."""
        return PairMetrics(*[getattr(self, name)[where] for name in _NAMES])

    def put(self, where: Ints, other: PairMetrics) -> None:
        """Set the entries at ``where`` from ``other``."""
        for name in _NAMES:
            getattr(self, name)[where] = getattr(other, name)


_NAMES = tuple(f.name for f in fields(PairMetrics))


@dataclass(slots=True)
class Histogram:
    """Logprob differences lp_A - lp_B by sign and size: counts [65536], negatives in the upper
    half."""

    counts: npt.NDArray[np.int64]

    @classmethod
    def empty(cls) -> Histogram:
        """No differences yet."""
        import numpy as np

        return cls(np.zeros(HISTOGRAM_BINS, dtype=np.int64))

    def add(self, delta: Floats) -> None:
        """Count differences (float32)."""
        import numpy as np

        upper = 1 if sys.byteorder == "little" else 0
        index = delta.view(np.uint16)[upper::2].astype(np.int64)
        self.counts += np.bincount(index, minlength=HISTOGRAM_BINS)

    def quantile_abs(self, q: float) -> float:
        """Quantile of |lp_A - lp_B|, to 0.8%; NaN where nothing was counted."""
        half = HISTOGRAM_BINS // 2
        return _quantile(self.counts[:half] + self.counts[half:], q, _edges())

    def quantile(self, q: float) -> float:
        """Quantile of lp_A - lp_B, to 0.8%."""
        import numpy as np

        half = HISTOGRAM_BINS // 2
        edges = _edges()
        counts = np.concatenate([self.counts[half:][::-1], self.counts[:half]])
        return _quantile(counts, q, np.concatenate([-edges[::-1], edges]))


def _edges() -> Doubles:
    """Upper edge of each bin of |difference| (the bin of zero is exact)."""
    import numpy as np

    half = HISTOGRAM_BINS // 2
    last = (np.arange(half, dtype=np.uint32) << _SHIFT) + np.uint32((1 << _SHIFT) - 1)
    infinite = np.uint32(0x7F800000)
    values: Doubles = np.minimum(last, infinite).view(np.float32).astype(np.float64)
    values[0] = 0.0
    return values


def _quantile(counts: npt.NDArray[np.int64], q: float, values: Doubles) -> float:
    import numpy as np

    total = int(counts.sum())
    if not total:
        return float("nan")
    rank = max(1, int(np.ceil(q * total)))
    return float(values[np.searchsorted(np.cumsum(counts), rank)])


def compare_pairs(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, kind: Ints, histograms: dict[int, Histogram]
) -> PairMetrics:
    """Compare payload ``in_a[i]`` of ``a`` with ``in_b[i]`` of ``b`` for every i.

    ``kind`` [p] says which of ``histograms`` a pair's differences are counted in.
    """
    import numpy as np

    out = PairMetrics.empty(len(in_a))
    for k in np.unique(kind):
        rows = np.flatnonzero(kind == k)
        found = PairMetrics.empty(len(rows))
        in_a_k, in_b_k = in_a[rows], in_b[rows]
        differences: list[Floats] = []
        for part in _chunks(np.minimum(a.length[in_a_k], b.length[in_b_k])):
            view = found.pick(part)
            differences += _compare(a, in_a_k[part], b, in_b_k[part], view)
        out.put(rows, found)
        histograms[int(k)].add(np.concatenate(differences or [np.empty(0, np.float32)]))
    return out


def _chunks(lengths: Ints) -> list[slice]:
    """Consecutive pairs of about CHUNK_TOKENS together."""
    import numpy as np

    number = np.cumsum(lengths + 1) // CHUNK_TOKENS
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _compare(a: Flat, in_a: Ints, b: Flat, in_b: Ints, out: PairMetrics) -> list[Floats]:
    """Fill ``out`` for one chunk; all differences of logprobs."""
    import numpy as np

    differences: list[Floats] = []
    out.length_a[:], out.length_b[:] = a.length[in_a], b.length[in_b]
    common = np.minimum(out.length_a, out.length_b)
    start_a, start_b = a.token_start[in_a], b.token_start[in_b]
    different = take(a.tokens, start_a, common) != take(b.tokens, start_b, common)
    out.first[:] = first_true(different, common)
    ended = (out.first < 0) & (out.length_a != out.length_b)
    out.first[ended] = common[ended]
    flipped = np.flatnonzero(out.first >= 0)
    at = out.first[flipped]
    for name, flat, start, length in (
        ("token_a", a, start_a, out.length_a),
        ("token_b", b, start_b, out.length_b),
    ):
        inside = at < length[flipped]
        getattr(out, name)[flipped[inside]] = flat.tokens[(start[flipped] + at)[inside]]
    with_logprobs = (a.n_logprobs[in_a] == out.length_a) & (b.n_logprobs[in_b] == out.length_b)
    prefix = np.where(out.first < 0, common, out.first)
    # whole completions lie end to end and need no gathering: keep them apart from cut ones
    for rows in (with_logprobs & (out.first < 0), with_logprobs & (out.first > 0)):
        where = np.flatnonzero(rows & (prefix > 0))
        if len(where):
            differences.append(_compare_logprobs(a, in_a, b, in_b, prefix, where, out))
    differences += margins_at(a, in_a, b, in_b, np.flatnonzero(with_logprobs), out)
    compare_candidates(a, in_a, b, in_b, prefix, out)
    return differences


def _compare_logprobs(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, lengths: Ints, rows: Ints, out: PairMetrics
) -> Floats:
    """Differences of the sampled tokens' logprobs over the first ``lengths`` positions of the pairs
    ``rows``; sums go to ``out``.

    Sums are taken per pair by ``reduceat``, so they do not depend on what else is in the chunk.
    """
    import numpy as np

    n = lengths[rows]
    va = take(a.logprobs, a.logprob_start[in_a[rows]], n)
    vb = take(b.logprobs, b.logprob_start[in_b[rows]], n)
    starts = np.cumsum(n) - n
    with np.errstate(invalid="ignore", over="ignore"):
        delta = va.astype(np.float64)
        delta -= vb.astype(np.float64)
        size = np.abs(delta)
        sums = np.add.reduceat(size, starts)
        if not np.isfinite(sums).all():
            delta = logprob_differences(va, vb)
            size = np.abs(delta)
            sums = np.add.reduceat(size, starts)
        out.sum_delta[rows] = np.add.reduceat(delta, starts)
        rounded = delta.astype(np.float32)
    largest = np.maximum.reduceat(size, starts)
    out.positions[rows] = n
    out.sampled_positions[rows] = n
    out.first_bits[rows] = first_true(va.view(np.int32) != vb.view(np.int32), n)
    out.max_abs[rows] = largest
    out.sum_abs[rows] = sums
    out.prefix_abs[rows] = sums
    out.sum_k3[rows] = np.add.reduceat(_k3(rounded, delta, float(largest.max())), starts)
    out.max_ulp[rows] = _most_ulp(va, vb, starts)
    return rounded


def _k3(rounded: Floats, delta: Doubles, largest: float) -> Doubles:
    """:func:`k3_terms`: Taylor's series in float32 where differences are small (to 1e-6), the exact
    form elsewhere; which one depends on the element alone."""
    import numpy as np

    r = -rounded
    with np.errstate(over="ignore", invalid="ignore"):
        terms = r * np.float32(1 / 24)
        for coefficient in (1 / 6, 1 / 2):
            terms += np.float32(coefficient)
            terms *= r
        terms *= r
    wide: Doubles = terms.astype(np.float64)
    if largest > SERIES_LIMIT:
        large = np.flatnonzero(np.abs(delta) > SERIES_LIMIT)
        wide[large] = k3_terms(delta[large])
    return wide


def _most_ulp(va: Floats, vb: Floats, starts: Ints) -> Ints:
    """Largest :func:`ulp_distance` per run, in 32 bits where nothing is above zero: then it is the
    distance of the magnitudes, and one more across zero (-0.0 lies one below 0.0)."""
    import numpy as np

    bits_a, bits_b = va.view(np.int32), vb.view(np.int32)
    if max(bits_a.max(), bits_b.max()) > 0:
        return np.maximum.reduceat(ulp_distance(va, vb), starts)
    magnitude = np.int32(0x7FFFFFFF)
    apart = (bits_a & magnitude) - (bits_b & magnitude)
    np.abs(apart, out=apart)
    apart += (bits_a ^ bits_b) < 0
    return np.maximum.reduceat(apart, starts)
