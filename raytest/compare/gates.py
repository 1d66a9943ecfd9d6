"""Contracts: what an axis must be, and whether its numbers say so.

Default contracts follow the expected-equality classes of vLLM (see :func:`default_contract`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from raytest.compare.axis_result import AxisNumbers
from raytest.compare.statistics import (
    Interval,
    plain,
    poisson_interval,
    rate_bounds,
    student_interval,
    units_needed,
)
from raytest.schema import Axis
from raytest.spec import Gate, Thresholds


class GateResult(StrEnum):
    """How a gate came out. RECORDED: the axis may differ, the distance is only written down."""

    HOLDS = "holds"
    FAILS = "fails"
    UNDECIDED = "undecided"
    RECORDED = "recorded"


@dataclass(frozen=True, slots=True)
class Contract:
    """A gate and where it comes from."""

    gate: Gate
    stated: bool
    why: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result and reason of a gate; ``requests_needed`` more would decide it (None: unknown or
    none). ``bounds`` has each threshold's value, interval and result."""

    result: GateResult
    reason: str
    requests_needed: int | None = None
    bounds: Mapping[str, Mapping[str, Any]] | None = None


def default_contract(axis: Axis, level: int, has_logprobs: bool) -> Contract:
    """The contract of an axis for which the spec states none, at determinism ``level``.

    repeat, launch, gpu, node: bitwise from level 3 on, where scheduling is deterministic and
    in-process: same model, driver, software and batches leave nothing that may differ, so a
    mismatch is a finding (cuBLAS promises equal bits run to run for one toolkit, architecture and
    stream). Below it arrival times shape the batches, and batches shape the sums: may differ.
    arrangement: bitwise from level 4 on (batch-invariant kernels), else other batch shapes take
    other kernels. pp: stages add no sum, but other micro-batches, so likewise from level 4 on. tp:
    an all-reduce sums in another order at every size; batch invariance is not TP invariance.
    variant: another configuration is another computation. run: the same plan in the same
    environment repeats itself. Where no logprobs were asked for, equality of tokens is all that can
    be demanded.
    """
    equal: Gate = "bitwise" if has_logprobs else "tokens"
    if axis in (Axis.REPEAT, Axis.LAUNCH, Axis.GPU, Axis.NODE):
        if level >= 3:
            return Contract(equal, False, f"level {level}: scheduling is deterministic")
        return Contract("may-differ", False, f"level {level}: arrival times shape the batches")
    if axis in (Axis.ARRANGEMENT, Axis.PP):
        if level >= 4:
            return Contract(equal, False, f"level {level}: kernels are batch-invariant")
        return Contract("may-differ", False, f"level {level}: batch shapes choose the kernels")
    if axis is Axis.RUN:
        return Contract(equal, False, "the same plan repeats itself")
    why = "all-reduces of other sizes sum in another order" if axis is Axis.TP else ""
    return Contract("may-differ", False, why or "another configuration is another computation")


def judge_gate(contract: Contract, numbers: AxisNumbers, not_needed: int = 0) -> Outcome:
    """Hold the numbers of one axis against its contract. ``not_needed`` trials of the axis did not
    run: that everything is equal then cannot be known."""
    gate = contract.gate
    if not numbers.n_comparisons:
        return Outcome(GateResult.UNDECIDED, "nothing was compared")
    if isinstance(gate, Thresholds):
        return _thresholds(gate, numbers, not_needed)
    outcome = {
        "bitwise": _bitwise,
        "tokens": _tokens,
        "may-differ": _may_differ,
        "must-differ": _must_differ,
    }[gate](numbers)
    if outcome.result is GateResult.HOLDS and numbers.n_not_made:
        return Outcome(
            GateResult.UNDECIDED, f"{numbers.n_not_made} planned comparisons could not be made"
        )
    if outcome.result is GateResult.HOLDS and not_needed:
        return Outcome(GateResult.UNDECIDED, f"{not_needed} planned trials did not run")
    return outcome


def _bitwise(numbers: AxisNumbers) -> Outcome:
    if numbers.n_divergent:
        differ = numbers.n_requests - numbers.n_requests_bitwise
        return Outcome(
            GateResult.FAILS,
            f"{numbers.n_divergent} of {numbers.n_comparisons} comparisons differ "
            f"({differ} of {numbers.n_requests} requests)",
        )
    if numbers.n_tokens_only:
        return Outcome(
            GateResult.UNDECIDED,
            f"{numbers.n_tokens_only} comparisons are possible by tokens only: logprobs were not "
            "asked for, or not alike",
        )
    return Outcome(GateResult.HOLDS, f"all {numbers.n_comparisons} comparisons are bitwise equal")


