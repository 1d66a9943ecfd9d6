"""One fixed token sequence scored in every cell: no cascade, so every position is comparable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from raytest.compare.metrics import (
    first_divergence,
    importance_ratios,
    k1_kl,
    k3_kl,
    logprob_differences,
    mult_prob_error,
)
from raytest.compare.verdicts import DTYPES, MARGIN_CAP, MARGIN_FLOOR, dtype_index
from raytest.replay_folder import Scored
from raytest.store import Payload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Doubles = npt.NDArray[np.float64]

QUANTILES = (0.0, 0.01, 0.5, 0.99, 1.0)
QUANTILE_NAMES = ("min", "p1", "p50", "p99", "max")


@dataclass(frozen=True, slots=True)
class Distance:
    """One cell's scores against the reference cell's, over all positions of all requests.

    ``delta`` is lp_reference - lp_cell in nats. k1 and k3 estimate KL(reference || cell) on the
    reference's own tokens. ``top1`` is the share of positions with the same most likely token
    (``forced_top1_agree``); shares are NaN where there is nothing to share.
    """

    n_requests: int
    n_positions: int
    n_bitwise: int
    n_requests_bitwise: int
    max_abs: float
    mean_abs: float
    k1_kl: float
    k3_kl: float
    mult_prob_error: float
    importance_ratio: Mapping[str, float]
    n_top1_positions: int
    n_top1_same: int

    @property
    def bitwise(self) -> float:
        """Share of positions whose logprobs are the same bits."""
        return _share(self.n_bitwise, self.n_positions)

    @property
    def top1(self) -> float:
        """Share of positions where both name the same token as the most likely."""
        return _share(self.n_top1_same, self.n_top1_positions)


@dataclass(frozen=True, slots=True)
class Consistency:
    """One engine against itself: does scoring name the token that its own decoding chose?

    Counted over the positions of a cell's own greedy completions whose prefix is the scored one,
    the first other token included. ``n_near_tie`` are other tokens at a margin within
    :func:`tie_bound`; ``first_other`` is (request id, position) of the first beyond it.
    ``max_abs`` is the largest |lp_decode - lp_score| in nats on tokens that both have.
    """

    n_positions: int = 0
    n_same: int = 0
    n_near_tie: int = 0
    n_other: int = 0
    max_abs: float = 0.0
    tie_bound: float = 0.0
    first_other: tuple[str, int] | None = None


@dataclass(slots=True)
class _Flips:
    """Positions where scoring names another token, with their margins in nats."""

    positions: int = 0
    found: list[tuple[str, int, float]] = field(default_factory=list)
    largest: float = 0.0


def distance(reference: Scored, other: Scored) -> Distance:
    """Compare two cells on the requests that both scored. A request whose tokens differ between
    the two was not scored on one fixed sequence and is left out of both counts."""
    import numpy as np

    pairs = [
        (a, other.payloads[request])
        for request, a in sorted(reference.payloads.items())
        if request in other.payloads
        and np.array_equal(a.token_ids, other.payloads[request].token_ids)
    ]
    deltas = [logprob_differences(a.logprobs, b.logprobs) for a, b in pairs]
    same = [a.logprobs.view(np.int32) == b.logprobs.view(np.int32) for a, b in pairs]
    delta: Doubles = np.concatenate(deltas) if deltas else np.empty(0)
    tops = [(top_tokens(a), top_tokens(b)) for a, b in pairs if a.top_k and b.top_k]
    absolute = np.abs(delta)
    return Distance(
        n_requests=len(pairs),
        n_positions=len(delta),
        n_bitwise=sum(int(s.sum()) for s in same),
        n_requests_bitwise=sum(bool(s.all()) for s in same),
        max_abs=float(absolute.max(initial=0.0)),
        mean_abs=float(absolute.mean()) if len(delta) else math.nan,
        k1_kl=k1_kl(delta),
        k3_kl=k3_kl(delta),
        mult_prob_error=mult_prob_error(delta),
        importance_ratio=dict(
            zip(QUANTILE_NAMES, importance_ratios(delta, QUANTILES), strict=True)
        ),
        n_top1_positions=sum(len(a) for a, _ in tops),
        n_top1_same=sum(int((a == b).sum()) for a, b in tops),
    )


def consistency(
    scored: Scored, own: Mapping[str, Payload], greedy: set[str], dtype: str
) -> Consistency:
    """Hold a cell's own greedy completions (``own``, by request id; only those in ``greedy``)
    against its scores. Needs candidates, so positions without them are not counted."""
    flips = _Flips()
    for request, score in sorted(scored.payloads.items()):
        if request in own and request in greedy and score.top_k:
            _collect(flips, request, score, own[request])
    bound = tie_bound(flips.largest, dtype)
    beyond = [(request, at) for request, at, margin in flips.found if not margin <= bound]
    return Consistency(
        n_positions=flips.positions,
        n_same=flips.positions - len(flips.found),
        n_near_tie=len(flips.found) - len(beyond),
        n_other=len(beyond),
        max_abs=flips.largest,
        tie_bound=bound,
        first_other=min(beyond, default=None),
    )


def tie_bound(max_abs: float, dtype: str) -> float:
    """Margin in nats that the engine's own error explains: clip(2 e, floor, cap) of the dtype, as
    for a near tie, with e the largest |lp_decode - lp_score| (section 1.4 of the metrics)."""
    name = DTYPES[dtype_index(dtype)]
    return min(max(2 * max_abs, MARGIN_FLOOR[name]), MARGIN_CAP[name])


def _collect(flips: _Flips, request: str, score: Payload, own: Payload) -> None:
    import numpy as np

    first = first_divergence(own.token_ids, score.token_ids)
    shared = len(own.token_ids) if first < 0 else first
    # at the first other token the prefix is still the same: the own token must be on top there
    n = min(shared + 1, len(own.token_ids), len(score.token_ids))
    flips.positions += n
    if len(own.logprobs):
        delta = np.abs(logprob_differences(own.logprobs[:shared], score.logprobs[:shared]))
        flips.largest = max(flips.largest, float(delta.max(initial=0.0)))
    top = top_tokens(score)
    for at in np.flatnonzero(top[:n] != own.token_ids[:n]):
        flips.found.append((request, int(at), _margin(score, int(at), int(own.token_ids[at]))))


def _margin(score: Payload, at: int, token: int) -> float:
    """Top-1's logprob minus the token's, nats; infinite where the token was not listed."""
    row = slice(at * score.top_k, (at + 1) * score.top_k)
    ids, values = score.top_token_ids[row], score.top_logprobs[row]
    if token == int(score.token_ids[at]):
        return float(values[0]) - float(score.logprobs[at])
    found = [float(v) for i, v in zip(ids, values, strict=True) if int(i) == token]
    return float(values[0]) - found[0] if found else math.inf


def top_tokens(payload: Payload) -> npt.NDArray[np.int32]:
    """The most likely token of each position [t]."""
    tokens: npt.NDArray[np.int32] = payload.top_token_ids[:: payload.top_k]
    return tokens


def distance_json(found: Distance) -> dict[str, Any]:
    """A distance as JSON; what is no number is null."""
    shares = {"share_bitwise": found.bitwise, "forced_top1_agree": found.top1}
    plain = {**asdict(found), **shares}
    plain["importance_ratio"] = {k: _finite(v) for k, v in found.importance_ratio.items()}
    return {k: _finite(v) if isinstance(v, float) else v for k, v in plain.items()}


def consistency_json(found: Consistency) -> dict[str, Any]:
    """A consistency as JSON; what is no number is null."""
    return {k: _finite(v) if isinstance(v, float) else v for k, v in asdict(found).items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan
