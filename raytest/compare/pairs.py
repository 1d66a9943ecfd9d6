"""Detailed comparison of many pairs of payloads at once, up to and including the first divergence.

Same formulas as :mod:`raytest.compare.metrics`, on flat arrays: no loop over pairs or tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from raytest.compare.flat import Flat, ragged
from raytest.compare.metrics import k3_terms, logprob_differences, ordered_bits
from raytest.compare.top import compare_candidates, margins_at

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Doubles = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

CHUNK_TOKENS = 1 << 18
# Differences are counted by sign and the upper 16 bits of |float32|: 8 of exponent, 8 of
# significand, so a quantile is known to 0.4% in memory that does not grow.
HISTOGRAM_BINS = 1 << 17
_SHIFT = 15


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

    def pick(self, where: Ints) -> PairMetrics:
        """The entries at ``where``, in its order."""
        return PairMetrics(**{f.name: getattr(self, f.name)[where] for f in fields(self)})

    def put(self, where: Ints, other: PairMetrics) -> None:
        """Set the entries at ``where`` from ``other``."""
        for f in fields(self):
            getattr(self, f.name)[where] = getattr(other, f.name)


@dataclass(slots=True)
class Histogram:
    """Logprob differences lp_A - lp_B by sign and size: counts [131072], negatives in the upper
    half."""

    counts: npt.NDArray[np.int64]

    @classmethod
    def empty(cls) -> Histogram:
        """No differences yet."""
        import numpy as np

        return cls(np.zeros(HISTOGRAM_BINS, dtype=np.int64))

    def add(self, delta: Doubles) -> None:
        """Count differences."""
        import numpy as np

        with np.errstate(over="ignore"):
            bits = delta.astype(np.float32).view(np.uint32)
        index = (bits >> _SHIFT).astype(np.int64)
        self.counts += np.bincount(index, minlength=HISTOGRAM_BINS)

    def quantile_abs(self, q: float) -> float:
        """Quantile of |lp_A - lp_B|, to 0.4%; NaN where nothing was counted."""
        half = HISTOGRAM_BINS // 2
        return _quantile(self.counts[:half] + self.counts[half:], q, _edges())

    def quantile(self, q: float) -> float:
        """Quantile of lp_A - lp_B, to 0.4%."""
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
    common = np.minimum(a.length[in_a], b.length[in_b])
    chunk = np.cumsum(common + 1) // CHUNK_TOKENS
    for part in np.split(np.arange(len(in_a)), np.flatnonzero(np.diff(chunk)) + 1):
        if len(part):
            out.put(part, _compare(a, in_a[part], b, in_b[part], kind[part], histograms))
    return out


def _compare(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, kind: Ints, histograms: dict[int, Histogram]
) -> PairMetrics:
    import numpy as np

    out = PairMetrics.empty(len(in_a))
    out.length_a, out.length_b = a.length[in_a], b.length[in_b]
    common = np.minimum(out.length_a, out.length_b)
    start_a, start_b = a.token_start[in_a], b.token_start[in_b]
    out.first = _first_difference(a, start_a, b, start_b, common)
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
    _compare_logprobs(a, in_a, b, in_b, np.where(with_logprobs, prefix, 0), kind, histograms, out)
    margins_at(a, in_a, b, in_b, np.flatnonzero(with_logprobs), kind, histograms, out)
    compare_candidates(a, in_a, b, in_b, prefix, out)
    return out


def _first_difference(a: Flat, start_a: Ints, b: Flat, start_b: Ints, lengths: Ints) -> Ints:
    """First position below ``lengths`` where the tokens differ, else -1 [p]."""
    import numpy as np

    first = np.full(len(lengths), -1, dtype=np.int64)
    different = np.flatnonzero(
        a.tokens[ragged(start_a, lengths)] != b.tokens[ragged(start_b, lengths)]
    )
    if not len(different):
        return first
    ends = np.cumsum(lengths)
    starts = ends - lengths
    place = np.searchsorted(different, starts)
    candidate = different[np.minimum(place, len(different) - 1)]
    found = (place < len(different)) & (candidate < ends)
    first[found] = (candidate - starts)[found]
    return first


def _compare_logprobs(
    a: Flat,
    in_a: Ints,
    b: Flat,
    in_b: Ints,
    lengths: Ints,
    kind: Ints,
    histograms: dict[int, Histogram],
    out: PairMetrics,
) -> None:
    """Differences of the sampled tokens' logprobs over the first ``lengths`` positions."""
    import numpy as np

    filled = np.flatnonzero(lengths > 0)
    if not len(filled):
        return
    n = lengths[filled]
    va = a.logprobs[ragged(a.logprob_start[in_a[filled]], n)]
    vb = b.logprobs[ragged(b.logprob_start[in_b[filled]], n)]
    starts = np.cumsum(n) - n
    out.positions[filled] = n
    out.sampled_positions[filled] = n
    differing = np.flatnonzero(va.view(np.int32) != vb.view(np.int32))
    owner = np.searchsorted(starts, differing, side="right") - 1
    equal = n - np.bincount(owner, minlength=len(n))
    for h in np.unique(kind[filled]):
        histograms[int(h)].counts[0] += int(equal[kind[filled] == h].sum())
    if not len(differing):
        return
    va, vb = va[differing], vb[differing]
    delta = logprob_differences(va, vb)
    for h in np.unique(kind[filled]):
        histograms[int(h)].add(delta[kind[filled][owner] == h])
    some = np.flatnonzero(np.diff(owner, prepend=-1))
    rows = filled[owner[some]]
    size = np.abs(delta)
    out.first_bits[rows] = differing[some] - starts[owner[some]]
    out.max_abs[rows] = np.maximum.reduceat(size, some)
    out.sum_abs[rows] = np.add.reduceat(size, some)
    out.prefix_abs[rows] = out.sum_abs[rows]
    out.sum_delta[rows] = np.add.reduceat(delta, some)
    out.sum_k3[rows] = np.add.reduceat(k3_terms(delta), some)
    out.max_ulp[rows] = np.maximum.reduceat(np.abs(ordered_bits(va) - ordered_bits(vb)), some)
