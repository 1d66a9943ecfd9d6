"""Contracts: default classes, words, thresholds with and without confidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytest.compare.axis_result import AxisNumbers
from raytest.compare.evaluate import evaluate
from raytest.compare.gates import Contract, GateResult, Outcome, default_contract, judge_gate
from raytest.compare.statistics import Interval, student_interval
from raytest.schema import Axis
from raytest.spec import Gate, Thresholds
from tests.support.make_run import RunMaker, inventory, plant, spec, swap_token

NOTHING = Interval(0.0, 0.0, 0.0)
NO_RATIOS = {"p1": float("nan"), "p99": float("nan")}


def numbers(n: int = 100, differ: int = 0, flips: int = 0, **changes: Any) -> AxisNumbers:
    """One comparison a request: ``differ`` of them not bitwise, ``flips`` of those in tokens."""
    values = AxisNumbers(
        n_groups=1,
        n_groups_compared=1,
        n_requests=n,
        n_comparisons=n,
        n_tokens_only=0,
        n_not_made=0,
        n_bitwise=n - differ,
        n_tokens=n - flips,
        n_divergent=differ,
        n_requests_bitwise=n - differ,
        n_requests_tokens=n - flips,
        n_groups_divergent=int(differ > 0),
        classes=(n,),
        verdicts={},
        divergence_rate=NOTHING,
        token_divergence_rate=NOTHING,
        upper_bound=None,
        flip_hazard=NOTHING,
        metrics={
            "max_logprob_difference": 0.5 if differ else None,
            "mean_logprob_difference": 0.01 if differ else None,
            "k3_kl": 1e-4 if differ else None,
            "k1_kl": -0.002 if differ else None,
            "p99_logprob_difference": 0.2 if differ else float("nan"),
            "max_logit_residual_ulp": 2.0 if differ else None,
            "importance_ratio": {"p1": 0.5, "p99": 1.5} if differ else NO_RATIOS,
            "top_overlap": 0.9 if differ else None,
        },
        request_agreement=np.ones(n),
        request_difference=np.full(differ, 0.01),
        request_k3=np.full(differ, 1e-4),
        n_flips=float(flips),
        exposure=100.0 * n,
        flip_margins=np.full(flips, 0.1),
        worst=None,
    )
    return replace(values, **changes)


def judged(gate: Gate, seen: AxisNumbers) -> Outcome:
    return judge_gate(Contract(gate, True), seen)


@pytest.mark.parametrize(
    ("axis", "level", "gate"),
    [
        (Axis.REPEAT, 3, "bitwise"),
        (Axis.REPEAT, 2, "may-differ"),
        (Axis.LAUNCH, 3, "bitwise"),
        (Axis.GPU, 5, "bitwise"),
        (Axis.NODE, 0, "may-differ"),
        (Axis.ARRANGEMENT, 3, "may-differ"),
        (Axis.ARRANGEMENT, 4, "bitwise"),
        (Axis.PP, 4, "bitwise"),
        (Axis.PP, 3, "may-differ"),
        (Axis.TP, 5, "may-differ"),
        (Axis.VARIANT, 5, "may-differ"),
        (Axis.RUN, 0, "bitwise"),
    ],
)
def test_default_contracts_follow_the_expected_equality_classes(
    axis: Axis, level: int, gate: str
) -> None:
    contract = default_contract(axis, level, True)
    assert (contract.gate, contract.stated) == (gate, False)
    assert contract.why


def test_without_logprobs_a_default_contract_demands_tokens() -> None:
    assert default_contract(Axis.GPU, 3, False).gate == "tokens"


@pytest.mark.parametrize(
    ("gate", "differ", "flips", "result"),
    [
        ("bitwise", 0, 0, GateResult.HOLDS),
        ("bitwise", 1, 0, GateResult.FAILS),
        ("tokens", 1, 0, GateResult.HOLDS),
        ("tokens", 1, 1, GateResult.FAILS),
        ("may-differ", 9, 9, GateResult.RECORDED),
        ("must-differ", 0, 0, GateResult.FAILS),
        ("must-differ", 1, 0, GateResult.HOLDS),
    ],
)
def test_words(gate: Gate, differ: int, flips: int, result: GateResult) -> None:
    assert judged(gate, numbers(differ=differ, flips=flips)).result is result


@pytest.mark.parametrize(
    "gate", ["bitwise", "tokens", "may-differ", "must-differ", Thresholds(tokens=0.5)]
)
def test_nothing_compared_is_never_a_pass(gate: Gate) -> None:
    outcome = judged(gate, numbers(0))
    assert (outcome.result, outcome.reason) == (GateResult.UNDECIDED, "nothing was compared")


@pytest.mark.parametrize("gate", ["bitwise", "tokens", Thresholds(tokens=0.5)])
def test_a_hole_leaves_a_gate_open_but_never_saves_it(gate: Gate) -> None:
    assert judged(gate, numbers(n_not_made=1)).result is GateResult.UNDECIDED
    failing = numbers(differ=90, flips=90, n_not_made=1)
    assert judged(gate, failing).result is GateResult.FAILS


@pytest.mark.parametrize(
    ("bounds", "result"),
    [
        ({"tokens": 0.90}, GateResult.HOLDS),
        ({"tokens": 0.91}, GateResult.FAILS),
        ({"bitwise": 0.80}, GateResult.HOLDS),
        ({"bitwise": 0.81}, GateResult.FAILS),
        ({"near_tie_margin": 0.1}, GateResult.HOLDS),
        ({"near_tie_margin": 0.09}, GateResult.FAILS),
        ({"max_logprob_difference": 0.5}, GateResult.HOLDS),
        ({"max_logprob_difference": 0.49}, GateResult.FAILS),
        ({"mean_logprob_difference": 0.01}, GateResult.HOLDS),
        ({"mean_logprob_difference": 0.009}, GateResult.FAILS),
        ({"k3_kl": 1e-4}, GateResult.HOLDS),
        ({"k3_kl": 9e-5}, GateResult.FAILS),
        ({"p99_logprob_difference": 0.2}, GateResult.HOLDS),
        ({"p99_logprob_difference": 0.19}, GateResult.FAILS),
        ({"max_logit_residual_ulp": 2.0}, GateResult.HOLDS),
        ({"max_logit_residual_ulp": 1.0}, GateResult.FAILS),
        ({"k1_kl": 0.002}, GateResult.HOLDS),
        ({"k1_kl": 0.001}, GateResult.FAILS),
        ({"importance_ratio": 2.0}, GateResult.HOLDS),
        ({"importance_ratio": 1.9}, GateResult.FAILS),
        ({"top_overlap": 0.9}, GateResult.HOLDS),
        ({"top_overlap": 0.91}, GateResult.FAILS),
        ({"flip_hazard": 1e-3}, GateResult.HOLDS),
        ({"flip_hazard": 9e-4}, GateResult.FAILS),
        ({"agreement": 1.0}, GateResult.HOLDS),
        ({"tokens": 0.5, "k3_kl": 1e-9}, GateResult.FAILS),
    ],
)
def test_thresholds_hold_up_to_and_including_the_bound(
    bounds: dict[str, float], result: GateResult
) -> None:
    seen = numbers(differ=20, flips=10)
    assert judged(Thresholds(**bounds), seen).result is result


LOGPROB_BOUNDS = {
    "max_logprob_difference": 1.0,
    "mean_logprob_difference": 1.0,
    "p99_logprob_difference": 1.0,
    "max_logit_residual_ulp": 1.0,
    "k1_kl": 1.0,
    "k3_kl": 1.0,
    "importance_ratio": 2.0,
    "top_overlap": 0.5,
}


def test_every_bound_of_a_spec_is_judged() -> None:
    bounds = {n: 1.0 for n in Thresholds.model_fields if n != "confidence"}
    outcome = judged(Thresholds(**bounds), numbers(differ=20, flips=10))
    assert outcome.bounds is not None
    assert set(outcome.bounds) == set(bounds)


@pytest.mark.parametrize("name", LOGPROB_BOUNDS)
def test_equal_results_hold_every_bound_on_logprobs(name: str) -> None:
    gate = Thresholds.model_validate({name: LOGPROB_BOUNDS[name]})
    assert judged(gate, numbers()).result is GateResult.HOLDS


@pytest.mark.parametrize("name", LOGPROB_BOUNDS)
def test_a_bound_on_logprobs_is_open_where_the_arms_were_not_looked_at_alike(name: str) -> None:
    gate = Thresholds.model_validate({name: LOGPROB_BOUNDS[name]})
    blind = numbers(n_tokens_only=100)
    assert judged(gate, blind).result is GateResult.UNDECIDED


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
@pytest.mark.parametrize("name", ["mean_logprob_difference", "k3_kl"])
def test_a_mean_with_confidence_is_held_by_its_interval_and_asks_for_more(
    name: str, confidence: float
) -> None:
    values = np.tile([0.005, 0.015], 10)
    field = "request_k3" if name == "k3_kl" else "request_difference"
    metrics = {**numbers(differ=20).metrics, name: 0.01}
    seen = numbers(differ=20, metrics=metrics, **{field: values})
    interval = student_interval(values, 2 * confidence - 1)
    for demanded, result in (
        (interval.high * 1.0001, GateResult.HOLDS),
        (interval.high * 0.9999, GateResult.UNDECIDED),
        (interval.low * 0.9999, GateResult.FAILS),
    ):
        gate = Thresholds.model_validate({name: demanded, "confidence": confidence})
        outcome = judged(gate, seen)
        assert outcome.result is result
        assert (outcome.requests_needed is not None) == (result is GateResult.UNDECIDED)
    # half-way to the mean takes about four times as many
    near = Thresholds.model_validate(
        {name: (interval.value + interval.high) / 2, "confidence": confidence}
    )
    needed = judged(near, seen).requests_needed
    assert needed is not None
    assert needed == pytest.approx(3 * seen.n_requests, abs=2)


def test_agreement_with_confidence_asks_for_more_requests() -> None:
    seen = numbers(50, request_agreement=np.tile([0.9, 1.0], 25))
    interval = student_interval(seen.request_agreement, 0.9)
    gate = Thresholds(agreement=(interval.low + interval.value) / 2, confidence=0.95)
    outcome = judged(gate, seen)
    assert outcome.result is GateResult.UNDECIDED
    assert outcome.requests_needed == pytest.approx(150, abs=2)
    assert f"{outcome.requests_needed} more requests" in outcome.reason


def test_a_flip_whose_margin_is_unknown_is_no_near_tie() -> None:
    unknown = numbers(differ=1, flips=1, flip_margins=np.array([np.nan]))
    assert judged(Thresholds(near_tie_margin=9.0), unknown).result is GateResult.FAILS


def test_a_bound_on_logprobs_is_open_where_none_were_compared() -> None:
    blind = numbers(n_tokens_only=100)
    assert judged(Thresholds(max_logprob_difference=1.0), blind).result is GateResult.UNDECIDED
    assert judged(Thresholds(max_logprob_difference=0.0), numbers()).result is GateResult.HOLDS


def test_with_confidence_zero_in_a_hundred_is_not_yet_99_percent() -> None:
    gate = Thresholds(tokens=0.99, confidence=0.95)
    outcome = judged(gate, numbers(100))
    assert outcome.result is GateResult.UNDECIDED
    assert outcome.requests_needed == 299 - 100
    assert "199 more requests" in outcome.reason
    assert judged(gate, numbers(299)).result is GateResult.HOLDS
    assert judged(gate, numbers(298)).result is GateResult.UNDECIDED


def test_with_confidence_a_rate_that_is_surely_too_low_fails() -> None:
    gate = Thresholds(tokens=0.99, confidence=0.95)
    assert judged(gate, numbers(100, 40, 40)).result is GateResult.FAILS
    assert judged(gate, numbers(100, 2, 2)).result is GateResult.UNDECIDED


def test_demanding_certainty_says_that_no_number_of_requests_will_do() -> None:
    outcome = judged(Thresholds(tokens=1.0, confidence=0.95), numbers(100))
    assert (outcome.result, outcome.requests_needed) == (GateResult.UNDECIDED, None)


def test_hazard_with_confidence_uses_the_exact_poisson_bound() -> None:
    seen = numbers(1000)  # no flip in 100,000 tokens: below 3.0e-5 at 95%
    assert judged(Thresholds(flip_hazard=3.1e-5, confidence=0.95), seen).result is GateResult.HOLDS
    open_still = judged(Thresholds(flip_hazard=2.9e-5, confidence=0.95), seen)
    assert open_still.result is GateResult.UNDECIDED
    assert open_still.requests_needed is not None


def test_a_gate_with_thresholds_on_a_whole_run(tmp_path: Path) -> None:
    text = "[gates]\ngpu = { tokens = 0.7, near_tie_margin = 0.2 }\n[determinism]\nlevel = 3\n"
    maker = RunMaker(
        spec(text), inventory(1, 3), changes=[plant(swap_token(), slot="node-0:2", request=0)]
    )
    gpu = next(a for a in evaluate(maker.write(tmp_path)).axes if a.axis is Axis.GPU)
    assert gpu.outcome.result is GateResult.HOLDS
    assert gpu.outcome.bounds is not None
    assert gpu.outcome.bounds["tokens"]["value"] == 0.75
    assert gpu.outcome.bounds["near_tie_margin"]["value"] == pytest.approx(0.05)
