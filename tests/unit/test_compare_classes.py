"""Classes against a naive implementation that looks at every pair."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raytest.compare.axes import Group
from raytest.compare.classes import Classes, form_classes
from raytest.compare.observed import Observed
from raytest.schema import Axis
from tests.support.matrices import observed_of


def voting(*members: int, tokens_only: bool = False) -> Group:
    return Group(Axis.GPU, "g", members, True, tokens_only)


def referred(*members: int, tokens_only: bool = False) -> Group:
    return Group(Axis.TP, "g", members, False, tokens_only)


@st.composite
def matrices(draw: st.DrawFn) -> Observed:
    rows, columns = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    cells = st.integers(-1, 3)
    codes = draw(
        st.lists(st.lists(cells, min_size=columns, max_size=columns), min_size=rows, max_size=rows)
    )
    tokens = np.asarray(codes) // 2  # codes 0, 1 and 2, 3 share their tokens
    return observed_of(codes, tokens)


def as_sets(classes: Classes) -> set[tuple[int, int, frozenset[int]]]:
    d = classes.divergences
    return {
        (
            int(d.group[i]),
            int(d.unit[i]),
            frozenset(d.all_members[d.offsets[i] : d.offsets[i + 1]].tolist()),
        )
        for i in range(len(d.unit))
    }


@given(matrices(), st.booleans(), st.booleans())
def test_classes_agree_with_every_pair(observed: Observed, votes: bool, tokens_only: bool) -> None:
    members = tuple(range(len(observed.members)))
    group = Group(Axis.GPU, "g", members, votes, tokens_only)
    found = form_classes(observed, [group])
    codes = observed.tokens if tokens_only else observed.bitwise
    expected: set[tuple[int, int, frozenset[int]]] = set()
    comparisons = equal = not_made = 0
    for unit in range(codes.shape[1]):
        column = codes[:, unit]
        valid = [m for m in members if column[m] >= 0]
        # pair by pair: two members are of one class exactly if their codes are equal
        partition = {frozenset(b for b in valid if column[a] == column[b]) for a in valid}
        if votes:
            reference = max(partition, key=lambda c: (len(c), -min(c)), default=frozenset())
        else:
            reference = next((c for c in partition if 0 in c), frozenset())
        made = len(valid) - 1 if reference and len(valid) > 1 else 0
        not_made += len(members) - 1 - made
        if not made:
            continue
        comparisons += made
        equal += len(reference) - 1
        expected |= {(0, unit, c) for c in partition if c != reference}
    assert as_sets(found) == expected
    assert int(found.comparisons.sum()) == comparisons
    assert int(found.equal.sum()) == equal
    assert found.not_made == not_made
    assert int(found.tokens_only.sum()) == (comparisons if tokens_only else 0)


@given(matrices(), st.randoms())
def test_a_permutation_of_workers_changes_no_class(observed: Observed, random) -> None:
    order = list(range(len(observed.members)))
    random.shuffle(order)
    shuffled = observed_of(observed.bitwise[order], observed.tokens[order])
    group = voting(*range(len(order)))
    here, there = form_classes(observed, [group]), form_classes(shuffled, [group])
    for name in ("comparisons", "equal", "n_classes"):
        assert np.array_equal(getattr(here, name), getattr(there, name)), name
    # sizes agree always; who is in the reference class may change only where the vote is tied
    sizes = [
        Counter(zip(c.divergences.unit.tolist(), c.divergences.n_members.tolist(), strict=True))
        for c in (here, there)
    ]
    assert sizes[0] == sizes[1]
    named = [
        {
            (u, frozenset(translate[m] for m in members))
            for (_, u, members), tied in zip(_in_order(c), c.divergences.tied.tolist(), strict=True)
            if not tied
        }
        for c, translate in ((here, list(range(len(order)))), (there, order))
    ]
    assert named[0] == named[1]


def _in_order(classes: Classes) -> list[tuple[int, int, frozenset[int]]]:
    d = classes.divergences
    return [
        (
            int(d.group[i]),
            int(d.unit[i]),
            frozenset(d.all_members[d.offsets[i] : d.offsets[i + 1]].tolist()),
        )
        for i in range(len(d.unit))
    ]


@given(matrices())
def test_several_groups_at_once_are_the_sum_of_each_alone(observed: Observed) -> None:
    half = len(observed.members) // 2
    groups = [voting(*range(half)), referred(*range(half, len(observed.members)))]
    groups = [g for g in groups if len(g.members) > 1]
    together = form_classes(observed, groups)
    alone = [form_classes(observed, [g]) for g in groups]
    assert int(together.comparisons.sum()) == sum(int(c.comparisons.sum()) for c in alone)
    assert together.not_made == sum(c.not_made for c in alone)
    assert as_sets(together) == {
        (g, unit, members) for g, c in enumerate(alone) for _, unit, members in as_sets(c)
    }


def test_the_majority_is_the_reference_and_a_tie_is_said_to_be_one() -> None:
    found = form_classes(observed_of([[7], [3], [3]]), [voting(0, 1, 2)]).divergences
    assert (found.reference.tolist(), found.all_members.tolist()) == ([1], [0])
    assert not found.tied[0]
    tie = form_classes(observed_of([[7], [3]]), [voting(0, 1)]).divergences
    assert tie.tied[0]


def test_the_first_member_is_the_reference_where_nobody_votes() -> None:
    found = form_classes(observed_of([[7], [3], [3]]), [referred(0, 1, 2)]).divergences
    assert (found.reference.tolist(), found.all_members.tolist()) == ([0], [1, 2])


def test_without_the_reference_nothing_is_compared() -> None:
    found = form_classes(observed_of([[-1], [3], [3]]), [referred(0, 1, 2)])
    assert (int(found.comparisons.sum()), found.not_made) == (0, 2)


def test_equal_tokens_with_other_bits_are_a_divergence_with_tokens_equal() -> None:
    found = form_classes(observed_of([[2], [3]], [[1], [1]]), [voting(0, 1)])
    assert found.divergences.tokens_equal.tolist() == [True]
    assert (
        int(
            form_classes(
                observed_of([[2], [3]], [[1], [1]]), [voting(0, 1, tokens_only=True)]
            ).equal.sum()
        )
        == 1
    )


def test_no_groups_make_no_comparisons() -> None:
    found = form_classes(observed_of([[1], [1]]), [])
    assert (int(found.comparisons.sum()), len(found.divergences.unit)) == (0, 0)
