"""Two traces of one request, compared part by part: what can be compared, and where it differs.

What every rank holds whole is comparable across TP sizes; slices are where the digests of all
ranks add up to the whole's; shards and the terms of an all-reduce only between equal ranks of
equal TP sizes. Pipeline stages need no care: a module has one name wherever it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raytest.engines.trace import Layout, Part, Trace

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]

Ranks = dict[int, Part]
Pair = tuple[list[Part], list[Part]]


@dataclass(frozen=True, slots=True)
class Compared:
    """One part that both sides have. ``a`` and ``b`` hold one rank's part each, or every rank's
    where digests were added up. ``positions``, ``steps`` (of side a) and ``different`` are [rows],
    ascending by position."""

    a: tuple[Part, ...]
    b: tuple[Part, ...]
    positions: Ints
    steps: Ints
    different: Bools

    @property
    def module(self) -> str:
        """The module's name."""
        return self.a[0].module

    @property
    def part(self) -> str:
        """``input``, ``partial`` or ``output``, without the number of a tuple's member."""
        return self.a[0].part.partition(".")[0]

    @property
    def place(self) -> tuple[int, int]:
        """When it happens in a forward pass: stage and order on side a."""
        return self.a[0].stage, self.a[0].order

    @property
    def rank(self) -> int | None:
        """The tensor-parallel rank; None where the ranks were added up."""
        if len(self.a) > 1 or len(self.b) > 1:
            return None
        return max(self.a[0].tensor_parallel_rank, self.b[0].tensor_parallel_rank)

    def first(self) -> tuple[int, int, int, int] | None:
        """Step, stage, order and position of the first row that differs."""
        import numpy as np

        rows = np.flatnonzero(self.different)
        if not len(rows):
            return None
        row = rows[np.lexsort((self.positions[rows], self.steps[rows]))[0]]
        return int(self.steps[row]), *self.place, int(self.positions[row])

    def differs_at(self, position: int) -> bool:
        """Whether the row of ``position`` differs."""
        return bool((self.different & (self.positions == position)).any())

    def differs_up_to(self, position: int) -> bool:
        """Whether any row up to and including ``position`` differs."""
        return bool((self.different & (self.positions <= position)).any())


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that could be compared, in execution order of side a, and what could not: reason ->
    names of parts. ``partials_a`` and ``partials_b`` are each side's terms of all-reduces, in rank
    order by module."""

    compared: list[Compared]
    skipped: dict[str, list[str]]
    partials_a: dict[str, list[Part]] = field(default_factory=dict)
    partials_b: dict[str, list[Part]] = field(default_factory=dict)

    def first(self) -> Compared | None:
        """The part that differs first: earliest step, then execution order, then position."""
        different = [(at, i) for i, c in enumerate(self.compared) if (at := c.first()) is not None]
        return self.compared[min(different)[1]] if different else None

    def of(self, module: str, part: str) -> list[Compared]:
        """What was compared of one module's ``input``, ``partial`` or ``output``."""
        return [c for c in self.compared if c.module == module and c.part == part]

    def modules(self) -> set[str]:
        """Names of the modules that could be compared."""
        return {c.module for c in self.compared}

    def positions(self) -> set[int]:
        """Positions that could be compared in at least one module."""
        return {int(p) for c in self.compared for p in c.positions}


def compare_traces(a: Trace, b: Trace) -> Comparison:
    """Compare two traces of the same tokens."""
    mine, theirs = _by_name(a.parts), _by_name(b.parts)
    compared: list[Compared] = []
    skipped: dict[str, list[str]] = {}
    for key in mine.keys() | theirs.keys():
        if key not in mine or key not in theirs:
            reason = "one side has no such tensor"
        else:
            reason, pairs = _pairs(mine[key], theirs[key])
            compared += [c for pair in pairs if (c := _compare(*pair)) is not None]
        if reason:
            skipped.setdefault(reason, []).append(" ".join(key))
    compared.sort(key=lambda c: (c.place, c.a[0].part, c.rank or 0))
    reasons = {r: sorted(skipped[r]) for r in sorted(skipped)}
    return Comparison(compared, reasons, _partials(mine), _partials(theirs))


