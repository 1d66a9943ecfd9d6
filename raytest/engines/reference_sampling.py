"""How the reference engine turns logits into tokens and logprobs."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from raytest.engines.base import Sampling
from raytest.engines.reference_numerics import Array, exp

Ids = npt.NDArray[np.int32]
# Up to so many candidates are found faster one by one than by sorting the vocabulary.
FEW = 20


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that a sample with ``seed`` draws at its output ``position``. It
    depends on nothing else: neither the batch nor its order can move it."""
    digest = hashlib.sha256(f"reference-sampling:{seed}:{position}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def choose(logits: Array, sampling: Sampling, u: float) -> int:
    """One token of ``logits`` [vocabulary] for the random number ``u``; greedy for temperature 0.

    Filters in vLLM's order: temperature, min_p, top_k, top_p. Ties go to the lower id. Logits with
    NaN give token 0, as vLLM's sampler does.
    """
    if np.isnan(logits).any():
        return 0
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits / np.float32(sampling.temperature)
    order = np.argsort(-scaled, kind="stable")
    weights = exp(scaled[order] - scaled[order[0]]).astype(np.float64)
    if sampling.min_p > 0.0:
        weights = weights[weights >= sampling.min_p * weights[0]]
    if sampling.top_k > 0:
        weights = weights[: sampling.top_k]
    cumulative = np.cumsum(weights)
    if sampling.top_p < 1.0:
        kept = int(np.searchsorted(cumulative, sampling.top_p * cumulative[-1], side="left")) + 1
        cumulative = cumulative[:kept]
    drawn = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return int(order[min(drawn, len(cumulative) - 1)])


def top_candidates(logprobs: Array, k: int) -> tuple[Ids, Array]:
    """Ids and logprobs [rows, k] of the k largest of each row, ties by id; NaN counts as
    smallest."""
    vocabulary = logprobs.shape[1]
    k = min(k, vocabulary)
    if k == 0:
        return np.zeros((len(logprobs), 0), np.int32), np.zeros((len(logprobs), 0), np.float32)
    if k <= FEW and np.isfinite(logprobs).all():
        ids = _largest(logprobs, k)
    else:
        ids = np.argsort(-logprobs, axis=1, kind="stable")[:, :k]
    return ids.astype(np.int32), np.take_along_axis(logprobs, ids, axis=1)


def _largest(values: Array, k: int) -> npt.NDArray[np.int64]:
    """The first k columns of a stable descending sort, found one by one."""
    left, rows = values.copy(), np.arange(len(values))
    ids = np.empty((len(values), k), dtype=np.int64)
    for i in range(k):
        ids[:, i] = left.argmax(axis=1)
        left[rows, ids[:, i]] = -np.inf
    return ids
