"""The smallest set of changes that flips an outcome, asked of an oracle as seldom as possible.
Pure.

Delta debugging (Zeller and Hildebrandt, IEEE TSE 28 (2002)) with the order of questions of
QuickXplain (Junker, AAAI 2004): a cause among n changes costs log2(n) questions where ddmin's
halves cost twice that. The end is ddmin's own: no member may be taken out (1-minimality).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Answer(StrEnum):
    """What became of a set of changes. UNSURE: repeats disagree, or nothing came back."""

    EQUAL = "equal"
    DIFFERENT = "different"
    UNSURE = "unsure"


class BudgetOverError(Exception):
    """An oracle's way to say that it may not be asked again."""


class Ending(StrEnum):
    """How a search ended.

    FOUND: ``members`` are minimal. OPEN: the budget ran out; ``members`` are the smallest set so
    far. EQUAL_ALREADY: nothing needs to be changed. NOT_ENOUGH: all changes together do not make it
    equal. UNSURE: an answer that the result rests on was not steady.
    """

    FOUND = "found"
    OPEN = "open"
    EQUAL_ALREADY = "equal already"
    NOT_ENOUGH = "not enough"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Minimal:
    """``members`` in the order given; ``undecided`` are those that may still prove needless."""

    ending: Ending
    members: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()


Oracle = Callable[[frozenset[str]], Answer]


def expected_questions(n: int) -> int:
    """Questions for one cause among ``n`` changes: none, all, the first, halving, it alone."""
    return 3 if n <= 1 else 4 + math.ceil(math.log2(n))


def ask_more(said: Sequence[bool], times: int, most: int) -> bool:
    """Whether another repeat is wanted: up to ``times``, and where the answers disagree up to
    ``most``."""
    return len(said) < times or (len(set(said)) > 1 and len(said) < most)


def verdict_of(said: Sequence[bool]) -> Answer:
    """Equal or different where at least nine tenths say so; else UNSURE."""
    equal = sum(said)
    if said and 10 * equal >= 9 * len(said):
        return Answer.EQUAL
    if said and 10 * equal <= len(said):
        return Answer.DIFFERENT
    return Answer.UNSURE


def minimal_set(changes: Sequence[str], ask: Oracle) -> Minimal:
    """The members of ``changes`` (most suspicious first) that must be made for the answer to be
    EQUAL. ``ask`` may raise :class:`BudgetOverError`; what was found until then is returned.

    An answer is remembered, and none is asked twice. Where several minimal sets exist, one is
    found: the one of the earlier changes.
    """
    return _Search(tuple(dict.fromkeys(changes)), ask).run()


class _Search:
    def __init__(self, changes: tuple[str, ...], ask: Oracle) -> None:
        self.changes = changes
        self._ask = ask
        self._known: dict[frozenset[str], Answer] = {}
        self.needed: list[str] = []
        self.open: list[str] = list(changes)

    def run(self) -> Minimal:
        try:
            return self._run()
        except BudgetOverError:
            members = self._ordered([*self.needed, *self.open])
            return Minimal(Ending.OPEN, members, self._ordered(self.open))

    def _run(self) -> Minimal:
        none = self._answer([])
        if none is not Answer.DIFFERENT:
            same = none is Answer.EQUAL
            return Minimal(Ending.EQUAL_ALREADY if same else Ending.UNSURE)
        whole = self._answer(self.changes)
        if whole is not Answer.EQUAL:
            short = whole is Answer.DIFFERENT
            return Minimal(Ending.NOT_ENOUGH if short else Ending.UNSURE, (), self.changes)
        while not self._equal(self.needed):
            self._next()
        self.open = []
        self._drop_needless()
        members = self._ordered(self.needed)
        rests = [frozenset(self.needed) - {m} for m in self.needed]
        unsure = any(self._known.get(r) is Answer.UNSURE for r in rests)
        return Minimal(Ending.UNSURE if unsure else Ending.FOUND, members)

    def _next(self) -> None:
        """Find one more member: the last of the shortest prefix that suffices. Those after it go
        out, for the answer is equal without them."""
        low, high = 0, len(self.open)
        first = True
        while high - low > 1:
            # the prime suspect alone, then halves
            middle = low + 1 if first and not self.needed else (low + high) // 2
            first = False
            if self._equal([*self.needed, *self.open[:middle]]):
                high = middle
                self.open = self.open[:high]
            else:
                low = middle
        self.needed.append(self.open[high - 1])
        self.open = self.open[: high - 1]

    def _drop_needless(self) -> None:
        """Where changes undo each other a member may be needless after all."""
        at = 0
        while at < len(self.needed) and len(self.needed) > 1:
            rest = [m for i, m in enumerate(self.needed) if i != at]
            if self._equal(rest):
                self.needed, at = rest, 0
            else:
                at += 1

    def _equal(self, members: Sequence[str]) -> bool:
        return self._answer(members) is Answer.EQUAL

    def _answer(self, members: Sequence[str]) -> Answer:
        key = frozenset(members)
        if key not in self._known:
            self._known[key] = self._ask(key)
        return self._known[key]

    def _ordered(self, members: Sequence[str]) -> tuple[str, ...]:
        return tuple(c for c in self.changes if c in set(members))
