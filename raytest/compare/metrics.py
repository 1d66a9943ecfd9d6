"""Metrics of one pair of completions, as formulas on numpy arrays.

:mod:`raytest.compare.pairs` computes the same for many pairs at once; the tests hold the two
against each other. Everything numeric ends at the first divergence: past it the two completions are
about different texts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int32]
    Floats = npt.NDArray[np.float32]
    Doubles = npt.NDArray[np.float64]

# Bits of the significand, the leading one included.
PRECISION = {"bfloat16": 8, "float16": 11, "float32": 24}
# Logits are not recorded. The top logit of a language model is typically between 16 and 32, so its
# unit in the last place is taken there: 0.125 in bfloat16, 0.0156 in float16, 1.9e-6 in float32.
ASSUMED_LOGIT = 16.0
SERIES_LIMIT = 1 / 64


def first_divergence(a: Ints, b: Ints) -> int:
    """First position where the token ids differ (``Div_Index``, arXiv 2506.09501 section 3.1); the
    shorter's length where it is a prefix of the other; -1 where they are equal."""
    import numpy as np

    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    if len(different):
        return int(different[0])
    return -1 if len(a) == len(b) else n


def agreement(a: Ints, b: Ints) -> float:
    """Tokens before the first divergence over the longer length; 1 for two empty completions."""
    longest = max(len(a), len(b))
    at = first_divergence(a, b)
    return 1.0 if at < 0 or longest == 0 else at / longest


def tokens_at_risk(a: Ints, b: Ints) -> int:
    """Div_Index + 1 where they diverge, else the length: the exposure of the flip hazard."""
    at = first_divergence(a, b)
    return len(a) if at < 0 else at + 1


def ordered_bits(values: Floats) -> npt.NDArray[np.int64]:
    """float32 bits as integers in the order of the numbers; neighbours differ by 1, and -0.0 lies
    one below +0.0 (``i ^ ((i >> 31) & 0x7fffffff)``)."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.int32)
    ordered: npt.NDArray[np.int64] = (bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))).astype(np.int64)
    return ordered


def ulp_distance(a: Floats, b: Floats) -> npt.NDArray[np.int64]:
    """Floats that lie between, per position, in float32 units in the last place. A float32 logprob
    is log_softmax of up-cast logits: 10^5 here can be a single unit of the model's own dtype."""
    import numpy as np

    distance: npt.NDArray[np.int64] = np.abs(ordered_bits(a) - ordered_bits(b))
    return distance


def model_ulp(dtype: str, magnitude: float = ASSUMED_LOGIT) -> float:
    """Unit in the last place of ``dtype`` at ``magnitude``: 2^(floor(log2 m) - precision + 1)."""
    from math import floor, log2

    return float(2.0 ** (floor(log2(magnitude)) - PRECISION[dtype] + 1))


def logprob_differences(a: Floats, b: Floats) -> Doubles:
    """lp_A(t) - lp_B(t) in nats (float64). Equal bits differ by 0 whatever they mean; a difference
    that is no number (NaN, inf - inf) counts as infinite."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        delta = a.astype(np.float64) - b.astype(np.float64)
    if not np.isfinite(delta).all():
        delta[np.isnan(delta)] = np.inf
        delta[a.view(np.int32) == b.view(np.int32)] = 0.0
    return delta


def k1_kl(delta: Doubles) -> float:
    """Mean of lp_A - lp_B over A's own tokens: the k1 estimator of KL(A||B); may be negative
    (Schulman, "Approximating KL Divergence", 2020; ``mismatch_kl`` of verl and slime)."""
    return float(delta.mean()) if len(delta) else float("nan")


def k3_terms(delta: Doubles) -> Doubles:
    """e^r - r - 1 with r = lp_B - lp_A, never negative: the k3 estimator's terms (Schulman 2020;
    ``mismatch_k3_kl`` of verl and slime)."""
    import numpy as np

    # Taylor's series of (e^r - r - 1) / r^2: good to 1e-12 for small r, and free of cancellation
    r = -delta
    with np.errstate(over="ignore", invalid="ignore"):
        terms = r * (1 / 720)
        for coefficient in (1 / 120, 1 / 24, 1 / 6, 1 / 2):
            terms += coefficient
            terms *= r
        terms *= r
    large = np.flatnonzero(np.abs(delta) > SERIES_LIMIT)
    if len(large):
        with np.errstate(over="ignore", invalid="ignore"):
            exact = np.expm1(r[large]) - r[large]
        exact[~np.isfinite(r[large])] = np.inf
        terms[large] = np.maximum(exact, 0.0)
    return terms


def k3_kl(delta: Doubles) -> float:
    """Mean of :func:`k3_terms`."""
    return float(k3_terms(delta).mean()) if len(delta) else float("nan")


def importance_ratios(delta: Doubles, quantiles: tuple[float, ...]) -> list[float]:
    """Quantiles of rho = exp(lp_B - lp_A), the importance ratio of RL with two engines (verl's and
    slime's rollout correction clip it, typically at 2)."""
    import numpy as np

    if not len(delta):
        return [float("nan")] * len(quantiles)
    # between two infinities a quantile is NaN, which says what it is
    with np.errstate(over="ignore", invalid="ignore"):
        return [float(v) for v in np.exp(np.quantile(-delta, quantiles))]


def mult_prob_error(delta: Doubles) -> float:
    """Mean of exp|lp_A - lp_B| (NeMo-RL's ``token_mult_prob_error``: 1.05 asks for a look)."""
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.exp(np.abs(delta)).mean()) if len(delta) else float("nan")