def _partials(parts: dict[tuple[str, str], Ranks]) -> dict[str, list[Part]]:
    return {
        module: [ranks[r] for r in sorted(ranks)]
        for (module, part), ranks in parts.items()
        if part == "partial"
    }


def _by_name(parts: Iterable[Part]) -> dict[tuple[str, str], Ranks]:
    found: dict[tuple[str, str], Ranks] = {}
    for part in parts:
        found.setdefault((part.module, part.part), {})[part.tensor_parallel_rank] = part
    return found


def _pairs(mine: Ranks, theirs: Ranks) -> tuple[str, list[Pair]]:
    """Pairs to compare, or the reason why there are none."""
    parts = [*mine.values(), *theirs.values()]
    if len({p.tensor_parallel_size for p in parts}) == 1:
        both = sorted(mine.keys() & theirs.keys())
        fitting = [r for r in both if mine[r].columns == theirs[r].columns]
        reason = "" if fitting else "no rank has it on both sides, or its width differs"
        return reason, [([mine[r]], [theirs[r]]) for r in fitting]
    layouts = {p.layout for p in parts}
    if layouts <= {Layout.SLICE, Layout.WHOLE} and Layout.SLICE in layouts:
        return _added_up(mine, theirs)
    if layouts & {Layout.SHARD, Layout.SLICE, Layout.SUMMAND}:
        return "it is cut among ranks, and the TP sizes differ", []
    if len({p.columns for p in parts}) > 1:
        return "its width follows the TP size", []
    if layouts == {Layout.WHOLE}:
        return "", list(_every_rank(mine, theirs))
    if _agree(mine) and _agree(theirs):
        return "", [([mine[min(mine)]], [theirs[min(theirs)]])]
    return "its ranks hold different numbers, and the TP sizes differ", []


def _added_up(mine: Ranks, theirs: Ranks) -> tuple[str, list[Pair]]:
    sides = []
    for ranks in (mine, theirs):
        any_part = next(iter(ranks.values()))
        if any_part.layout is Layout.WHOLE:
            sides.append([ranks[min(ranks)]])
        elif len(ranks) == any_part.tensor_parallel_size:
            sides.append([ranks[r] for r in sorted(ranks)])
        else:
            return "some rank's slice is missing", []
    if len({sum(p.columns for p in side) for side in sides}) > 1:
        return "its width follows the TP size", []
    return "", [(sides[0], sides[1])]


def _every_rank(mine: Ranks, theirs: Ranks) -> Iterator[Pair]:
    """Each rank against the same rank of the other side, or its first where there is no such."""
    for rank in sorted(mine.keys() | theirs.keys()):
        yield [mine.get(rank, mine[min(mine)])], [theirs.get(rank, theirs[min(theirs)])]


def _agree(ranks: Ranks) -> bool:
    """Whether all ranks hold the same rows: then each holds the whole."""
    first, *others = (_rows([p]) for p in ranks.values())
    return all(
        (first.positions.tolist(), first.digests.tolist())
        == (o.positions.tolist(), o.digests.tolist())
        for o in others
    )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that every part has, their digests added up, and the steps of the first part."""

    positions: Ints
    steps: Ints
    digests: npt.NDArray[np.uint64]

    def at(self, positions: Ints) -> _Rows:
        import numpy as np

        where = np.searchsorted(self.positions, positions)
        return _Rows(positions, self.steps[where], self.digests[where])


def _rows(parts: list[Part]) -> _Rows:
    import numpy as np

    first, *others = (
        _Rows(p.positions.astype(np.int64), p.steps.astype(np.int64), p.digests) for p in parts
    )
    for other in others:
        common = np.intersect1d(first.positions, other.positions)
        first, other = first.at(common), other.at(common)
        with np.errstate(over="ignore"):
            first = _Rows(common, first.steps, first.digests + other.digests)
    return first


def _compare(a: list[Part], b: list[Part]) -> Compared | None:
    import numpy as np

    mine, theirs = _rows(a), _rows(b)
    at = np.intersect1d(mine.positions, theirs.positions)
    if not len(at):
        return None
    mine, theirs = mine.at(at), theirs.at(at)
    different = (mine.digests != theirs.digests).any(axis=1)
    return Compared(tuple(a), tuple(b), at, mine.steps, different)
