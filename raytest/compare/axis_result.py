"""The numbers of one axis: rates with exact intervals, hazard, differences, worst divergence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytest.compare.axes import Grouping
from raytest.compare.classes import Classes
from raytest.compare.metrics import model_ulp
from raytest.compare.observed import Observed
from raytest.compare.pairs import Histogram, PairMetrics
from raytest.compare.statistics import (
    Interval,
    clopper_pearson,
    kaplan_meier,
    poisson_interval,
    upper_bound_of_none,
)
from raytest.compare.verdicts import DTYPES, REASONS, SEVERITY, Judged, dtype_index
from raytest.schema import Axis

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Doubles = npt.NDArray[np.float64]

SURVIVAL_AT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
HAZARD_WINDOWS = ((0, 32), (32, 256), (256, None))


@dataclass(frozen=True, slots=True)
class Divergence:
    """One divergence as a person reads it; what is unknown is None."""

    request_id: str
    sample_index: int
    group: str
    verdict: str
    reason: str
    position: int | None
    reference_token: int | None
    token: int | None
    margin: float | None
    near_tie_bound: float | None
    max_logprob_difference: float | None
    reference: str
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AxisNumbers:
    """What was compared along an axis, and how it came out. Rates are over requests, the
    independent unit: a request diverges where any of its comparisons does."""

    n_groups: int
    n_groups_compared: int
    n_requests: int
    n_comparisons: int
    n_tokens_only: int
    n_not_made: int
    n_bitwise: int
    n_tokens: int
    n_divergent: int
    n_requests_bitwise: int
    n_requests_tokens: int
    n_groups_divergent: int
    classes: tuple[int, ...]
    verdicts: Mapping[str, int]
    divergence_rate: Interval
    token_divergence_rate: Interval
    upper_bound: float | None
    flip_hazard: Interval
    metrics: Mapping[str, Any]
    request_agreement: Doubles
    request_difference: Doubles
    request_k3: Doubles
    n_flips: float
    exposure: float
    flip_margins: Doubles
    worst: Divergence | None


@dataclass(frozen=True, slots=True)
class AxisData:
    """Everything about one axis on its way to numbers; ``metrics`` and ``judged`` have one entry
    per divergence."""

    axis: Axis
    grouping: Grouping
    classes: Classes
    metrics: PairMetrics
    judged: Judged
    histogram: Histogram


def axis_numbers(data: AxisData, observed: Observed) -> AxisNumbers:
    """Sum one axis up."""
    import numpy as np

    classes, d = data.classes, data.classes.divergences
    compared = classes.comparisons > 0
    n = int(compared.sum())
    bitwise = compared & (classes.equal == classes.comparisons)
    flips_by_request = np.bincount(
        observed.request_of(d.unit[~d.tokens_equal]), minlength=observed.n_requests
    )
    tokens = compared & (flips_by_request == 0)
    only = np.array([g.tokens_only for g in data.grouping.groups], dtype=np.bool_)
    differ_only = int(d.n_members[only[d.group]].sum())
    n_only = int(classes.tokens_only.sum())
    n_total = int(classes.comparisons.sum())
    flips, exposure, per_request = _hazard(data)
    flip_rate = poisson_interval(flips / per_request, exposure / per_request)
    verdicts, counts = np.unique(data.judged.verdict, return_counts=True)
    return AxisNumbers(
        n_groups=len(data.grouping.groups),
        n_groups_compared=int(classes.groups_compared.sum()),
        n_requests=n,
        n_comparisons=n_total,
        n_tokens_only=n_only,
        n_not_made=classes.not_made,
        n_bitwise=int(classes.equal.sum()) - (n_only - differ_only),
        n_tokens=n_total - int(d.n_members[~d.tokens_equal].sum()),
        n_divergent=n_total - int(classes.equal.sum()),
        n_requests_bitwise=int(bitwise.sum()),
        n_requests_tokens=int(tokens.sum()),
        n_groups_divergent=len(np.unique(d.group)),
        classes=tuple(int(x) for x in np.trim_zeros(classes.n_classes, "b")),
        verdicts={SEVERITY[v].value: int(c) for v, c in zip(verdicts, counts, strict=True)},
        divergence_rate=clopper_pearson(n - int(bitwise.sum()), n),
        token_divergence_rate=clopper_pearson(n - int(tokens.sum()), n),
        upper_bound=upper_bound_of_none(n) if n and bitwise.sum() == n else None,
        flip_hazard=flip_rate,
        metrics=_metrics(data, observed),
        request_agreement=_per_request(data, observed, "agreement")[compared],
        request_difference=_per_request(data, observed, "difference"),
        request_k3=_per_request(data, observed, "k3"),
        n_flips=flips / per_request,
        exposure=exposure / per_request,
        flip_margins=data.judged.margin[~d.tokens_equal],
        worst=worst_divergence(data, observed),
    )


def _hazard(data: AxisData) -> tuple[float, float, float]:
    """First divergences, tokens at risk, and comparisons per request.

    The members of a fleet answer the same prompts and are not independent: both counts are divided
    by the comparisons per request (a design effect of full correlation) before an interval is
    taken.
    """
    import numpy as np

    classes, d, m = data.classes, data.classes.divergences, data.metrics
    weight = d.n_members.astype(np.float64)
    flipped = m.first >= 0
    exposure = np.where(flipped, m.first + 1, m.length_a) * weight
    n = int((classes.comparisons > 0).sum())
    per_request = max(1.0, float(classes.comparisons.sum()) / n) if n else 1.0
    return (
        float(weight[flipped].sum()),
        float(classes.equal_tokens.sum() + exposure.sum()),
        per_request,
    )


def _per_request(data: AxisData, observed: Observed, what: str) -> Doubles:
    """Per request the mean over its comparisons: agreement [R]; logprob difference or k3 of those
    that differ (only requests with any)."""
    import numpy as np

    d, m = data.classes.divergences, data.metrics
    request = observed.request_of(d.unit)
    n = observed.n_requests

    def summed(values: Any) -> Doubles:
        weights = np.asarray(values * d.n_members, dtype=np.float64)
        return np.bincount(request, weights=weights, minlength=n).astype(np.float64)

    if what == "agreement":
        longest = np.maximum(m.length_a, m.length_b)
        lost = np.where(m.first < 0, 0.0, 1 - m.first / np.maximum(longest, 1))
        total = np.maximum(data.classes.comparisons, 1)
        agreement: Doubles = 1 - summed(lost) / total
        return agreement
    difference = what == "difference"
    values = m.sum_abs if difference else m.sum_k3
    seen = summed(m.positions if difference else m.sampled_positions)
    means: Doubles = summed(values)[seen > 0] / seen[seen > 0]
    return means


def _metrics(data: AxisData, observed: Observed) -> dict[str, Any]:
    """Descriptive metrics of the comparisons that differ, each distinct pair weighted by its
    members."""
    import numpy as np

    d, m = data.classes.divergences, data.metrics
    weight = d.n_members.astype(np.float64)
    flipped = m.first >= 0
    positions = float((m.positions * weight).sum())
    sampled = float((m.sampled_positions * weight).sum())
    overlap = float((m.overlap_positions * weight).sum())
    with_candidates = flipped & m.candidates & (m.token_a >= 0) & (m.token_b >= 0)
    total = int(data.classes.comparisons.sum())
    lost = np.where(flipped, 1 - m.first / np.maximum(np.maximum(m.length_a, m.length_b), 1), 0.0)

    def mean(values: Any, n: float) -> float | None:
        return float((values * weight).sum() / n) if n else None

    return {
        "agreement": 1 - float((lost * weight).sum()) / total if total else None,
        "first_divergence": _first_divergence(data),
        "survival": _survival(data),
        "hazard_by_position": _windows(data),
        "max_logprob_difference": float(m.max_abs.max()) if positions else None,
        "mean_logprob_difference": mean(m.sum_abs, positions),
        "p99_logprob_difference": data.histogram.quantile_abs(0.99),
        "max_ulp_float32": int(m.max_ulp.max()) if positions else None,
        "max_logit_residual": float(m.epsilon.max()) if overlap else None,
        "max_logit_residual_ulp": float(m.epsilon.max()) / _coarsest_ulp(data, observed)
        if overlap
        else None,
        "max_shift": float(m.max_shift.max()) if overlap else None,
        "k1_kl": mean(m.sum_delta, sampled),
        "k3_kl": mean(m.sum_k3, sampled),
        "importance_ratio": {
            f"p{q * 100:g}": _exp(-data.histogram.quantile(1 - q)) for q in (0.01, 0.5, 0.99)
        },
        "top_overlap": mean(m.overlap_sum, overlap),
        "mutual_containment": float(m.mutual[with_candidates].mean())
        if with_candidates.any()
        else None,
        "length_difference": int(np.abs(m.length_a - m.length_b).max(initial=0)),
        "finish_reasons_differ": int(
            (observed.finish[d.reference, d.unit] != observed.finish[d.member, d.unit]).sum()
        ),
    }


def _coarsest_ulp(data: AxisData, observed: Observed) -> float:
    """Unit of a logit in the coarsest dtype that takes part (bfloat16 where it is unknown)."""
    used = {i for g in data.grouping.groups for i in g.members}
    return max(model_ulp(DTYPES[dtype_index(observed.members[i].dtype)]) for i in used)


def _exp(value: float) -> float:
    import numpy as np

    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _first_divergence(data: AxisData) -> dict[str, int] | None:
    import numpy as np

    first = data.metrics.first[data.metrics.first >= 0]
    if not len(first):
        return None
    return {
        "earliest": int(first.min()),
        "p10": int(np.quantile(first, 0.1, method="lower")),
        "median": int(np.quantile(first, 0.5, method="lower")),
    }


def _exposures(data: AxisData) -> tuple[Ints, npt.NDArray[np.bool_], Doubles]:
    """Tokens at risk, whether they ended in a flip, and weight: of the divergences, then one entry
    per request for its equal comparisons (at their mean length)."""
    import numpy as np

    classes, d, m = data.classes, data.classes.divergences, data.metrics
    times = np.where(m.first >= 0, m.first + 1, m.length_a)
    equal = classes.equal
    some = equal > 0
    lengths = classes.equal_tokens[some] // equal[some]
    return (
        np.concatenate([times, lengths]),
        np.concatenate([m.first >= 0, np.zeros(int(some.sum()), dtype=np.bool_)]),
        np.concatenate([d.n_members, equal[some]]).astype(np.float64),
    )


def _survival(data: AxisData) -> dict[str, float]:
    """Share of comparisons still identical after t tokens, up to the longest completion."""
    times, flipped, weight = _exposures(data)
    if not len(times):
        return {}
    at = [t for t in SURVIVAL_AT if t <= int(times.max())]
    return {str(t): s for t, s in zip(at, kaplan_meier(times, flipped, weight, at), strict=True)}


def _windows(data: AxisData) -> dict[str, float | None]:
    """Flip hazard by position: margins vary with the text, so one rate can mislead."""
    import numpy as np

    times, flipped, weight = _exposures(data)
    found: dict[str, float | None] = {}
    for low, high in HAZARD_WINDOWS:
        inside = np.clip(times, None, high) - low
        exposure = float((np.maximum(inside, 0) * weight).sum())
        ended = flipped & (times > low) & ((times <= high) if high else True)
        name = f"{low}-{high}" if high else f"{low}-"
        found[name] = float(weight[ended].sum()) / exposure if exposure else None
    return found


def worst_divergence(data: AxisData, observed: Observed) -> Divergence | None:
    """The divergence to look at first: worst verdict, then a flip before none, then the
    earliest."""
    import numpy as np

    d, m = data.classes.divergences, data.metrics
    if not len(d.unit):
        return None
    position = np.where(m.first >= 0, m.first, np.iinfo(np.int64).max)
    best = int(np.lexsort((d.group, d.unit, -m.max_abs, position, -data.judged.verdict))[0])
    return divergence(data, observed, best)


def divergence(data: AxisData, observed: Observed, i: int) -> Divergence:
    """One entry in words."""
    d, m = data.classes.divergences, data.metrics
    samples = observed.workload.n_samples
    members = d.all_members[d.offsets[i] : d.offsets[i + 1]]
    at = int(m.first[i]) if m.first[i] >= 0 else int(m.first_bits[i])
    return Divergence(
        request_id=observed.workload.request_id[int(d.unit[i]) // samples],
        sample_index=int(d.unit[i]) % samples,
        group=data.grouping.groups[int(d.group[i])].name,
        verdict=SEVERITY[data.judged.verdict[i]].value,
        reason=REASONS[int(data.judged.reason[i])],
        position=at if at >= 0 else None,
        reference_token=_known(m.token_a[i]),
        token=_known(m.token_b[i]),
        margin=_number(data.judged.margin[i]),
        near_tie_bound=_number(data.judged.bound[i]) if m.first[i] >= 0 else None,
        max_logprob_difference=_number(m.max_abs[i]) if m.positions[i] else None,
        reference=observed.members[int(d.reference[i])].name,
        members=tuple(observed.members[int(x)].name for x in members),
    )


def _known(token: Any) -> int | None:
    return int(token) if token >= 0 else None


def _number(value: Any) -> float | None:
    return None if value != value else float(value)
