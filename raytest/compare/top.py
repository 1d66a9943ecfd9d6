"""Candidates (top-k logprobs) of many pairs at once: margins at the flip, shift, residual,
overlap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytest.compare.flat import Flat, take
from raytest.compare.metrics import logprob_differences

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raytest.compare.pairs import PairMetrics

    Ints = npt.NDArray[np.int64]
    Doubles = npt.NDArray[np.float64]


def margins_at(
    a: Flat,
    in_a: Ints,
    b: Flat,
    in_b: Ints,
    among: Ints,
    out: PairMetrics,
) -> list[npt.NDArray[np.float32]]:
    """Margins and mutual containment at the first divergence, and the differences there.

    Both sides condition on the same text at that position, so it is the last comparable one: the
    logprob of A's token on both sides, and of B's, count as two more differences where listed; they
    are returned.
    """
    import numpy as np

    k = np.minimum(a.top_k[in_a], b.top_k[in_b])
    out.candidates[among] = k[among] > 0
    both_there = (out.token_a >= 0) & (out.token_b >= 0)
    rows = among[(both_there & (k > 0))[among]]
    differences: list[npt.NDArray[np.float32]] = []
    if not len(rows):
        return differences
    at, token_a, token_b = out.first[rows], out.token_a[rows], out.token_b[rows]
    a_of_a = a.logprobs[a.logprob_start[in_a[rows]] + at]
    b_of_b = b.logprobs[b.logprob_start[in_b[rows]] + at]
    a_of_b = _listed(a, in_a[rows], at, token_b)
    b_of_a = _listed(b, in_b[rows], at, token_a)
    with np.errstate(invalid="ignore"):
        out.margin_a[rows] = a_of_a.astype(np.float64) - a_of_b
        out.margin_b[rows] = b_of_b.astype(np.float64) - b_of_a
    out.mutual[rows] = ~np.isnan(a_of_b) & ~np.isnan(b_of_a)
    for left, right in ((a_of_a, b_of_a), (a_of_b, b_of_b)):
        known = ~np.isnan(left) & ~np.isnan(right)
        delta = logprob_differences(left[known], right[known])
        where = rows[known]
        size = np.abs(delta)
        out.positions[where] += 1
        out.max_abs[where] = np.maximum(out.max_abs[where], size)
        out.sum_abs[where] += size
        with np.errstate(over="ignore"):
            differences.append(delta.astype(np.float32))
    return differences


def _listed(flat: Flat, index: Ints, at: Ints, token: Ints) -> npt.NDArray[np.float32]:
    """Logprob of ``token`` among the candidates at position ``at`` [p]; NaN where not listed."""
    import numpy as np

    found = np.full(len(index), np.nan, dtype=np.float32)
    for k in np.unique(flat.top_k[index]):
        rows = np.flatnonzero(flat.top_k[index] == k)
        start = flat.top_start[index[rows]] + at[rows] * k
        place = start[:, None] + np.arange(k)
        match = flat.top_ids[place] == token[rows][:, None]
        hit = match.any(axis=1)
        column = match.argmax(axis=1)
        found[rows[hit]] = flat.top_logprobs[start[hit] + column[hit]]
    return found


def compare_candidates(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, prefix: Ints, out: PairMetrics
) -> None:
    """Common shift, residual and overlap of the candidates on the common prefix [0, ``prefix``),
    and the overlap also at the first divergence. Only where both list equally many."""
    import numpy as np

    alike = (a.top_k[in_a] == b.top_k[in_b]) & (a.top_k[in_a] > 0)
    there = (out.token_a >= 0) & (out.token_b >= 0)
    n = np.where(alike, prefix + there, 0)
    for k in np.unique(a.top_k[in_a[n > 0]]):
        rows = np.flatnonzero((n > 0) & (a.top_k[in_a] == k))
        _compare_k(a, in_a[rows], b, in_b[rows], n[rows], prefix[rows], int(k), rows, out)


def _compare_k(
    a: Flat, in_a: Ints, b: Flat, in_b: Ints, n: Ints, prefix: Ints, k: int, rows: Ints,
    out: PairMetrics,
) -> None:  # fmt: skip
    import numpy as np

    start_a, start_b = a.top_start[in_a], b.top_start[in_b]
    ids_a = take(a.top_ids, start_a, n * k).reshape(-1, k)
    ids_b = take(b.top_ids, start_b, n * k).reshape(-1, k)
    top_a, top_b = take(a.top_logprobs, start_a, n * k), take(b.top_logprobs, start_b, n * k)
    bits = (top_a.view(np.int32) != top_b.view(np.int32)).reshape(-1, k).any(axis=1)
    moved = (ids_a != ids_b).any(axis=1)
    starts = np.cumsum(n) - n
    changed = np.flatnonzero(bits | moved)
    out.overlap_positions[rows] = n
    out.overlap_sum[rows] = n
    out.prefix_positions[rows] = prefix
    out.smallest_gap[rows] = np.fmin(
        _smallest_gap(top_a, k, starts), _smallest_gap(top_b, k, starts)
    )
    if not len(changed):
        return
    top_a, top_b = top_a.reshape(-1, k)[changed], top_b.reshape(-1, k)[changed]
    shift, residual, overlap = _shifts(ids_a[changed], top_a, ids_b[changed], top_b, moved[changed])
    owner = np.searchsorted(starts, changed, side="right") - 1
    on_prefix = changed - starts[owner] < prefix[owner]
    np.maximum.at(out.epsilon, rows[owner[on_prefix]], residual[on_prefix])
    np.maximum.at(out.max_shift, rows[owner[on_prefix]], np.abs(shift[on_prefix]))
    np.add.at(out.overlap_sum, rows[owner], overlap - 1.0)


def _smallest_gap(top: npt.NDArray[np.float32], k: int, starts: Ints) -> Doubles:
    """Smallest difference above zero between neighbouring candidates of each run; NaN for none."""
    import numpy as np

    if k < 2:
        return np.full(len(starts), np.nan)
    values = top.reshape(-1, k)
    with np.errstate(invalid="ignore"):
        gaps = values[:, :-1] - values[:, 1:]
        gaps[~(gaps > 0)] = np.nan
    found: Doubles = np.fmin.reduceat(np.fmin.reduce(gaps, axis=1), starts).astype(np.float64)
    return found


def _shifts(
    ids_a: npt.NDArray[np.int32],
    top_a: npt.NDArray[np.float32],
    ids_b: npt.NDArray[np.int32],
    top_b: npt.NDArray[np.float32],
    moved: npt.NDArray[np.bool_],
) -> tuple[Doubles, Doubles, Doubles]:
    """Per position: shift, largest residual, Jaccard overlap. 0, 0 where no id is shared."""
    import numpy as np

    n, k = ids_a.shape
    delta = logprob_differences(top_a.reshape(-1), top_b.reshape(-1)).reshape(n, k)
    overlap = np.ones(n)
    where = np.flatnonzero(moved)
    if len(where):
        match = ids_a[where][:, :, None] == ids_b[where][:, None, :]
        shared = match.any(axis=2)
        paired = np.take_along_axis(top_b[where], match.argmax(axis=2), axis=1)
        values = logprob_differences(top_a[where].reshape(-1), paired.reshape(-1)).reshape(-1, k)
        delta[where] = np.where(shared, values, np.nan)
        n_shared = shared.sum(axis=1)
        overlap[where] = n_shared / (2 * k - n_shared)
    shift = _median(delta)
    with np.errstate(invalid="ignore"):
        apart = np.abs(delta - shift[:, None])
    apart[np.isnan(apart) & ~np.isnan(delta)] = np.inf
    residual = np.nan_to_num(apart, nan=0.0, posinf=np.inf).max(axis=1)
    return np.nan_to_num(shift, nan=0.0, posinf=np.inf, neginf=-np.inf), residual, overlap


def _median(values: Doubles) -> Doubles:
    """Median per row of what is not NaN; NaN for a row of NaN. (A sort of k values: nanmedian is a
    Python loop.)"""
    import numpy as np

    ordered = np.sort(values, axis=1)
    count = (~np.isnan(values)).sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum((count - 1) // 2, 0)]
    high = ordered[rows, np.maximum(count // 2, 0).clip(max=values.shape[1] - 1)]
    with np.errstate(invalid="ignore"):
        middle: Doubles = np.where(low == high, low, (low + high) / 2)
    middle[count == 0] = np.nan
    return middle
