"""What a comparison says of each divergence: near-tie, drift, corrupt, and why.

The defaults below are proposals drawn from published magnitudes; the documents argue them from
measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.metrics import model_ulp
from raytest.schema import Verdict

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raytest.compare.pairs import PairMetrics

    Doubles = npt.NDArray[np.float64]
    Bools = npt.NDArray[np.bool_]

DTYPES = ("float32", "float16", "bfloat16")  # finest first
# Mean |lp_A - lp_B| that rounding explains, nats: vLLM against Megatron or FSDP in bfloat16 stays
# under 0.025 on trained models, whose tokens are mostly certain; the finer types scale with their
# precision. Where the head's own rounding shows in the candidates, LATTICE_UNITS of its units are
# allowed if that is more: on an H200 a model of random weights (logits of 4 to 8, unit 1/32) has
# means of 0.03 to 0.043, batch against solo, and 0.031 is what one unit is.
MEAN_BUDGET = {"bfloat16": 0.025, "float16": 5e-3, "float32": 1e-4}
# Bounds of the near-tie margin, nats. Floor: one unit of a logit in [16, 32); cap: past it a flip
# is no tie, whatever the prefix did.
MARGIN_FLOOR = {"bfloat16": 0.125, "float16": 0.016, "float32": 1e-4}
MARGIN_CAP = {"bfloat16": 0.5, "float16": 0.1, "float32": 1e-2}
K3_BUDGET = 1e-2
LATTICE_UNITS = 2.0
# Rounding has no direction. A mean difference is systematic where it is so many standard errors
# from 0, over so many positions, and no trifle. (Batch against solo on an H200: 2.1 at most.)
SYSTEMATIC_SIGMA = 5.0
SYSTEMATIC_POSITIONS = 32
SYSTEMATIC_SHARE = 0.1
# Fewer prefix positions say too little of a pair's own error: the axis's largest stands in.
PREFIX_FOR_EPSILON = 32
# A flip that both sides were this sure about is no rounding (nats; and 4 times the near-tie
# margin).
CONFIDENT_FLIP = 2.0
# One token for ever: a run of at least so many, over at least half of the completion.
DEGENERATE_RUN = 16

REASONS = (
    "",
    "same tokens, logprob bits differ within the dtype's rounding",
    "flip at a margin that the pair's own rounding explains",
    "sampled tokens differ; sampling hides the margin",
    "same tokens, logprobs differ by more than the dtype's rounding",
    "logprobs before the flip differ by more than the dtype's rounding",
    "flip at a margin larger than rounding explains",
    "flip to a token that the other side does not list",
    "tokens differ; no candidates were recorded, so the margin is unknown",
    "same tokens, but the finish reason differs",
    "NaN, infinite, positive or unsorted logprobs, or a token out of the vocabulary",
    "one side repeats one token for ever",
    "one completion is a prefix of the other",
)


# Verdicts of a divergence, best to worst; what is not compared at all is no divergence.
SEVERITY = (
    Verdict.BITWISE,
    Verdict.TOKENS,
    Verdict.NEAR_TIE,
    Verdict.SAMPLED_FLIP,
    Verdict.DRIFT,
    Verdict.CORRUPT,
)
VERDICT_OF_REASON = (0, 1, 2, 3, 4, 4, 4, 4, 4, 4, 5, 5, 4)


@dataclass(frozen=True, slots=True)
class Judged:
    """Per divergence [d]: index into :data:`SEVERITY`, index into :data:`REASONS`, margin (NaN if
    unknown), the near-tie bound it was held to, and whether the flip was a confident one."""

    verdict: npt.NDArray[np.int64]
    reason: npt.NDArray[np.int64]
    margin: Doubles
    bound: Doubles
    confident: Bools


@dataclass(frozen=True, slots=True)
class Setting:
    """What judging needs beside the metrics; arrays per divergence [d]."""

    tokens_equal: Bools
    sampled: Bools
    dtype: npt.NDArray[np.int64]  # index into DTYPES, the coarser of the two sides
    bad_values: Bools
    one_degenerate: Bools
    near_tie_margin: float | None = None


def dtype_index(name: str) -> int:
    """Index into :data:`DTYPES`. ``auto`` is taken as bfloat16, what nearly every model ships
    as."""
    return DTYPES.index(name) if name in DTYPES else DTYPES.index("bfloat16")


def judge_divergences(metrics: PairMetrics, setting: Setting) -> Judged:
    """Verdict of each divergence, worst first: corrupt, drift, sampled-flip, near-tie, tokens.

    near-tie (section 1.4 of the design): the flip's larger margin is at most clip(2 e, floor, cap),
    where e is the largest residual of the same pair's logits on its common prefix: if two logit
    vectors differ by at most e, their argmax can differ only at a margin of at most 2e.

    One side that repeats one token for ever is corrupt only where the flip that led there was no
    near tie: after a tie both texts are legitimate, and a random model's greedy text often loops.
    """
    import numpy as np

    margin = np.fmax(metrics.margin_a, metrics.margin_b)
    bound = _bounds(metrics, setting)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = metrics.prefix_abs / metrics.sampled_positions
        k3 = metrics.sum_k3 / metrics.sampled_positions
    budget = mean_budget(metrics, setting.dtype)
    with np.errstate(invalid="ignore"):
        wandered = (mean > budget) | (k3 > K3_BUDGET) | _systematic(metrics, budget)
    flip = ~setting.tokens_equal & (metrics.first >= 0)
    near_tie = flip & metrics.mutual & (margin <= bound)
    ended = flip & ((metrics.token_a < 0) | (metrics.token_b < 0))
    reason = np.select(
        [
            setting.bad_values,
            setting.one_degenerate & ~near_tie,
            ~setting.tokens_equal & ~flip,
            flip & setting.sampled,
            wandered & flip,
            wandered,
            setting.tokens_equal,
            ended,
            near_tie,
            flip & metrics.mutual,
            flip & metrics.candidates,
        ],
        [10, 11, 9, 3, 5, 4, 1, 12, 2, 6, 7],
        default=8,
    )
    verdict = np.array(VERDICT_OF_REASON)[reason]
    confident = flip & ~setting.sampled & (margin > np.maximum(4 * bound, CONFIDENT_FLIP))
    return Judged(verdict, reason, margin, bound, confident)


def mean_budget(metrics: PairMetrics, dtype: npt.NDArray[np.int64]) -> Doubles:
    """Mean |lp_A - lp_B| that rounding explains, per pair, in nats.

    Logits that the head rounds lie on a lattice, and so do the gaps between candidates (logZ
    cancels): the smallest is the unit of the logits where it is a power of two. No dtype has a
    coarser one than at :data:`raytest.compare.metrics.ASSUMED_LOGIT`.
    """
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        unit = 2.0 ** np.round(np.log2(metrics.smallest_gap))
        lattice = np.abs(metrics.smallest_gap / unit - 1) < 1e-3
    coarsest = np.array([model_ulp(d) for d in DTYPES])[dtype]
    allowed = LATTICE_UNITS * np.minimum(np.where(lattice, unit, 0.0), coarsest)
    budget: Doubles = np.maximum(_by_dtype(MEAN_BUDGET, dtype), allowed)
    return budget


def _systematic(metrics: PairMetrics, budget: Doubles) -> Bools:
    """Pairs whose differences have a direction: |mean| against its standard error, with k3's
    leading term r^2 / 2 for the squares."""
    import numpy as np

    n = metrics.sampled_positions
    with np.errstate(divide="ignore", invalid="ignore"):
        sigmas = np.abs(metrics.sum_delta) / np.sqrt(2 * metrics.sum_k3)
        mean = np.abs(metrics.sum_delta) / n
        found: Bools = (
            (n >= SYSTEMATIC_POSITIONS)
            & (sigmas > SYSTEMATIC_SIGMA)
            & (mean > SYSTEMATIC_SHARE * budget)
        )
    return found


def _bounds(metrics: PairMetrics, setting: Setting) -> Doubles:
    import numpy as np

    n = len(metrics.first)
    if setting.near_tie_margin is not None:
        return np.full(n, setting.near_tie_margin)
    finite = np.isfinite(metrics.epsilon) & (metrics.prefix_positions > 0)
    pooled = float(metrics.epsilon[finite].max(initial=0.0))
    own = metrics.prefix_positions >= PREFIX_FOR_EPSILON
    epsilon = np.where(own, metrics.epsilon, pooled)
    bounds: Doubles = np.clip(
        2 * epsilon, _by_dtype(MARGIN_FLOOR, setting.dtype), _by_dtype(MARGIN_CAP, setting.dtype)
    )
    return bounds


def _by_dtype(table: dict[str, float], dtype: npt.NDArray[np.int64]) -> Doubles:
    import numpy as np

    values: Doubles = np.array([table[d] for d in DTYPES])[dtype]
    return values


def is_degenerate(longest_run: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> Bools:
    """Completions that are one token for ever."""
    degenerate: Bools = (longest_run >= DEGENERATE_RUN) & (2 * longest_run >= length)
    return degenerate
