"""Payloads as flat arrays with offsets, taken from Arrow without a copy through Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Flat:
    """Payloads 0..n-1. ``tokens`` int32 and ``logprobs`` float32 are flat, payload i from its entry
    in ``token_start`` for ``length`` tokens (``n_logprobs`` logprobs). ``top_ids`` and
    ``top_logprobs`` hold ``top_k`` entries a position from ``top_start``."""

    tokens: npt.NDArray[np.int32]
    token_start: Ints
    length: Ints
    logprobs: npt.NDArray[np.float32]
    logprob_start: Ints
    n_logprobs: Ints
    top_k: Ints
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    top_start: Ints


COLUMNS = ["payload_id", "token_ids", "logprobs", "top_k", "top_token_ids", "top_logprobs"]


def flat_of(table: pa.Table) -> Flat:
    """The payload table's columns as flat arrays. A position with fewer candidates than ``top_k``
    entries does not occur: then the payload counts as one without candidates. The candidates'
    columns may be left out where there are none."""
    import numpy as np

    tokens, token_start, length = _list(table.column("token_ids"))
    logprobs, logprob_start, n_logprobs = _list(table.column("logprobs"))
    if "top_k" not in table.column_names:
        none = np.zeros(len(length), dtype=np.int64)
        no_ids, no_values = np.empty(0, np.int32), np.empty(0, np.float32)
        return Flat(
            tokens, token_start, length, logprobs, logprob_start, n_logprobs,
            none, no_ids, no_values, none,
        )  # fmt: skip
    top_ids, top_start, n_ids = _list(table.column("top_token_ids"))
    top_logprobs, other_start, n_top = _list(table.column("top_logprobs"))
    top_k = table.column("top_k").to_numpy().astype(np.int64)
    whole = (n_ids == top_k * length) & (n_top == n_ids) & (top_start == other_start)
    return Flat(
        tokens,
        token_start,
        length,
        logprobs,
        logprob_start,
        n_logprobs,
        np.where(whole, top_k, 0),
        top_ids,
        top_logprobs,
        top_start,
    )


def _list(column: pa.ChunkedArray) -> tuple[npt.NDArray[Any], Ints, Ints]:
    """Values, starts and lengths of a list column."""
    import numpy as np

    # combining copies, a single chunk too
    array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.to_numpy(zero_copy_only=False), offsets[:-1], np.diff(offsets)


def ragged(starts: Ints, lengths: Ints) -> Ints:
    """Indices of consecutive runs: starts[0], starts[0]+1, …, then starts[1], … (flat)."""
    import numpy as np

    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + lengths, lengths)


def take(values: npt.NDArray[Any], starts: Ints, lengths: Ints) -> npt.NDArray[Any]:
    """Runs of ``values`` laid end to end: a view where they already are, rows of a matrix where all
    are equally long, else gathered."""
    import numpy as np

    if not len(lengths):
        return values[:0]
    ends = starts + lengths
    if (starts[1:] == ends[:-1]).all():
        return values[starts[0] : ends[-1]]
    n = int(lengths[0])
    if n and (lengths == n).all() and len(values) % n == 0 and not (starts % n).any():
        return values.reshape(-1, n).take(starts // n, axis=0).reshape(-1)
    out: npt.NDArray[Any] = np.take(values, ragged(starts, lengths))
    return out


def first_true(flags: npt.NDArray[np.bool_], lengths: Ints) -> Ints:
    """Position of the first True in each run of ``flags`` (runs laid end to end), else -1 [p]."""
    import numpy as np

    first = np.full(len(lengths), -1, dtype=np.int64)
    if not flags.any():
        return first
    ends = np.cumsum(lengths)
    starts = ends - lengths
    filled = np.flatnonzero(lengths > 0)
    at_once = flags[starts[filled]]
    first[filled[at_once]] = 0
    left = filled[~at_once]
    if 8 * len(left) <= len(filled):  # then most flags are likely true, and too many to list
        for i in left:
            run = flags[starts[i] : ends[i]]
            at = int(run.argmax())
            first[i] = at if run[at] else -1
        return first
    true = np.flatnonzero(flags)
    place = np.searchsorted(true, starts)
    candidate = true[np.minimum(place, len(true) - 1)]
    found = (place < len(true)) & (candidate < ends)
    first[found] = (candidate - starts)[found]
    return first


def longest_runs(flat: Flat, least: int) -> Ints:
    """Per payload the longest run of one repeated token [n]; 0 where it is shorter than
    ``least``."""
    import numpy as np

    longest = np.zeros(len(flat.length), dtype=np.int64)
    rows = _with_runs(flat, least)
    if not len(rows):
        return longest
    length = flat.length[rows]
    tokens = take(flat.tokens, flat.token_start[rows], length)
    first = np.cumsum(length) - length
    new = np.ones(len(tokens), dtype=np.bool_)
    np.not_equal(tokens[1:], tokens[:-1], out=new[1:])
    new[first] = True
    starts = np.flatnonzero(new)
    runs = np.diff(starts, append=len(tokens))
    longest[rows] = np.maximum.reduceat(runs, np.searchsorted(starts, first))
    longest[longest < least] = 0
    return longest


def _with_runs(flat: Flat, least: int) -> Ints:
    """Payloads that may have a run of ``least`` tokens: it covers ``least // stride`` equal tokens
    in a row of every ``stride``-th one, which few other texts have."""
    import numpy as np

    stride = max(1, least // 4)
    some = np.ascontiguousarray(flat.tokens[::stride])
    equal = some[1:] == some[:-1]
    together = least // stride - 1
    if together < 1 or len(equal) < together:
        return np.flatnonzero(flat.length >= least)
    n = len(equal) - together + 1
    chain = equal[:n].copy()
    for i in range(1, together):
        chain &= equal[i : i + n]
    at = np.flatnonzero(chain) * stride
    for i in range(1, together * stride):
        at = at[flat.tokens[at + i] == flat.tokens[at]]
    return np.unique(np.searchsorted(flat.token_start, at, side="right") - 1)


def unsorted_candidates(flat: Flat) -> npt.NDArray[np.bool_]:
    """Payloads [n] with a position whose candidates do not descend by logprob."""
    import numpy as np

    out = np.zeros(len(flat.length), dtype=np.bool_)
    for k in np.unique(flat.top_k):
        if k < 2:
            continue
        rows = np.flatnonzero((flat.top_k == k) & (flat.length > 0))
        counts = flat.length[rows] * k
        whole = len(rows) == len(flat.length)
        first = flat.top_start[rows]
        if whole and int(counts.sum()) == len(flat.top_logprobs):
            values = flat.top_logprobs.reshape(-1, k)
        else:
            values = flat.top_logprobs[ragged(first, counts)].reshape(-1, k)
        wrong = (values[:, 1:] > values[:, :-1]).any(axis=1)
        starts = np.cumsum(flat.length[rows]) - flat.length[rows]
        out[rows] = np.logical_or.reduceat(wrong, starts)
    return out
