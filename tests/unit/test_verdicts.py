"""What counts as rounding and what as drift: budgets that the pair's own logits calibrate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from raytest.compare.pairs import PairMetrics
from raytest.compare.verdicts import (
    MEAN_BUDGET,
    SEVERITY,
    Setting,
    dtype_index,
    judge_divergences,
    mean_budget,
)
from raytest.schema import Verdict
from raytest.store import RunFolder

RESULTS = Path(__file__).parents[2] / "results"


def pair(mean: float, *, gap: float = np.nan, n: int = 100, direction: float = 0.0) -> PairMetrics:
    """One pair of equal tokens whose logprobs are ``mean`` nats apart, ``direction`` (0 to 1) of it
    to one side."""
    m = PairMetrics.empty(1)
    m.length_a[:] = m.length_b[:] = m.positions[:] = m.sampled_positions[:] = n
    m.sum_abs[:] = m.prefix_abs[:] = mean * n
    m.sum_delta[:] = direction * mean * n
    m.sum_k3[:] = n * mean**2 / 2
    m.smallest_gap[:] = gap
    return m


def verdict(m: PairMetrics, dtype: str = "bfloat16") -> Verdict:
    no = np.zeros(1, dtype=np.bool_)
    setting = Setting(~no, no, np.array([dtype_index(dtype)]), no, no)
    return SEVERITY[int(judge_divergences(m, setting).verdict[0])]


@pytest.mark.parametrize(
    ("gap", "dtype", "budget"),
    [
        (np.nan, "bfloat16", 0.025),
        (1 / 32, "bfloat16", 2 / 32),
        (1 / 8, "bfloat16", 2 / 8),
        (1 / 2, "bfloat16", 2 / 8),  # no bfloat16 logit has a coarser unit than 1/8
        (0.05, "bfloat16", 0.025),  # no power of two: no lattice
        (1 / 1024, "bfloat16", 0.025),  # a finer head than the budget allows for
        (1 / 256, "float16", 2 / 256),
        (1 / 32, "float32", 1e-4),
    ],
)
def test_the_budget_is_two_units_of_the_heads_own_lattice(
    gap: float, dtype: str, budget: float
) -> None:
    found = mean_budget(pair(0.0, gap=gap), np.array([dtype_index(dtype)]))
    assert found[0] == pytest.approx(budget)


def test_one_unit_of_the_head_is_rounding_and_three_are_drift() -> None:
    assert verdict(pair(1 / 32, gap=1 / 32)) is Verdict.TOKENS
    assert verdict(pair(3 / 32, gap=1 / 32)) is Verdict.DRIFT


def test_without_a_lattice_the_default_budget_holds() -> None:
    assert verdict(pair(MEAN_BUDGET["bfloat16"] * 0.9)) is Verdict.TOKENS
    assert verdict(pair(1 / 32)) is Verdict.DRIFT


def test_a_difference_with_a_direction_is_drift_however_small_a_unit_makes_it() -> None:
    assert verdict(pair(1 / 64, gap=1 / 32, direction=1.0)) is Verdict.DRIFT
    assert verdict(pair(1 / 64, gap=1 / 32, direction=0.2)) is Verdict.TOKENS
    # too few positions to tell, or too little to matter
    assert verdict(pair(1 / 64, gap=1 / 32, direction=1.0, n=16)) is Verdict.TOKENS
    assert verdict(pair(1e-3, gap=1 / 32, direction=1.0)) is Verdict.TOKENS


def test_kernel_choice_on_an_h200_is_rounding() -> None:
    """Recorded: batch against solo and three levels of one model, nothing planted."""
    from raytest.compare.evaluate import evaluate

    found = evaluate(RunFolder.open(RESULTS / "h200-levels"))
    seen = {a.axis.value: a.numbers.verdicts for a in found.axes}
    assert sum(seen["arrangement"].values()) > 100
    assert all(Verdict.DRIFT.value not in verdicts for verdicts in seen.values())