def shift_and_residual(
    ids_a: Ints, top_a: Floats, ids_b: Ints, top_b: Floats
) -> tuple[float, Doubles]:
    """The common shift s and the residuals of one position's top-k candidates.

    A logprob is logit - logZ. Over the ids that both sides list, s = median(lp_A - lp_B) is the
    change of logZ and r_i = lp_A(i) - lp_B(i) - s the change of each logit against it; where the
    head emits bfloat16 the r_i are whole units. NaN and an empty array where no id is shared.
    """
    import numpy as np

    shared, in_a, in_b = np.intersect1d(ids_a, ids_b, return_indices=True)
    if not len(shared):
        return float("nan"), np.empty(0)
    delta = logprob_differences(top_a[in_a], top_b[in_b])
    with np.errstate(invalid="ignore"):
        shift = float(np.median(delta))
        residual = delta - shift
    residual[np.isnan(residual)] = np.inf
    return shift, residual


def flip_margins(
    token_a: int, token_b: int, ids_a: Ints, top_a: Floats, ids_b: Ints, top_b: Floats
) -> tuple[float, float]:
    """m_A = lp_A(a) - lp_A(b) and m_B = lp_B(b) - lp_B(a) at the first divergence, where logZ
    cancels and both are exact gaps of logits. NaN where a side does not list a token.

    If two logit vectors differ by at most e, the argmax can flip only where the margin is at most
    2e.
    """

    def of(token: int, ids: Ints, values: Floats) -> float:
        found = [float(v) for i, v in zip(ids, values, strict=True) if i == token]
        return found[0] if found else float("nan")

    margin_a = of(token_a, ids_a, top_a) - of(token_b, ids_a, top_a)
    return margin_a, of(token_b, ids_b, top_b) - of(token_a, ids_b, top_b)


def mutual_containment(token_a: int, token_b: int, ids_a: Ints, ids_b: Ints) -> bool:
    """Whether each side's token is among the other's candidates (vLLM's
    ``check_logprobs_close``)."""
    return bool((ids_b == token_a).any() and (ids_a == token_b).any())


def top_overlap(ids_a: Ints, ids_b: Ints) -> float:
    """Jaccard index of two candidate sets; 1 where both are empty."""
    a, b = set(map(int, ids_a)), set(map(int, ids_b))
    return len(a & b) / len(a | b) if a | b else 1.0


def length_spread(lengths: npt.NDArray[np.int64]) -> tuple[int, float]:
    """Largest minus smallest length of one request's completions [m], and their sample standard
    deviation (the term that ``Avg_Std@Output_Length`` of arXiv 2506.09501 averages)."""
    import numpy as np

    if len(lengths) < 2:
        return 0, 0.0
    return int(lengths.max() - lengths.min()), float(np.std(lengths, ddof=1))


def std_at_accuracy(correct: npt.NDArray[np.bool_]) -> float:
    """``Std@Acc`` (arXiv 2506.09501): sample standard deviation over configurations of the share of
    right answers. ``correct`` is [configurations, requests]."""
    import numpy as np

    return float(np.std(correct.mean(axis=1), ddof=1)) if len(correct) > 1 else 0.0


def avg_std_output_length(lengths: npt.NDArray[np.int64]) -> float:
    """``Avg_Std@Output_Length`` (arXiv 2506.09501): per request the sample standard deviation of
    the length over configurations, averaged. ``lengths`` is [configurations, requests]."""
    import numpy as np

    if lengths.shape[0] < 2 or lengths.shape[1] == 0:
        return 0.0
    return float(np.std(lengths, axis=0, ddof=1).mean())


def avg_std_top1_prob(logprobs: Floats, div_index: int) -> float:
    """``Avg_Std@top1_prob`` (arXiv 2506.09501): sample standard deviation over configurations of
    the top-1 probability, averaged over the positions before ``div_index``. ``logprobs`` is
    [configurations, positions] of the greedy token."""
    import numpy as np

    if len(logprobs) < 2 or div_index <= 0:
        return 0.0
    probabilities = np.exp(logprobs[:, :div_index].astype(np.float64))
    return float(np.std(probabilities, axis=0, ddof=1).mean())
