"""Intervals and tests against scipy.stats, closed forms and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.compare.statistics import (
    clopper_pearson,
    holm,
    kaplan_meier,
    poisson_binomial_tail,
    poisson_interval,
    rate_bounds,
    student_interval,
    units_needed,
    upper_bound_of_none,
)


@given(st.integers(1, 200), st.integers(0, 200), st.sampled_from([0.9, 0.95, 0.99]))
def test_clopper_pearson_is_scipys_exact_interval(n: int, k: int, confidence: float) -> None:
    from scipy.stats import binomtest

    k = min(k, n)
    exact = binomtest(k, n).proportion_ci(confidence, method="exact")
    ours = clopper_pearson(k, n, confidence)
    assert ours.low == pytest.approx(exact.low, abs=1e-9)
    assert ours.high == pytest.approx(exact.high, abs=1e-9)


def test_no_units_leave_everything_open() -> None:
    assert (clopper_pearson(0, 0).low, clopper_pearson(0, 0).high) == (0.0, 1.0)
    assert upper_bound_of_none(0) == 1.0
    assert math.isinf(poisson_interval(0, 0).high)


@pytest.mark.parametrize(("bound", "n95"), [(0.10, 29), (0.01, 299), (0.001, 2995)])
def test_zero_in_n_bounds_the_rate_as_tabulated(bound: float, n95: int) -> None:
    assert upper_bound_of_none(n95) <= bound < upper_bound_of_none(n95 - 1)


@given(st.integers(0, 60), st.floats(1, 1e6))
def test_poisson_interval_is_garwoods(k: int, exposure: float) -> None:
    from scipy.stats import chi2

    ours = poisson_interval(k, exposure)
    low = chi2.ppf(0.025, 2 * k) / 2 / exposure if k else 0.0
    assert ours.low == pytest.approx(low, rel=1e-8)
    assert ours.high == pytest.approx(chi2.ppf(0.975, 2 * k + 2) / 2 / exposure, rel=1e-8)


def test_a_one_sided_bound_is_tighter_than_the_two_sided_one() -> None:
    low, high = rate_bounds(90, 100, 0.95)
    both = clopper_pearson(90, 100, 0.95)
    assert both.low < low < 0.9 < high < both.high


def test_student_interval_matches_scipy() -> None:
    from scipy.stats import t

    values = np.array([0.9, 0.8, 1.0, 0.7])
    ours = student_interval(values)
    half = t.ppf(0.975, 3) * values.std(ddof=1) / 2
    assert (ours.low, ours.high) == (
        pytest.approx(values.mean() - half),
        pytest.approx(values.mean() + half),
    )
    assert math.isinf(student_interval(values[:1]).high)


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8), st.integers(0, 9))
def test_poisson_binomial_tail_is_the_sum_over_all_outcomes(chances: list[float], k: int) -> None:
    total = 0.0
    for outcome in itertools.product([0, 1], repeat=len(chances)):
        if sum(outcome) >= k:
            total += math.prod(p if o else 1 - p for p, o in zip(chances, outcome, strict=True))
    assert poisson_binomial_tail(np.array(chances), k) == pytest.approx(total, abs=1e-9)


def test_kaplan_meier_by_hand() -> None:
    times = np.array([2, 4, 4, 10])
    diverged = np.array([True, True, False, False])
    survival = kaplan_meier(times, diverged, np.ones(4), [1, 2, 4, 10])
    assert survival == pytest.approx([1.0, 0.75, 0.5, 0.5])


def test_weights_stand_for_repeated_comparisons() -> None:
    once = kaplan_meier(np.array([2, 2, 5]), np.array([True, True, False]), np.ones(3), [2])
    weighted = kaplan_meier(np.array([2, 5]), np.array([True, False]), np.array([2.0, 1.0]), [2])
    assert once == weighted


def test_units_needed_is_the_smallest_that_decides() -> None:
    assert units_needed(lambda n: n >= 137, 10) == 127
    assert units_needed(lambda n: False, 10, most=1000) is None