def _tokens(numbers: AxisNumbers) -> Outcome:
    wrong = numbers.n_comparisons - numbers.n_tokens
    if wrong:
        differ = numbers.n_requests - numbers.n_requests_tokens
        return Outcome(
            GateResult.FAILS,
            f"tokens differ in {wrong} of {numbers.n_comparisons} comparisons "
            f"({differ} of {numbers.n_requests} requests)",
        )
    return Outcome(GateResult.HOLDS, f"tokens are equal in all {numbers.n_comparisons} comparisons")


def _may_differ(numbers: AxisNumbers) -> Outcome:
    return Outcome(
        GateResult.RECORDED,
        f"{numbers.n_divergent} of {numbers.n_comparisons} comparisons differ; allowed",
    )


def _must_differ(numbers: AxisNumbers) -> Outcome:
    silent = numbers.n_groups_compared - numbers.n_groups_divergent
    if silent:
        return Outcome(
            GateResult.FAILS,
            f"{silent} of {numbers.n_groups_compared} groups show no difference, but must",
        )
    return Outcome(GateResult.HOLDS, "every group differs, as it must")


@dataclass(frozen=True, slots=True)
class _Bound:
    """One threshold: value, one-sided bounds at the gate's confidence (None: no interval exists),
    and whether more requests at the same rate would decide it."""

    value: float
    low: float | None
    high: float | None
    at_least: float | None = None
    at_most: float | None = None
    scaled: Callable[[int], tuple[float, float]] | None = None

    def result(self, confident: bool) -> GateResult:
        if self.value != self.value:
            return GateResult.UNDECIDED
        low, high = (self.low, self.high) if confident else (self.value, self.value)
        low = self.value if low is None else low
        high = self.value if high is None else high
        if self.at_least is not None:
            if low >= self.at_least:
                return GateResult.HOLDS
            return GateResult.FAILS if high < self.at_least else GateResult.UNDECIDED
        assert self.at_most is not None
        if high <= self.at_most:
            return GateResult.HOLDS
        return GateResult.FAILS if low > self.at_most else GateResult.UNDECIDED

    def needed(self, n: int) -> int | None:
        """Requests to add, at the rate seen so far, until the bound is decided."""
        scaled = self.scaled
        if scaled is None:
            return None

        def decided(units: int) -> bool:
            low, high = scaled(units)
            if self.at_least is not None:
                return low >= self.at_least or high < self.at_least
            return high <= (self.at_most or 0.0) or low > (self.at_most or 0.0)

        return units_needed(decided, n)


def _thresholds(gate: Thresholds, numbers: AxisNumbers, not_needed: int) -> Outcome:
    """Every stated bound; with ``confidence`` a bound holds when its interval does."""
    bounds = _bounds(gate, numbers)
    confident = gate.confidence is not None
    results = {name: bound.result(confident) for name, bound in bounds.items()}
    undecided = [n for n, r in results.items() if r is GateResult.UNDECIDED]
    needed = [bounds[n].needed(numbers.n_requests) for n in undecided]
    detail = {
        name: {
            "value": plain(b.value),
            "low": plain(b.low) if confident else None,
            "high": plain(b.high) if confident else None,
            "at_least": b.at_least,
            "at_most": b.at_most,
            "result": results[name].value,
        }
        for name, b in bounds.items()
    }
    failed = [n for n, r in results.items() if r is GateResult.FAILS]
    if failed:
        return Outcome(GateResult.FAILS, _told(failed, bounds), None, detail)
    if undecided:
        known = [n for n in needed if n is not None]
        more = max(known) if known and len(known) == len(needed) else None
        text = f"about {more} more requests would decide it" if more else "more requests are needed"
        return Outcome(GateResult.UNDECIDED, f"{_told(undecided, bounds)}; {text}", more, detail)
    if numbers.n_not_made:
        reason = f"{numbers.n_not_made} planned comparisons could not be made"
        return Outcome(GateResult.UNDECIDED, reason, None, detail)
    if not_needed and not confident:
        return Outcome(
            GateResult.UNDECIDED, f"{not_needed} planned trials did not run", None, detail
        )
    return Outcome(GateResult.HOLDS, _told(list(bounds), bounds), None, detail)


def _told(names: list[str], bounds: Mapping[str, _Bound]) -> str:
    parts = []
    for name in names:
        b = bounds[name]
        sign, limit = (">=", b.at_least) if b.at_least is not None else ("<=", b.at_most)
        parts.append(f"{name} {b.value:.6g} (demanded {sign} {limit:g})")
    return ", ".join(parts)


