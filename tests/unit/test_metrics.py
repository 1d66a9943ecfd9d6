"""Metrics of one pair by hand, and the batched comparison against them on any pairs."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytest.compare import metrics as one
from raytest.compare.flat import Flat, flat_of, longest_runs, ragged, unsorted_candidates
from raytest.compare.pairs import Histogram, compare_pairs
from raytest.schema import payloads_schema


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int32)


def floats(*values: float) -> Any:
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("a", "b", "first", "agreement", "risk"),
    [
        ((1, 2, 3), (1, 2, 3), -1, 1.0, 3),
        ((1, 2, 3), (1, 9, 3), 1, 1 / 3, 2),
        ((1, 2), (1, 2, 3), 2, 2 / 3, 3),
        ((), (), -1, 1.0, 0),
        ((), (5,), 0, 0.0, 1),
        ((5,), (6,), 0, 0.0, 1),
    ],
)
def test_first_divergence_agreement_and_exposure(
    a: tuple[int, ...], b: tuple[int, ...], first: int, agreement: float, risk: int
) -> None:
    assert one.first_divergence(ints(*a), ints(*b)) == first
    assert one.agreement(ints(*a), ints(*b)) == pytest.approx(agreement)
    assert one.tokens_at_risk(ints(*a), ints(*b)) == risk


def test_neighbouring_floats_are_one_ulp_apart_across_zero_too() -> None:
    x = floats(1.0, -1.0, 0.0, 1e-45)
    y = floats(np.nextafter(np.float32(1), 2), np.nextafter(np.float32(-1), 0), -0.0, 0.0)
    assert one.ulp_distance(x, y).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("dtype", "ulp"), [("bfloat16", 0.125), ("float16", 0.015625), ("float32", 2.0**-19)]
)
def test_the_model_ulp_of_a_logit_in_16_to_32(dtype: str, ulp: float) -> None:
    assert one.model_ulp(dtype) == ulp


def test_equal_bits_differ_by_nothing_whatever_they_mean() -> None:
    odd = floats(np.nan, np.inf, -np.inf, -0.0)
    assert one.logprob_differences(odd, odd).tolist() == [0, 0, 0, 0]


def test_nan_against_a_number_is_an_infinite_difference() -> None:
    assert one.logprob_differences(floats(np.nan), floats(-1.0)).tolist() == [math.inf]


def test_kl_estimators_by_hand() -> None:
    delta = one.logprob_differences(floats(-1.0, -2.0), floats(-1.5, -1.5))
    assert one.k1_kl(delta) == pytest.approx(0.0)
    assert one.k3_kl(delta) == pytest.approx(
        ((math.exp(-0.5) + 0.5 - 1) + (math.exp(0.5) - 0.5 - 1)) / 2
    )
    assert one.importance_ratios(delta, (0.0, 1.0)) == pytest.approx(
        [math.exp(-0.5), math.exp(0.5)]
    )
    assert one.mult_prob_error(delta) == pytest.approx(math.exp(0.5))


def test_shift_and_residual_take_the_change_of_logz_out() -> None:
    shift, residual = one.shift_and_residual(
        ints(1, 2, 3), floats(-1.0, -2.0, -3.0), ints(3, 1, 2), floats(-3.25, -1.25, -2.5)
    )
    assert shift == pytest.approx(0.25)
    assert sorted(residual.tolist()) == pytest.approx([0.0, 0.0, 0.25])
    assert math.isnan(one.shift_and_residual(ints(1), floats(0), ints(2), floats(0))[0])


def test_margins_and_containment_at_a_flip() -> None:
    ids_a, top_a = ints(1, 2), floats(-0.5, -0.75)
    ids_b, top_b = ints(2, 1), floats(-0.5, -0.625)
    assert one.flip_margins(1, 2, ids_a, top_a, ids_b, top_b) == (0.25, 0.125)
    assert one.mutual_containment(1, 2, ids_a, ids_b)
    assert not one.mutual_containment(1, 2, ids_a, ints(2, 9))
    assert math.isnan(one.flip_margins(1, 2, ids_a, top_a, ints(2, 9), top_b)[1])
    assert one.top_overlap(ids_a, ints(2, 9)) == pytest.approx(1 / 3)


def test_the_spread_metrics_of_2506_09501() -> None:
    lengths = np.array([[10, 20], [14, 20]])
    assert one.length_spread(lengths[:, 0]) == (4, pytest.approx(math.sqrt(8)))
    assert one.avg_std_output_length(lengths) == pytest.approx(math.sqrt(8) / 2)
    correct = np.array([[True, True], [True, False]])
    assert one.std_at_accuracy(correct) == pytest.approx(math.sqrt(0.125))
    logprobs = np.log(np.array([[0.5, 0.9], [0.7, 0.1]], dtype=np.float32))
    assert one.avg_std_top1_prob(logprobs, 1) == pytest.approx(math.sqrt(0.02), rel=1e-5)


def test_ragged_runs_are_laid_end_to_end() -> None:
    assert ragged(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ragged(np.array([], dtype=int), np.array([], dtype=int)).tolist() == []


def payload(tokens: Any, logprobs: Any, k: int, ids: Any, top: Any) -> dict[str, Any]:
    return {"tokens": tokens, "logprobs": logprobs, "k": k, "ids": ids, "top": top}


def flat(payloads: list[dict[str, Any]]) -> Flat:
    def lists(name: str, kind: pa.DataType) -> pa.Array:
        arrays = [pa.array(p[name], kind) for p in payloads]
        offsets = np.cumsum([0, *map(len, arrays)]).astype(np.int32)
        return pa.ListArray.from_arrays(pa.array(offsets), pa.concat_arrays(arrays))

    digests = [bytes([i]) * 16 for i in range(len(payloads))]
    return flat_of(
        pa.table(
            [
                pa.array(digests, pa.binary(16)),
                pa.array(digests, pa.binary(16)),
                lists("tokens", pa.int32()),
                lists("logprobs", pa.float32()),
                pa.array([p["k"] for p in payloads], pa.int32()),
                lists("ids", pa.int32()),
                lists("top", pa.float32()),
                pa.nulls(len(payloads), pa.string()),
            ],
            schema=payloads_schema(),
        )
    )


ODD = st.sampled_from([0.0, -0.0, math.nan, math.inf, -math.inf, -1.0, -1.0000001, -2.5, -30.0])


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    n = draw(st.integers(0, 6))
    k = draw(st.sampled_from([0, 2, 3]))
    tokens = ints(*draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    with_logprobs = draw(st.booleans())
    k = k if with_logprobs else 0
    logprobs = floats(*draw(st.lists(ODD, min_size=n, max_size=n))) if with_logprobs else floats()
    ids = [draw(st.permutations(range(4)))[:k] for _ in range(n)]
    top = draw(st.lists(ODD, min_size=n * k, max_size=n * k))
    return payload(tokens, logprobs, k, ints(*[i for row in ids for i in row]), floats(*top))


def naive(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """One pair, position by position, from the formulas."""
    first = one.first_divergence(a["tokens"], b["tokens"])
    common = min(len(a["tokens"]), len(b["tokens"]))
    prefix = common if first < 0 else first
    has = len(a["logprobs"]) == len(a["tokens"]) and len(b["logprobs"]) == len(b["tokens"])
    n = prefix if has else 0
    delta = one.logprob_differences(a["logprobs"][:n], b["logprobs"][:n])
    extra: list[float] = []
    margins = (math.nan, math.nan)
    flip = 0 <= first < common
    ka, kb = a["k"], b["k"]
    if flip and has and ka and kb:
        ids_a, top_a = (a[x].reshape(-1, ka)[first] for x in ("ids", "top"))
        ids_b, top_b = (b[x].reshape(-1, kb)[first] for x in ("ids", "top"))
        ta, tb = int(a["tokens"][first]), int(b["tokens"][first])
        sides = [dict(zip(ids_a.tolist(), top_a, strict=True)) | {ta: a["logprobs"][first]}]
        sides.append(dict(zip(ids_b.tolist(), top_b, strict=True)) | {tb: b["logprobs"][first]})
        for token in (ta, tb):
            pair = [s.get(token, np.float32(np.nan)) for s in sides]
            if not any(np.isnan(v) for v in pair):
                extra.append(float(one.logprob_differences(floats(pair[0]), floats(pair[1]))[0]))
        with np.errstate(invalid="ignore"):
            margins = tuple(
                float(np.float64(s.get(x, np.nan)) - np.float64(s.get(y, np.nan)))
                for s, x, y in ((sides[0], ta, tb), (sides[1], tb, ta))
            )
    epsilon = overlap = 0.0
    gaps: list[float] = []
    if ka == kb and ka:
        for side in (a, b):
            top = side["top"].reshape(-1, ka)[: prefix + flip]
            with np.errstate(invalid="ignore"):
                between = (top[:, :-1] - top[:, 1:]).reshape(-1)
            gaps += [float(g) for g in between if g > 0]
        for t in range(prefix + flip):
            ids_a, top_a = (a[x].reshape(-1, ka)[t] for x in ("ids", "top"))
            ids_b, top_b = (b[x].reshape(-1, kb)[t] for x in ("ids", "top"))
            overlap += one.top_overlap(ids_a, ids_b)
            _, residual = one.shift_and_residual(ids_a, top_a, ids_b, top_b)
            if t < prefix:
                epsilon = max([epsilon, *np.abs(residual).tolist()])
    every = [*np.abs(delta), *np.abs(extra)]
    return {
        "first": first,
        "positions": len(every),
        "sampled_positions": n,
        "max_abs": max(every, default=0.0),
        "sum_abs": sum(every),
        "sum_delta": float(delta.sum()) if np.isfinite(delta).all() else None,
        "sum_k3": float(one.k3_terms(delta).sum()),
        "max_ulp": int(one.ulp_distance(a["logprobs"][:n], b["logprobs"][:n]).max(initial=0)),
        "margin_a": margins[0],
        "margin_b": margins[1],
        "epsilon": epsilon,
        "overlap_sum": overlap,
        "smallest_gap": min(gaps, default=math.nan),
        "delta": delta,
    }


@given(st.lists(st.tuples(payloads(), payloads()), min_size=1, max_size=6))
def test_many_pairs_at_once_agree_with_one_at_a_time(
    pairs: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    index = np.arange(len(pairs))
    a, b = flat([p[0] for p in pairs]), flat([p[1] for p in pairs])
    histogram = {0: Histogram.empty()}
    found = compare_pairs(a, index, b, index, np.zeros(len(pairs), dtype=np.int64), histogram)
    expected = [naive(*p) for p in pairs]
    for i, want in enumerate(expected):
        for name, value in want.items():
            if name == "delta" or value is None:
                continue
            assert getattr(found, name)[i] == pytest.approx(value, nan_ok=True, rel=1e-6), name
    assert histogram[0].counts.sum() == sum(w["positions"] for w in expected)


@given(st.tuples(payloads(), payloads()))
def test_a_pair_is_as_far_apart_from_either_side(pair: tuple[dict[str, Any], ...]) -> None:
    index = np.array([0])
    kind = np.zeros(1, dtype=np.int64)
    both = [flat([p]) for p in pair]
    there = compare_pairs(both[0], index, both[1], index, kind, {0: Histogram.empty()})
    back = compare_pairs(both[1], index, both[0], index, kind, {0: Histogram.empty()})
    for name in ("first", "positions", "first_bits", "max_abs", "max_ulp", "mutual", "overlap_sum"):
        assert getattr(there, name)[0] == getattr(back, name)[0], name
    assert there.margin_a[0] == pytest.approx(back.margin_b[0], nan_ok=True)


def test_histogram_quantiles_are_within_a_percent() -> None:
    rng = np.random.default_rng(1)
    delta = rng.normal(0, 0.01, size=20001)
    histogram = Histogram.empty()
    histogram.add(delta.astype(np.float32))
    for q in (0.5, 0.9, 0.99):
        exact = np.quantile(np.abs(delta), q, method="higher")
        assert histogram.quantile_abs(q) == pytest.approx(exact, rel=0.008)
    exact_low = np.quantile(delta, 0.01, method="inverted_cdf")
    assert histogram.quantile(0.01) == pytest.approx(exact_low, rel=0.008)
    assert math.isnan(Histogram.empty().quantile_abs(0.5))


def test_longest_runs_stop_at_the_end_of_a_completion() -> None:
    made = [
        payload(ints(*t), floats(), 0, ints(), floats()) for t in ((7, 7, 7), (), (7, 7, 1), (2,))
    ]
    assert longest_runs(flat(made), 1).tolist() == [3, 0, 2, 1]


@given(st.lists(st.lists(st.integers(0, 1), max_size=60), min_size=1, max_size=5))
def test_only_runs_that_are_long_enough_are_measured(made: list[list[int]]) -> None:
    longest = [max((len(list(run)) for _, run in groupby(t)), default=0) for t in made]
    several = flat([payload(ints(*t), floats(), 0, ints(), floats()) for t in made])
    for least in (2, 5, 16):
        expected = [n if n >= least else 0 for n in longest]
        assert longest_runs(several, least).tolist() == expected


def test_candidates_out_of_order_are_seen_per_completion() -> None:
    good = payload(ints(1, 2), floats(-1, -1), 2, ints(1, 2, 1, 2), floats(-1, -2, -1, -1))
    wrong = payload(ints(1, 2), floats(-1, -1), 2, ints(1, 2, 1, 2), floats(-1, -2, -2, -1))
    bare = payload(ints(1), floats(), 0, ints(), floats())
    assert unsorted_candidates(flat([good, bare, wrong])).tolist() == [False, False, True]
