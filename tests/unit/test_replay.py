"""Replay's analysis: one fixed sequence in two cells, and an engine against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from raytest.compare.replay import consistency, distance, distance_json, tie_bound
from raytest.replay_folder import Scored
from raytest.store import Payload

TOKENS = (5, 6, 7)


def payload(
    tokens: tuple[int, ...] = TOKENS,
    logprobs: tuple[float, ...] = (-0.5, -0.25, -1.0),
    second: tuple[float, ...] = (-2.0, -2.0, -2.0),
) -> Payload:
    """The token itself and token + 1 as candidates, the likelier first."""
    ids, values = [], []
    for token, own, other in zip(tokens, logprobs, second, strict=True):
        pair = sorted([(-own, token), (-other, token + 1)])
        ids += [t for _, t in pair]
        values += [-v for v, _ in pair]
    return Payload(
        b"p" * 16,
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        2,
        np.array(ids, np.int32),
        np.array(values, np.float32),
        None,
    )


def scored(cell: str = "a", **payloads: Payload) -> Scored:
    return Scored(cell, payloads, {})


def test_equal_scores_are_bitwise_with_no_distance() -> None:
    found = distance(scored(r=payload()), scored("b", r=payload()))
    assert (found.n_positions, found.bitwise, found.top1) == (3, 1.0, 1.0)
    assert (found.max_abs, found.k1_kl, found.k3_kl, found.mult_prob_error) == (0, 0, 0, 1)


def test_the_estimators_agree_with_their_formulas_written_out() -> None:
    a, b = (-0.5, -0.25, -1.0), (-0.75, -0.25, -0.5)
    found = distance(scored(r=payload(logprobs=a)), scored("b", r=payload(logprobs=b)))
    delta = [x - y for x, y in zip(a, b, strict=True)]
    assert found.k1_kl == pytest.approx(sum(delta) / 3)
    assert found.k3_kl == pytest.approx(sum(math.exp(-d) - 1 + d for d in delta) / 3)
    assert found.max_abs == 0.5
    assert found.mean_abs == pytest.approx(0.25)
    assert found.importance_ratio["max"] == pytest.approx(math.exp(0.5))
    assert found.importance_ratio["min"] == pytest.approx(math.exp(-0.25))
    assert (found.n_bitwise, found.n_requests_bitwise) == (1, 0)


def test_another_most_likely_token_lowers_the_forced_top1_agreement() -> None:
    other = payload(second=(-2.0, -0.125, -2.0))
    found = distance(scored(r=payload()), scored("b", r=other))
    assert found.top1 == pytest.approx(2 / 3)
    assert found.bitwise == 1.0


def test_a_request_scored_on_other_tokens_is_not_compared() -> None:
    found = distance(scored(r=payload()), scored("b", r=payload(tokens=(5, 6, 9))))
    assert (found.n_requests, found.n_positions) == (0, 0)
    assert distance_json(found)["share_bitwise"] is None


def test_nan_on_one_side_is_an_infinite_distance_and_null_in_json() -> None:
    other = payload(logprobs=(math.nan, -0.25, -1.0))
    found = distance(scored(r=payload()), scored("b", r=other))
    assert found.max_abs == math.inf
    assert distance_json(found)["max_abs"] is None


def test_an_engine_that_scores_its_own_greedy_output_names_the_same_tokens() -> None:
    found = consistency(scored(r=payload()), {"r": payload()}, {"r"}, "float32")
    assert (found.n_positions, found.n_same, found.n_other) == (3, 3, 0)


def test_another_argmax_at_a_clear_margin_is_told_with_its_place() -> None:
    score = payload(second=(-2.0, -0.125, -2.0))
    found = consistency(scored(r=score), {"r": payload()}, {"r"}, "float32")
    assert (found.n_same, found.n_near_tie, found.n_other) == (2, 0, 1)
    assert found.first_other == ("r", 1)


def test_another_argmax_within_the_engines_own_error_is_a_near_tie() -> None:
    score = payload(second=(-2.0, -0.125, -2.0))
    found = consistency(scored(r=score), {"r": payload()}, {"r"}, "bfloat16")
    assert (found.n_near_tie, found.n_other) == (1, 0)


def test_past_the_first_other_token_nothing_is_held_against_an_engine() -> None:
    own = payload(tokens=(5, 7, 9))
    score = payload(second=(-2.0, -0.125, -2.0))
    found = consistency(scored(r=score), {"r": own}, {"r"}, "float32")
    # token 7 is what scoring puts on top after the shared prefix, too
    assert (found.n_positions, found.n_same) == (2, 2)


def test_sampled_requests_say_nothing_of_an_argmax() -> None:
    found = consistency(scored(r=payload()), {"r": payload()}, set(), "float32")
    assert found.n_positions == 0


@pytest.mark.parametrize(
    ("dtype", "error", "bound"),
    [("float32", 0.0, 1e-4), ("bfloat16", 0.1, 0.2), ("float32", 1.0, 1e-2)],
)
def test_the_tie_bound_is_twice_the_error_within_the_dtypes_limits(
    dtype: str, error: float, bound: float
) -> None:
    assert tie_bound(error, dtype) == pytest.approx(bound)
