"""The smallest set that flips an outcome: known sets, several causes, flaky answers, budgets."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from hypothesis import given
from hypothesis import strategies as st

from raytest.explain.minimal import (
    Answer,
    BudgetOverError,
    Ending,
    ask_more,
    expected_questions,
    minimal_set,
    verdict_of,
)

NAMES = [f"f{i}" for i in range(16)]


class Asked:
    """An oracle that says EQUAL where every needed change is made, and counts."""

    def __init__(self, needed: Iterable[str], budget: int = 10_000) -> None:
        self.needed, self.budget = frozenset(needed), budget
        self.questions: list[frozenset[str]] = []

    def __call__(self, made: frozenset[str]) -> Answer:
        if len(self.questions) == self.budget:
            raise BudgetOverError
        self.questions.append(made)
        return Answer.EQUAL if self.needed <= made else Answer.DIFFERENT


def test_the_prime_suspect_takes_three_questions() -> None:
    asked = Asked(["f0"])
    found = minimal_set(NAMES, asked)
    assert (found.ending, found.members) == (Ending.FOUND, ("f0",))
    assert len(asked.questions) == 3


def test_one_cause_among_thirteen_is_found_within_eight_questions_wherever_it_stands() -> None:
    for name in NAMES[:13]:
        asked = Asked([name])
        assert minimal_set(NAMES[:13], asked).members == (name,)
        assert len(asked.questions) <= expected_questions(13) == 8


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=5))
def test_exactly_the_needed_changes_are_found_and_nothing_is_asked_twice(needed: set[str]) -> None:
    asked = Asked(needed)
    found = minimal_set(NAMES, asked)
    assert found.ending is Ending.FOUND
    assert set(found.members) == needed
    assert len(set(asked.questions)) == len(asked.questions)
    assert len(asked.questions) <= 3 + len(needed) * 7


@given(st.sets(st.sampled_from(NAMES), min_size=1, max_size=4), st.integers(0, 40))
def test_a_budget_that_ran_out_leaves_a_set_that_holds_every_cause(
    needed: set[str], budget: int
) -> None:
    found = minimal_set(NAMES, Asked(needed, budget))
    assert needed <= set(found.members)
    assert (found.ending is Ending.OPEN) or set(found.members) == needed
    if found.ending is Ending.OPEN:
        assert set(found.undecided) <= set(found.members)


@given(st.lists(st.sets(st.sampled_from(NAMES[:8]), min_size=1, max_size=3), min_size=1))
def test_of_several_ways_to_make_it_equal_a_minimal_one_is_found(ways: list[set[str]]) -> None:
    def ask(made: frozenset[str]) -> Answer:
        return Answer.EQUAL if any(w <= made for w in ways) else Answer.DIFFERENT

    found = minimal_set(NAMES[:8], ask)
    members = frozenset(found.members)
    assert ask(members) is Answer.EQUAL
    assert all(ask(members - {m}) is Answer.DIFFERENT for m in members)


def test_changes_that_undo_each_other_still_end_in_a_set_without_needless_members() -> None:
    # b alone makes it equal, but not beside a; a and c do too
    table = {"": False, "b": True, "ac": True, "abc": True, "ab": False, "a": False}

    def ask(made: frozenset[str]) -> Answer:
        return Answer.EQUAL if table.get("".join(sorted(made)), False) else Answer.DIFFERENT

    found = minimal_set(["a", "b", "c"], ask)
    assert ask(frozenset(found.members)) is Answer.EQUAL
    assert found.ending is Ending.FOUND


def test_equal_without_any_change_and_different_with_all_are_said() -> None:
    assert minimal_set(NAMES, Asked([])).ending is Ending.EQUAL_ALREADY
    assert minimal_set(NAMES, Asked(["elsewhere"])).ending is Ending.NOT_ENOUGH


def test_an_unsure_answer_is_never_taken_for_a_cause() -> None:
    def ask(made: frozenset[str]) -> Answer:
        if "f0" in made:
            return Answer.EQUAL
        return Answer.UNSURE if made else Answer.DIFFERENT

    assert minimal_set(NAMES, ask).members == ("f0",)
    assert minimal_set(NAMES, lambda _: Answer.UNSURE).ending is Ending.UNSURE


def steady(once: Callable[[], bool], times: int, most: int) -> Answer:
    said: list[bool] = []
    while ask_more(said, times, most):
        said.append(once())
    return verdict_of(said)


def flaky(rate: float, seed: int, truth: bool) -> Callable[[], bool]:
    rng = random.Random(seed)
    return lambda: truth if rng.random() >= rate else not truth


@given(st.integers(0, 1000))
def test_a_coin_is_not_taken_for_an_answer_more_often_than_chance_allows(seed: int) -> None:
    said = [steady(flaky(0.5, 1000 * seed + i, True), 3, 8) for i in range(40)]
    assert said.count(Answer.UNSURE) >= 20


def test_one_slip_in_ten_repeats_does_not_hide_the_answer() -> None:
    assert verdict_of([True] * 9 + [False]) is Answer.EQUAL
    assert verdict_of([False] * 9 + [True]) is Answer.DIFFERENT
    assert verdict_of([True, False]) is Answer.UNSURE
    assert verdict_of([]) is Answer.UNSURE


def test_answers_that_disagree_are_asked_on_and_those_that_agree_are_not() -> None:
    assert not ask_more([True] * 3, 3, 10)
    assert ask_more([True, False, True], 3, 10)
    assert not ask_more([True, False] * 5, 3, 10)
