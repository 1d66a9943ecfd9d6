"""What explains the classes: planted causes are told, and nothing is told where there is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytest.explain.attribute import attribute
from raytest.explain.partition import chance_of_refining, explained, joint, refines, relabel
from raytest.explain.regroup import regroupings
from raytest.explain.tables import UNKNOWN, Candidate, Conclusion, Explanation, Outcomes, Role
from raytest.report.explanation import explanation_lines
from tests.support.fleet import Fleet, factor


def names(candidates: tuple[Candidate, ...]) -> list[list[tuple[str, ...]]]:
    return [[tuple(a.name for a in member) for member in c.members] for c in candidates]


def said(explanation: Explanation) -> str:
    return "\n".join(explanation_lines("r", explanation))


def random_facts(
    rng: np.random.Generator, n: int, shape: tuple[int, int], levels: int = 2
) -> dict[str, object]:
    tables = [rng.integers(0, levels, size=shape) for _ in range(n)]
    return {f"random.{i}": lambda n, d, t=t: t[n, d] for i, t in enumerate(tables)}


def test_one_planted_cause_is_named_with_its_value() -> None:
    found = Fleet(
        8,
        8,
        {
            "driver": lambda n, d: "575.57" if n in (2, 5) else "580.95",
            "package.torch": lambda n, d: n % 2,
            "cpu.model": lambda n, d: n // 4,
        },
        result=lambda n, d: int(n in (2, 5)),
    ).explained()
    assert found.conclusion is Conclusion.CAUSE
    assert names(found.causes) == [[("driver",)]]
    assert "all 16 divergent slots and no other have driver 575.57" in said(found)
    best = found.causes[0]
    assert (best.explained, best.requests, best.n_requests) == (1.0, 3, 3)
    assert best.p_by_node == pytest.approx(1 / 28)
    assert names(found.labels) == [[("node",)]]


def test_two_causes_that_act_together_are_named_as_a_pair() -> None:
    found = Fleet(
        16,
        8,
        {
            "driver": lambda n, d: n % 2,
            "env.X": lambda n, d: d % 2,
            "env.Y": lambda n, d: (n + d) % 3,
            "package.z": lambda n, d: n // 8,
        },
        result=lambda n, d: int(n % 2 == 1 and d % 2 == 1),
    ).explained()
    assert found.conclusion is Conclusion.CAUSE
    assert names(found.causes) == [[("driver",), ("env.X",)]]
    assert "all 32 divergent slots and no other have driver 1 and env.X 1" in said(found)


def test_confounded_factors_are_reported_together_and_settings_before_the_node() -> None:
    found = Fleet(
        8,
        8,
        {
            "driver": lambda n, d: "a" if n == 3 else "b",
            "env.NCCL_ALGO": lambda n, d: "Ring" if n == 3 else "Tree",
            "package.torch": lambda n, d: n % 2,
        },
        result=lambda n, d: int(n == 3),
    ).explained()
    assert names(found.causes) == [[("driver", "env.NCCL_ALGO")]]
    assert names(found.labels) == [[("node",)]]
    text = said(found)
    assert "confounded with driver: env.NCCL_ALGO" in text
    assert "node separates the classes too" in text
    # one node of eight: nothing says which of its own factors it is
    assert found.causes[0].p_by_node == pytest.approx(1 / 8)
    assert "counted by node p = 0.1" in text


def test_a_node_without_anything_recorded_of_its_own_is_a_name_and_no_cause() -> None:
    facts = {"a": lambda n, d: n // 4, "b": lambda n, d: n % 2, "c": lambda n, d: n // 2 % 2}
    found = Fleet(8, 8, facts, result=lambda n, d: int(n == 3)).explained()
    assert found.conclusion is Conclusion.LABEL
    assert found.causes == ()
    assert names(found.labels) == [[("node",)]]
    assert "nothing that was recorded and could act through it" in said(found)


@pytest.mark.parametrize("seed", range(12))
def test_no_cause_is_named_where_the_classes_are_random(seed: int) -> None:
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 2 + seed % 3, size=(8, 8))
    facts = random_facts(rng, 40, (8, 8), levels=2 + seed % 2)
    found = Fleet(8, 8, facts, result=lambda n, d: int(classes[n, d])).explained()
    assert found.conclusion in (Conclusion.NONE, Conclusion.CHANCE)
    assert all(c.adjusted >= 0.05 for c in (*found.causes, *found.labels))
    assert "no cause" in said(found)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_fleet_where_many_factors_fit_by_chance_names_none(seed: int) -> None:
    rng = np.random.default_rng(seed)
    facts = random_facts(rng, 60, (2, 4))
    found = Fleet(2, 4, facts, result=lambda n, d: int((2 * n + d) % 3 == 0)).explained()
    assert found.conclusion in (Conclusion.NONE, Conclusion.CHANCE)


def test_a_single_slot_cannot_be_told_from_chance_and_a_regrouping_is_proposed() -> None:
    facts = {"gpu.ecc.uncorrected": lambda n, d: 3 if (n, d) == (2, 3) else 0}
    roles = {"gpu.ecc.uncorrected": Role.STATE}

    def result(n: int, d: int) -> int:
        return int((n, d) == (2, 3))

    found = Fleet(4, 8, facts, result=result, roles=roles).explained()
    assert found.conclusion is Conclusion.SINGLE
    text = said(found)
    assert "one slot stands alone: node-2:3; a single bad device cannot be told from" in text
    assert "only it has gpu.ecc.uncorrected 3" in text
    assert "raytest retest" in text

    pairs = Fleet(4, 8, result=result, group=2).explained()
    assert pairs.retest is not None
    assert pairs.retest.rounds == regroupings(8, 2)
    assert "{0,1}{2,3}{4,5}{6,7} then {0,2}{1,3}{4,6}{5,7}" in said(pairs)


def test_of_two_workers_only_what_differs_is_said() -> None:
    facts = {"env.OMP_NUM_THREADS": lambda n, d: 2 if n else 1, "driver": lambda n, d: "580"}
    found = Fleet(2, 1, facts, result=lambda n, d: n).explained()
    assert found.conclusion is Conclusion.TWO
    assert found.tied
    text = said(found)
    assert "which is right cannot be told" in text
    assert "env.OMP_NUM_THREADS: 1 against 2" in text
    assert "driver" not in text


def test_a_tie_names_no_majority() -> None:
    found = Fleet(8, 8, {"x": lambda n, d: n % 2}, result=lambda n, d: n % 2).explained()
    assert found.tied
    assert "no class is the majority" in said(found)
    assert "all 32 slots of class A and no other have x 0" in said(found)


def test_omp_is_preferred_to_the_slot_since_it_is_coarser() -> None:
    found = Fleet(
        8, 8, {"env.OMP_NUM_THREADS": lambda n, d: 1 + d % 2}, result=lambda n, d: d % 2
    ).explained()
    assert found.conclusion is Conclusion.CAUSE
    assert names(found.causes) == [[("env.OMP_NUM_THREADS",)]]
    assert "GPU" not in said(found)


def test_what_names_a_worker_is_no_cause_whatever_it_is_called() -> None:
    found = Fleet(
        4,
        4,
        {"env.MY_PORT": lambda n, d: 8000 + 10 * n + d, "x": lambda n, d: d // 2},
        result=lambda n, d: int((n + d) % 3 == 0),
    ).explained()
    assert all("env.MY_PORT" not in m for c in names(found.causes + found.labels) for m in c)


def test_repeats_that_differ_are_noise_and_become_rates() -> None:
    found = Fleet(
        8,
        8,
        {"env.X": lambda n, d: d % 2, "driver": lambda n, d: n % 2},
        requests=10,
        unstable=lambda n, d: [n % 10, (n + 3) % 10] if d % 2 else [],
    ).explained()
    assert found.conclusion is Conclusion.NOT_STABLE
    assert found.noise is not None
    assert found.noise.n_workers == 32
    assert found.noise.rate == pytest.approx(0.1)
    assert names(found.noise.causes) == [[("env.X",)]]
    assert [(r.factor, r.values, r.rates) for r in found.noise.rates] == [
        ("env.X", ("1", "0"), (pytest.approx(0.2), 0.0))
    ]
    assert "all 32 unstable workers and no other have env.X 1" in said(found)


def test_noise_without_a_cause_is_noise_and_nothing_else() -> None:
    rng = np.random.default_rng(1)
    shaken = rng.integers(0, 20, size=(8, 8, 2))
    found = Fleet(
        8,
        8,
        random_facts(rng, 20, (8, 8)),
        requests=20,
        unstable=lambda n, d: list(shaken[n, d]),
    ).explained()
    assert found.noise is not None
    assert (found.noise.causes, found.noise.rates) == ((), ())


def test_unstable_requests_do_not_hide_what_explains_the_stable_ones() -> None:
    found = Fleet(
        8,
        8,
        {"driver": lambda n, d: "old" if n in (1, 6) else "new"},
        requests=6,
        result=lambda n, d: int(n in (1, 6)),
        unstable=lambda n, d: [0] if (n + d) % 5 == 0 else [],
    ).explained()
    assert found.conclusion is Conclusion.CAUSE
    assert names(found.causes) == [[("driver",)]]
    assert found.causes[0].requests == found.n_divergent == 6
    assert found.noise is not None
    assert found.noise.n_requests == 1


def test_one_stray_request_leaves_the_driver_as_what_explains_the_rest() -> None:
    def result(n: int, d: int) -> list[int]:
        return [int(n in (2, 5)), int((n, d) == (0, 0)), int(n in (2, 5))]

    found = Fleet(
        8, 8, {"driver": lambda n, d: "old" if n in (2, 5) else "new"}, result=result
    ).explained()
    assert found.conclusion is Conclusion.PARTLY
    assert names(found.partial)[0] == [("driver",)]
    assert (found.partial[0].requests, found.partial[0].n_requests) == (2, 3)
    assert "driver: 2 of 3 divergent requests" in said(found)


def test_equal_results_leave_nothing_to_explain() -> None:
    found = Fleet(4, 4, {"x": lambda n, d: n}).explained()
    assert found.conclusion is Conclusion.EQUAL
    assert "no difference to explain" in said(found)


def test_workers_without_a_result_are_left_out_and_counted() -> None:
    fleet = Fleet(4, 4, {"x": lambda n, d: n % 2}, result=lambda n, d: n % 2)
    outcomes = fleet.outcomes()
    codes = outcomes.codes.copy()
    codes[5] = UNKNOWN
    found = attribute(replace(outcomes, codes=codes), fleet.factors())
    assert (found.n_left_out, found.n_workers) == (1, 15)
    assert names(found.causes) == [[("x",)]]
    nothing = attribute(replace(outcomes, codes=codes * 0 - 1), fleet.factors())
    assert "nothing was observed" in said(nothing)


def test_one_repeat_is_said_to_tell_nothing_of_noise() -> None:
    fleet = Fleet(4, 4, {"x": lambda n, d: n % 2}, result=lambda n, d: n % 2)
    found = attribute(replace(fleet.outcomes(), repeats=1), fleet.factors())
    assert "nothing was repeated" in said(found)


partitions = st.lists(st.integers(0, 3), min_size=2, max_size=7).map(relabel)


@given(st.data())
def test_the_exact_chance_is_the_share_of_permutations(data: st.DataObject) -> None:
    factor_codes = data.draw(partitions)
    n = len(factor_codes)
    outcome = relabel(data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n)))
    if not refines(factor_codes, outcome):
        return
    shuffled = [np.array(p) for p in permutations(outcome.tolist())]
    fitting = sum(refines(factor_codes, p) for p in shuffled)
    assert chance_of_refining(factor_codes, outcome) == pytest.approx(fitting / len(shuffled))


@given(st.lists(st.tuples(*[st.integers(0, 2)] * 3), min_size=2, max_size=30))
def test_a_factor_is_sufficient_just_where_it_explains_all_entropy(
    rows: list[tuple[int, int, int]],
) -> None:
    a, b, outcome = (relabel([r[i] for r in rows]) for i in range(3))
    both = joint([a, b])
    assert refines(both, a)
    assert explained(outcome, both) >= explained(outcome, a) - 1e-9 or not outcome.any()
    if outcome.any():
        assert refines(both, outcome) == (explained(outcome, both) > 1 - 1e-9)


def test_singletons_never_surprise_whatever_the_fleet() -> None:
    for n in (3, 64, 1000):
        alone = relabel(np.arange(n) == n - 1)
        assert chance_of_refining(np.arange(n), alone) == 1.0
        assert chance_of_refining(alone, alone) == pytest.approx(1 / n)


tables = st.integers(3, 14).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(st.integers(0, 2), min_size=n, max_size=n), min_size=1, max_size=5),
        st.lists(st.integers(0, 2), min_size=n, max_size=n),
        st.lists(st.integers(0, 3), min_size=n, max_size=n),
        st.permutations(range(n)),
    )
)


@given(tables)
@settings(max_examples=80)
def test_order_and_names_of_workers_change_nothing(
    table: tuple[list[list[int]], list[int], list[int], list[int]],
) -> None:
    columns, outcome, node, order = table

    def explain(rows: list[int], prefix: str) -> Explanation:
        workers = tuple(f"{prefix}{i}" for i in range(len(rows)))
        indices = np.arange(len(rows))
        outcomes = Outcomes(
            workers=workers,
            slot_names=workers,
            slot=indices,
            node=relabel([node[i] for i in rows]),
            launch=indices,
            codes=np.array([[outcome[i]] for i in rows], dtype=np.int64),
        )
        facts = [
            factor(f"f{k}", [str(values[i]) for i in rows]) for k, values in enumerate(columns)
        ]
        return attribute(outcomes, [*facts, factor("slot", list(workers), Role.IDENTITY)])

    first, second = explain(list(range(len(outcome))), "a"), explain(list(order), "z")
    assert names(first.causes) == names(second.causes)
    assert [c.adjusted for c in first.causes] == pytest.approx([c.adjusted for c in second.causes])
    assert sorted(len(c.workers) for c in first.classes) == sorted(
        len(c.workers) for c in second.classes
    )
    # whether a factor explains a part is decided by sampled permutations, at 0.05
    close = {Conclusion.NONE, Conclusion.PARTLY, Conclusion.CHANCE}
    assert first.conclusion == second.conclusion or {first.conclusion, second.conclusion} <= close


def test_regroupings_are_those_of_the_literature() -> None:
    assert regroupings(8, 2) == (
        ((0, 1), (2, 3), (4, 5), (6, 7)),
        ((0, 2), (1, 3), (4, 6), (5, 7)),
    )
    assert len(regroupings(8, 4)) == 3
    assert regroupings(4, 1) == (((0,), (1,), (2,), (3,)),)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))))
def test_regroupings_name_any_single_bad_device_in_the_fewest_rounds(
    sizes: tuple[int, int],
) -> None:
    n, k = sizes
    if k == n > 1:
        with pytest.raises(ValueError, match="never be told apart"):
            regroupings(n, k)
        return
    rounds = regroupings(n, k)
    for groups in rounds:
        assert [len(g) for g in groups] == [k] * (n // k)
        assert len({d for g in groups for d in g}) == k * (n // k)
    failed = [
        tuple(next((i for i, g in enumerate(groups) if bad in g), -1) for groups in rounds)
        for bad in range(n)
    ]
    assert len(set(failed)) == n
    assert all(set(pattern) != {-1} for pattern in failed)
    if n % k == 0 and n > k:
        assert (n // k) ** (len(rounds) - 1) < n
