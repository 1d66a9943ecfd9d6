"""Detailed comparison of many pairs of payloads at once, up to and including the first divergence.

Same formulas as :mod:`raytest.compare.metrics`, on flat arrays: no loop over pairs or tokens.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from threading import local
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
CHUNK_TOKENS = 1 << 18
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
    positions with candidates, ``smallest_gap`` the smallest difference between two neighbouring
    candidates there (NaN: none).
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
    smallest_gap: Doubles
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
            unknown = f.name.startswith("margin") or f.name == "smallest_gap"
            fill = np.nan if unknown else unset.get(f.name, 0)
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

    def add(self, delta: Floats, zeros: int = 0) -> None:
        """Count differences (float32); ``zeros`` of them are +0.0 and none."""
        import numpy as np

        upper = 1 if sys.byteorder == "little" else 0
        index = _SCRATCH.array("index", len(delta), np.int64)
        np.copyto(index, delta.view(np.uint16)[upper::2])
        np.add.at(self.counts, index, 1)
        self.counts[0] -= zeros

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
        for part in _chunks(np.minimum(a.length[in_a_k], b.length[in_b_k])):
            view = found.pick(part)
            _compare(a, in_a_k[part], b, in_b_k[part], view, histograms[int(k)])
        out.put(rows, found)
    return out


def _chunks(lengths: Ints) -> list[slice]:
    """Consecutive pairs of about CHUNK_TOKENS together."""
    import numpy as np

    number = np.cumsum(lengths + 1) // CHUNK_TOKENS
    bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(lengths)]
    return [slice(low, high) for low, high in pairwise(bounds)]


def _compare(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, out: PairMetrics, histogram: Histogram
) -> None:
    """Fill ``out`` for one chunk, and count all differences of logprobs."""
    import numpy as np

    out.length_a[:], out.length_b[:] = a.length[in_a], b.length[in_b]
    common = np.minimum(out.length_a, out.length_b)
    start_a, start_b = a.token_start[in_a], b.token_start[in_b]
    tokens_a, tokens_b = take(a.tokens, start_a, common), take(b.tokens, start_b, common)
    different = _SCRATCH.array("flags", len(tokens_a), np.bool_)
    out.first[:] = first_true(np.not_equal(tokens_a, tokens_b, out=different), common)
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
    # what lies end to end needs no gathering, which is worth looking at what comes after a flip and
    # leaving it out, unless that is most of it
    cut = 2 * int(prefix.sum()) < int(common.sum())
    lengths = prefix if cut else common
    where = np.flatnonzero(with_logprobs & (lengths > 0))
    if len(where):
        _compare_logprobs(a, in_a, b, in_b, lengths, prefix, where, out, histogram)
    for flips in margins_at(a, in_a, b, in_b, np.flatnonzero(with_logprobs), out):
        histogram.add(flips)
    compare_candidates(a, in_a, b, in_b, prefix, out)


def _compare_logprobs(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, lengths: Ints, prefix: Ints, rows: Ints,
    out: PairMetrics, histogram: Histogram,
) -> None:  # fmt: skip
    """Differences of the sampled tokens' logprobs of the pairs ``rows`` over the first ``prefix``
    positions, of which ``lengths`` are looked at.

    Differences are float32 (exact within a factor of two, else to 6e-8); sums are taken per pair by
    ``reduceat``, which adds pairwise, so they do not depend on what else is in the chunk.
    """
    import numpy as np

    n, kept = lengths[rows], prefix[rows]
    va = take(a.logprobs, a.logprob_start[in_a[rows]], n)
    vb = take(b.logprobs, b.logprob_start[in_b[rows]], n)
    starts = np.cumsum(n) - n
    flipped = np.flatnonzero(kept < n)
    first = starts[flipped]
    beyond = list(zip(first + kept[flipped], first + n[flipped], strict=True))
    delta: Floats | Doubles = _SCRATCH.array("delta", len(va), np.float32)
    size: Floats | Doubles = _SCRATCH.array("size", len(va), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        np.subtract(va, vb, out=delta)
        _clear(delta, beyond)
        sums = np.add.reduceat(np.abs(delta, out=size), starts)
        if not np.isfinite(sums).all():
            delta = logprob_differences(va, vb)
            _clear(delta, beyond)
            size = np.abs(delta)
            sums = np.add.reduceat(size, starts)
        out.sum_delta[rows] = np.add.reduceat(delta, starts)
        histogram.add(delta.astype(np.float32, copy=False), int((n - kept).sum()))
    out.positions[rows] = kept
    out.sampled_positions[rows] = kept
    largest = np.maximum.reduceat(size, starts)
    out.max_abs[rows] = largest
    out.sum_abs[rows] = sums
    out.prefix_abs[rows] = sums
    large = np.flatnonzero(size > SERIES_LIMIT) if largest.max() > SERIES_LIMIT else rows[:0]
    out.sum_k3[rows] = _sum_k3(delta, large, starts, size)
    out.first_bits[rows], out.max_ulp[rows] = _bits_apart(va, vb, starts, n, beyond)


class _Scratch(local):
    """Arrays that a thread takes again for every chunk: to map fresh memory each time costs more
    than the arithmetic."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def array(self, name: str, n: int, dtype: Any) -> npt.NDArray[Any]:
        """``n`` entries of unknown values."""
        import numpy as np

        found = self._arrays.get(name)
        if found is None or len(found) < n:
            found = self._arrays[name] = np.empty(max(n, CHUNK_TOKENS * 5 // 4), dtype=dtype)
        return found[:n]


_SCRATCH = _Scratch()


def _clear(values: npt.NDArray[Any], spans: list[tuple[int, int]]) -> None:
    for low, high in spans:
        values[low:high] = 0


def _sum_k3(delta: Floats | Doubles, large: Ints, starts: Ints, terms: Floats | Doubles) -> Doubles:
    """Per run the sum of :func:`k3_terms`: Taylor's series where a difference is small (to 1e-6),
    the exact form at ``large``; which one depends on the element alone. ``terms`` is overwritten.
    """
    import numpy as np

    with np.errstate(over="ignore", invalid="ignore"):
        np.multiply(delta, np.float32(1 / 24), out=terms)
        for coefficient in (-1 / 6, 1 / 2):
            terms += np.float32(coefficient)
            terms *= delta
        terms *= delta
    terms[large] = 0
    sums = np.add.reduceat(terms, starts).astype(np.float64)
    if len(large):
        run = np.searchsorted(starts, large, side="right") - 1
        exact = k3_terms(delta[large].astype(np.float64))
        sums += np.bincount(run, weights=exact, minlength=len(starts))
    return sums


def _bits_apart(
    va: Floats, vb: Floats, starts: Ints, lengths: Ints, beyond: list[tuple[int, int]]
) -> tuple[Ints, Ints]:
    """Per run the first position whose bits differ (-1: none), and the largest
    :func:`ulp_distance`: of two negative floats it is the difference of their bits."""
    import numpy as np

    bits_a, bits_b = va.view(np.int32), vb.view(np.int32)
    apart = _SCRATCH.array("apart", len(va), np.int32)
    flags = _SCRATCH.array("flags", len(va), np.bool_)
    positive = np.bitwise_and(bits_a, bits_b, out=apart)
    odd = np.flatnonzero(np.greater_equal(positive, 0, out=flags))
    np.subtract(bits_a, bits_b, out=apart)
    _clear(apart, beyond)
    first = first_true(np.not_equal(apart, 0, out=flags), lengths)
    odd = odd[flags[odd]]
    apart[odd] = 0
    np.abs(apart, out=apart)
    most = np.maximum.reduceat(apart, starts).astype(np.int64)
    if len(odd):
        run = np.searchsorted(starts, odd, side="right") - 1
        np.maximum.at(most, run, ulp_distance(va[odd], vb[odd]))
    return first, most
