"""Equality classes: per request, members with equal digests. N members cost N, not N^2 pairs; only
one pair per minority class and reference class is ever compared in detail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raytest.compare.axes import Group
from raytest.compare.observed import Observed, State

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]
    Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Divergences:
    """One entry per minority class [d], in order of group, unit and first member.

    ``reference`` and ``member`` are the classes' first members; ``all_members`` lists each class's
    members flat, ``offsets`` [d + 1]. ``tied``: the vote had no winner.
    """

    group: Ints
    unit: Ints
    reference: Ints
    member: Ints
    n_reference: Ints
    n_members: Ints
    tied: Bools
    tokens_equal: Bools
    offsets: Ints
    all_members: Ints


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes of one axis. Arrays over requests [R] count comparisons (member against
    reference).

    ``equal`` ones have no divergence, ``equal_tokens`` is how many tokens those cover.
    ``not_made``: comparisons that a missing, failed or invalid observation prevented. ``n_classes``
    [k] counts the requests of a group that have k + 1 classes.
    """

    divergences: Divergences
    comparisons: Ints
    tokens_only: Ints
    equal: Ints
    equal_tokens: Ints
    not_made: int
    n_classes: Ints
    groups_compared: Bools


def form_classes(observed: Observed, groups: Sequence[Group]) -> Classes:
    """Classes of every request in every group. A group member whose observation is not there takes
    no part, and counts as a comparison not made."""
    import numpy as np

    units = observed.state.shape[1]
    counts = np.zeros(units, dtype=np.int64)
    exposure = np.zeros(units, dtype=np.int64)
    tokens_only = np.zeros(units, dtype=np.int64)
    uniform_groups = np.zeros(len(groups), dtype=np.int64)
    not_made = 0
    rest: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    for g, group in enumerate(groups):
        rows = np.array(group.members)
        codes = (observed.tokens if group.tokens_only else observed.bitwise)[rows]
        counted = (observed.state[rows] != State.SKIPPED).all(axis=0)
        uniform = (codes == codes[0]).all(axis=0) & (codes[0] >= 0)
        n = len(rows) - 1
        counts[uniform] += n
        tokens_only[uniform] += n * group.tokens_only
        exposure[uniform] += n * observed.n_tokens[rows[0]][uniform]
        uniform_groups[g] = int(uniform.sum())
        columns = np.flatnonzero(~uniform & counted)
        if not len(columns):
            continue
        sub = codes[:, columns]
        place, column = np.nonzero(sub >= 0)
        not_made += _not_made(sub, group.voting)
        rest.append(
            (np.full(len(place), g), columns[column], place, rows[place], sub[place, column])
        )
    per_unit = _Sums(counts, tokens_only, counts.copy(), exposure)
    divergences, sizes, compared = _minorities(observed, groups, rest, per_unit)
    compared |= uniform_groups > 0
    sizes[0] += int(uniform_groups.sum())
    request = observed.request_of(np.arange(units))

    def by_request(values: Ints) -> Ints:
        sums = np.bincount(request, weights=values, minlength=observed.n_requests)
        return sums.astype(np.int64)

    return Classes(
        divergences=divergences,
        comparisons=by_request(per_unit.comparisons),
        tokens_only=by_request(per_unit.tokens_only),
        equal=by_request(per_unit.equal),
        equal_tokens=by_request(per_unit.equal_tokens),
        not_made=not_made,
        n_classes=sizes,
        groups_compared=compared,
    )


@dataclass(slots=True)
class _Sums:
    """Per unit, summed over groups."""

    comparisons: Ints
    tokens_only: Ints
    equal: Ints
    equal_tokens: Ints


def _not_made(codes: Ints, voting: bool) -> int:
    """Comparisons that cannot be made for the columns [m, n] of one group."""
    valid = codes >= 0
    possible = valid.sum(axis=0) - 1
    made = possible.clip(0) if voting else possible.clip(0) * valid[0]
    return int((len(codes) - 1) * codes.shape[1] - made.sum())


