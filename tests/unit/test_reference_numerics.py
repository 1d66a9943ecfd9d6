"""The reference engine's arithmetic against what is written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.engines.base import Sampling
from raytest.engines.reference_numerics import (
    SumOrder,
    exp,
    flip_bit,
    fold_sum,
    log_softmax,
    product,
    round_to,
)
from raytest.engines.reference_sampling import choose, top_candidates, uniform
from raytest.engines.reference_weights import ModelShape, make_weights


def by_hand(x: list[np.float32], w: list[np.float32], order: SumOrder, block: int) -> np.float32:
    """One element of a product, added one scalar at a time."""
    partials = []
    for start, end in order.chunks(len(x)):
        xs, ws = x[start:end], w[start:end]
        size = min(block, len(xs))
        count = len(xs) // size
        sums = []
        for b in range(count):
            picked = [
                b * size + j if order.version == "1.0" else j * count + b for j in range(size)
            ]
            total = np.float32(0.0)
            for i in picked:
                total = np.float32(total + np.float32(xs[i] * ws[i]))
            sums.append(total)
        if order.reverse:
            sums.reverse()
        total = sums[0]
        for one in sums[1:]:
            total = np.float32(total + one)
        for i in range(count * size, len(xs)):
            total = np.float32(total + np.float32(xs[i] * ws[i]))
        partials.append(total)
    total = partials[0]
    for one in partials[1:]:
        total = np.float32(total + one)
    return total


@pytest.mark.parametrize("rows", [1, 5, 20, 70])
@pytest.mark.parametrize(
    "order",
    [
        SumOrder(),
        SumOrder(threads=3),
        SumOrder(version="1.1"),
        SumOrder(reverse=True),
        SumOrder(threads=2, batch_invariant=True, version="1.1", reverse=True),
    ],
)
def test_a_product_is_added_in_the_stated_order(rows: int, order: SumOrder) -> None:
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((2, rows, 75)).astype(np.float32)
    w = rng.standard_normal((2, 75, 6)).astype(np.float32)
    found = product(x, w, order)
    block = 16 if order.batch_invariant else {1: 8, 5: 16, 20: 32, 70: 64}[rows]
    for rank, row, column in ((0, 0, 0), (1, rows - 1, 5), (1, rows // 2, 3)):
        expected = by_hand(list(x[rank, row]), list(w[rank, :, column]), order, block)
        assert found[rank, row, column].tobytes() == expected.tobytes()


def test_a_row_of_a_product_does_not_depend_on_the_others() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 40, 64)).astype(np.float32)
    w = rng.standard_normal((1, 64, 512)).astype(np.float32)
    whole = product(x, w, SumOrder(batch_invariant=True))
    for row in (0, 17, 39):
        alone = product(x[:, row : row + 1], w, SumOrder(batch_invariant=True))
        assert whole[:, row : row + 1].tobytes() == alone.tobytes()


@given(st.integers(0, 2**32 - 1))
def test_bfloat16_rounding_is_to_the_nearest_and_to_even(bits: int) -> None:
    x = np.array([bits], dtype=np.uint32).view(np.float32)
    rounded = round_to(x, "bfloat16")
    if np.isnan(x[0]):
        assert np.isnan(rounded[0])
        return
    assert rounded.view(np.uint32)[0] & 0xFFFF == 0
    if not np.isfinite(rounded[0]) or not np.isfinite(x[0]):
        return
    low = np.array([bits & 0xFFFF0000], dtype=np.uint32)
    candidates = np.concatenate([low, low + np.uint32(0x10000)]).view(np.float32).astype(np.float64)
    distances = np.abs(candidates - np.float64(x[0]))
    if distances[0] == distances[1]:
        assert (rounded.view(np.uint32)[0] >> 16) & 1 == 0
    else:
        assert np.float64(rounded[0]) == candidates[distances.argmin()]


def test_exp_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 200_001).astype(np.float32)
    true = np.exp(x.astype(np.float64))
    units = np.abs(exp(x).astype(np.float64) - true) / np.spacing(true.astype(np.float32))
    assert units.max() <= 2.0
    assert np.isnan(exp(np.array([np.nan], dtype=np.float32))[0])


def test_log_softmax_is_close_to_the_one_in_float64() -> None:
    logits = np.random.default_rng(2).standard_normal((5, 300)).astype(np.float32) * 4
    exact = logits.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(log_softmax(logits), exact, atol=3e-6)


def test_a_fold_adds_every_element() -> None:
    for n in (1, 2, 3, 7, 64, 100):
        assert fold_sum(np.arange(n, dtype=np.float32)[None])[0] == n * (n - 1) / 2


@pytest.mark.parametrize(("dtype", "bit"), [("float32", 31), ("bfloat16", 15), ("float16", 15)])
def test_flipping_the_highest_bit_turns_the_sign(dtype: str, bit: int) -> None:
    x = np.array([[1.0, 1.5], [2.0, -3.0]], dtype=np.float32)
    flip_bit(x, 1, bit, dtype)
    flip_bit(x, 3, bit, dtype)
    assert x.tolist() == [[1.0, -1.5], [2.0, 3.0]]


def test_flipping_the_lowest_bit_moves_one_step_of_the_dtype() -> None:
    for dtype, step in (("float32", 2.0**-23), ("bfloat16", 2.0**-7), ("float16", 2.0**-10)):
        x = np.ones(1, dtype=np.float32)
        flip_bit(x, 0, 0, dtype)
        assert x[0] == 1.0 + step


def test_the_weights_of_all_shards_together_do_not_depend_on_the_tp_size() -> None:
    one = make_weights(ModelShape(), 0, "float32")
    four = make_weights(ModelShape(tensor_parallel_size=4), 0, "float32")
    for module in ("layers.1.mlp.down_proj", "layers.0.self_attn.o_proj", "embed_tokens"):
        np.testing.assert_array_equal(one[module].reshape(-1), four[module].reshape(-1))
    np.testing.assert_array_equal(one["lm_head"][0], np.concatenate(list(four["lm_head"]), axis=1))
    assert not np.array_equal(one["lm_head"], make_weights(ModelShape(), 1, "float32")["lm_head"])


def test_draws_are_uniform_and_depend_on_seed_and_position() -> None:
    draws = np.array([uniform(seed, p) for seed in range(100) for p in range(100)])
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert abs(draws.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(draws))
    assert len(set(draws.tolist())) == len(draws)


LOGITS = np.log(np.array([0.1, 0.4, 0.25, 0.2, 0.05], dtype=np.float32))


def frequencies(n: int = 6000, **sampling: float) -> np.ndarray:
    asked = Sampling(**{"temperature": 1.0, **sampling})
    drawn = [choose(LOGITS, asked, uniform(9, i)) for i in range(n)]
    return np.bincount(drawn, minlength=5) / n


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.1, 0.4, 0.25, 0.2, 0.05]),
        ({"top_k": 2}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"top_p": 0.6}, [0, 0.4 / 0.65, 0.25 / 0.65, 0, 0]),
        ({"min_p": 0.45}, [0, 0.4 / 0.85, 0.25 / 0.85, 0.2 / 0.85, 0]),
        ({"temperature": 0.5}, [0.01, 0.16, 0.0625, 0.04, 0.0025]),
        ({"temperature": 0.0}, [0, 1, 0, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(
    sampling: dict[str, float], expected: list[float]
) -> None:
    wanted = np.array(expected) / np.sum(expected)
    np.testing.assert_allclose(frequencies(**sampling), wanted, atol=0.03)
    assert (frequencies(**sampling)[wanted == 0] == 0).all()


def test_ties_go_to_the_lower_id_and_nan_gives_token_zero() -> None:
    tied = np.array([0.0, 3.0, 1.0, 3.0], dtype=np.float32)
    assert choose(tied, Sampling(), 0.99) == 1
    broken = np.array([1.0, np.nan, 5.0], dtype=np.float32)
    assert choose(broken, Sampling(temperature=1.0), 0.5) == 0


@pytest.mark.parametrize("k", [1, 3, 20, 21, 40])
def test_candidates_are_sorted_with_ties_by_id(k: int) -> None:
    logprobs = np.round(np.random.default_rng(k).standard_normal((4, 40)), 1).astype(np.float32)
    ids, values = top_candidates(logprobs, k)
    for row in range(4):
        expected = sorted(range(40), key=lambda i: (-logprobs[row, i], i))[:k]
        assert ids[row].tolist() == expected
        assert values[row].tolist() == [logprobs[row, i] for i in expected]


def test_candidates_of_a_row_with_nan_put_nan_last() -> None:
    logprobs = np.array([[-1.0, np.nan, -0.5]], dtype=np.float32)
    assert top_candidates(logprobs, 3)[0].tolist() == [[2, 0, 1]]