def _bounds(gate: Thresholds, numbers: AxisNumbers) -> dict[str, _Bound]:
    confidence = gate.confidence or 0.95
    found: dict[str, _Bound] = {}
    for name, equal, demanded in (
        ("tokens", numbers.n_requests_tokens, gate.tokens),
        ("bitwise", numbers.n_requests_bitwise, gate.bitwise),
    ):
        if demanded is not None:
            found[name] = _rate(equal, numbers.n_requests, demanded, confidence)
    if gate.agreement is not None:
        interval = student_interval(numbers.request_agreement, 2 * confidence - 1)
        found["agreement"] = _mean(interval, numbers.n_requests, at_least=gate.agreement)
    if gate.near_tie_margin is not None:
        margins = numbers.flip_margins
        unknown = bool((margins != margins).any())
        largest = float(margins.max()) if len(margins) else 0.0
        value = float("inf") if unknown else largest
        found["near_tie_margin"] = _Bound(value, None, None, at_most=gate.near_tie_margin)
    found |= _values(gate, numbers)
    for name, values, demanded in (
        ("mean_logprob_difference", numbers.request_difference, gate.mean_logprob_difference),
        ("k3_kl", numbers.request_k3, gate.k3_kl),
    ):
        if demanded is not None:
            value = _zero_if_equal(numbers.metrics[name], numbers)
            interval = student_interval(values, 2 * confidence - 1)
            n = numbers.n_requests if len(values) else 0
            low, high = (interval.low, interval.high) if n else (value, value)
            found[name] = _mean(Interval(value, low, high), n, at_most=demanded)
    if gate.flip_hazard is not None:
        found["flip_hazard"] = _hazard(numbers, gate.flip_hazard, confidence)
    return found


def _values(gate: Thresholds, numbers: AxisNumbers) -> dict[str, _Bound]:
    """Bounds on values that no interval is known for: they are held by the value itself."""
    seen = numbers.metrics
    ratio, overlap = seen["importance_ratio"], seen["top_overlap"]
    k1 = seen["k1_kl"]
    found = {
        name: _Bound(_zero_if_equal(value, numbers), None, None, at_most=demanded)
        for name, value, demanded in (
            ("max_logprob_difference", seen["max_logprob_difference"], gate.max_logprob_difference),
            ("p99_logprob_difference", seen["p99_logprob_difference"], gate.p99_logprob_difference),
            ("max_logit_residual_ulp", seen["max_logit_residual_ulp"], gate.max_logit_residual_ulp),
            ("k1_kl", None if k1 is None else abs(k1), gate.k1_kl),
        )
        if demanded is not None
    }
    if gate.importance_ratio is not None:
        # of equal logprobs, and of those that were not compared, there are no quantiles
        widest = max(ratio["p99"], 1 / ratio["p1"]) if ratio["p1"] else float("inf")
        value = _zero_if_equal(None if widest != widest else widest, numbers) or 1.0
        found["importance_ratio"] = _Bound(value, None, None, at_most=gate.importance_ratio)
    if gate.top_overlap is not None:
        value = 1.0 - _zero_if_equal(None if overlap is None else 1.0 - overlap, numbers)
        found["top_overlap"] = _Bound(value, None, None, at_least=gate.top_overlap)
    return found


def _zero_if_equal(value: float | None, numbers: AxisNumbers) -> float:
    """Without a difference the largest is 0; with differences and no logprobs it is unknown."""
    if value is not None and value == value:
        return value
    return float("nan") if numbers.n_divergent or numbers.n_tokens_only else 0.0


def _rate(equal: int, n: int, demanded: float, confidence: float) -> _Bound:
    def scaled(units: int) -> tuple[float, float]:
        return rate_bounds(equal / n * units, units, confidence)

    low, high = rate_bounds(equal, n, confidence)
    return _Bound(equal / n, low, high, at_least=demanded, scaled=scaled)


def _mean(
    interval: Interval, n: int, at_least: float | None = None, at_most: float | None = None
) -> _Bound:
    """A bound on a mean; ``n`` requests gave its interval, which narrows with their square root."""

    def scaled(units: int) -> tuple[float, float]:
        half = (interval.high - interval.low) / 2 * (n / units) ** 0.5
        return interval.value - half, interval.value + half

    return _Bound(
        interval.value,
        interval.low,
        interval.high,
        at_least=at_least,
        at_most=at_most,
        scaled=scaled if n > 1 else None,
    )


def _hazard(numbers: AxisNumbers, demanded: float, confidence: float) -> _Bound:
    def scaled(units: int) -> tuple[float, float]:
        factor = units / numbers.n_requests
        seen = poisson_interval(
            numbers.n_flips * factor, numbers.exposure * factor, 2 * confidence - 1
        )
        return seen.low, seen.high

    low, high = scaled(numbers.n_requests)
    value = numbers.n_flips / numbers.exposure if numbers.exposure else float("nan")
    return _Bound(value, low, high, at_most=demanded, scaled=scaled)