def _minorities(
    observed: Observed,
    groups: Sequence[Group],
    rest: list[tuple[Ints, Ints, Ints, Ints, Ints]],
    sums: _Sums,
) -> tuple[Divergences, Ints, Bools]:
    """Sort what is not uniform into classes, choose each reference, keep the others."""
    import numpy as np

    none = np.empty(0, dtype=np.int64)
    group, unit, place, member, code = (
        np.concatenate([none, *(r[i] for r in rest)]) for i in range(5)
    )
    order = np.lexsort((place, code, unit, group))
    group, unit, place, member, code = (x[order] for x in (group, unit, place, member, code))
    start = _starts(group, unit, code)
    size = np.diff(np.append(start, len(code)))
    voting = np.array([g.voting for g in groups], dtype=np.bool_)
    by_tokens = np.array([g.tokens_only for g in groups], dtype=np.bool_)
    c_group, c_unit, c_place = group[start], unit[start], place[start]
    # the reference class comes first: the largest where members vote, else the first member's
    preference = np.where(voting[c_group], -size, np.where(c_place == 0, -1, 0))
    rank = np.lexsort((c_place, preference, c_unit, c_group))
    c_group, c_unit, c_place = c_group[rank], c_unit[rank], c_place[rank]
    start, size, preference = start[rank], size[rank], preference[rank]
    first = _starts(c_group, c_unit)
    n = np.diff(np.append(first, len(start)))
    of = np.repeat(np.arange(len(first)), n)
    usable = voting[c_group[first]] | (c_place[first] == 0)
    total = np.add.reduceat(size, first) if len(first) else none
    usable &= total > 1
    second = np.minimum(first + 1, max(len(start) - 1, 0))
    tie = voting[c_group[first]] & (n > 1) & (size[second] == size[first])
    sizes = np.bincount(n[usable] - 1, minlength=max([1, *(len(g.members) for g in groups)]))
    compared = np.zeros(len(groups), dtype=np.bool_)
    compared[c_group[first][usable]] = True

    at = c_unit[first][usable]
    only = by_tokens[c_group[first]][usable]
    same = size[first][usable] - 1
    np.add.at(sums.comparisons, at, total[usable] - 1)
    np.add.at(sums.tokens_only, at, np.where(only, total[usable] - 1, 0))
    np.add.at(sums.equal, at, same)
    reference_of = member[start[first]]
    np.add.at(sums.equal_tokens, at, same * observed.n_tokens[reference_of[usable], at])

    minority = np.ones(len(start), dtype=np.bool_)
    minority[first] = False
    keep = np.flatnonzero(minority & usable[of])
    reference = reference_of[of[keep]]
    chosen = member[start[keep]]
    units = c_unit[keep]
    equal = observed.tokens[reference, units] == observed.tokens[chosen, units]
    offsets = np.concatenate([[0], np.cumsum(size[keep])]).astype(np.int64)
    index = np.repeat(start[keep] - offsets[:-1], size[keep]) + np.arange(offsets[-1])
    return (
        Divergences(
            group=c_group[keep],
            unit=units,
            reference=reference,
            member=chosen,
            n_reference=size[first][of[keep]],
            n_members=size[keep],
            tied=tie[of[keep]],
            tokens_equal=equal,
            offsets=offsets,
            all_members=member[index],
        ),
        sizes,
        compared,
    )


def _starts(*keys: Ints) -> Ints:
    """Where a new run of equal keys begins in sorted columns."""
    import numpy as np

    if not len(keys[0]):
        return np.empty(0, dtype=np.int64)
    change = np.zeros(len(keys[0]), dtype=np.bool_)
    change[0] = True
    for key in keys:
        change[1:] |= key[1:] != key[:-1]
    return np.flatnonzero(change)
