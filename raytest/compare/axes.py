"""Which trials are compared along an axis: groups that hold everything else equal, and what had to
be left out, with the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytest.compare.observed import Member
from raytest.plan import HELD, VARIED
from raytest.schema import Arrangement, Axis
from raytest.spec import Spec

# Runs are matched by what a plan names; node and device are free where the slots have other names.
HELD_RUN = ("variant", "slot", "launch", "arrangement", "repeat")
HELD_RUN_LOOSE = ("variant", "arrangement", "launch", "repeat")
# Among these the majority is right; along the others one value is the reference.
VOTING = (Axis.REPEAT, Axis.LAUNCH, Axis.GPU, Axis.NODE)


@dataclass(frozen=True, slots=True)
class Group:
    """Members (indices, in order) that differ along the axis alone.

    Where ``voting`` is False the first member is the reference. ``tokens_only``: logprobs were not
    asked for alike, so only tokens are comparable.
    """

    axis: Axis
    name: str
    members: tuple[int, ...]
    voting: bool
    tokens_only: bool


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of one axis, and the trials left out: reason -> how many. ``not_needed`` more did
    not run, because the run was decided without them."""

    axis: Axis
    groups: tuple[Group, ...]
    left_out: Mapping[str, int]
    not_needed: int = 0


def held_of(axis: Axis, members: Sequence[Member]) -> tuple[str, ...]:
    """Keys that are equal within a group. GPU models never vote together: bitwise equality may be
    demanded within one model only."""
    if axis is Axis.RUN:
        slots = [{m.keys["slot"] for m in members if m.run == r} for r in {m.run for m in members}]
        return HELD_RUN if set.intersection(*slots) else HELD_RUN_LOOSE
    return (*HELD[axis], "models") if axis in (Axis.GPU, Axis.NODE) else HELD[axis]


def group_members(
    axis: Axis, members: Sequence[Member], spec: Spec, held: tuple[str, ...] | None = None
) -> Grouping:
    """Form the groups of one axis. Members whose trial is not on disk stay in: their observations
    are missing, which is not the same as equal."""
    held = held_of(axis, members) if held is None else held
    varied = "run" if axis is Axis.RUN else VARIED[axis]
    rank = _rank(axis, spec)
    pools: dict[tuple[Any, ...], list[int]] = {}
    not_needed = 0
    for i, member in enumerate(members):
        if axis is not Axis.RUN and member.run:
            continue
        if not member.needed:
            not_needed += 1
            continue
        pools.setdefault(tuple(member.keys[k] for k in held), []).append(i)
    left_out: Counter[str] = Counter()
    groups: list[Group] = []
    for key, pool in pools.items():
        usable = _usable(axis, pool, members, left_out)
        usable.sort(key=lambda i: (rank(members[i]), i))
        name = " ".join(f"{k}={v}" for k, v in zip(held, key, strict=True) if k != "models")
        groups += _split(axis, name, usable, members, varied)
        if axis is Axis.RUN and len({members[i].run for i in pool}) == 1:
            left_out["trials have no partner in the other run"] += len(pool)
    if axis in (Axis.GPU, Axis.NODE):
        left_out += _across_models(members, held, varied)
    return Grouping(axis, tuple(groups), dict(sorted(left_out.items())), not_needed)


def _rank(axis: Axis, spec: Spec) -> Callable[[Member], int]:
    """The order of values along an axis; the lowest is the reference where there is one."""
    variants = [v.name for v in spec.variants]
    arrangements = sorted(spec.trials.arrangements, key=lambda a: a is not Arrangement.BATCH)
    ranks: dict[Axis, Callable[[Member], int]] = {
        Axis.TP: lambda m: m.cell.tensor_parallel_size,
        Axis.PP: lambda m: m.cell.pipeline_parallel_size,
        Axis.VARIANT: lambda m: variants.index(m.cell.variant),
        Axis.ARRANGEMENT: lambda m: arrangements.index(m.trial.arrangement),
        Axis.RUN: lambda m: m.run,
    }
    return ranks.get(axis, lambda _: 0)


def _usable(
    axis: Axis, pool: list[int], members: Sequence[Member], left_out: Counter[str]
) -> list[int]:
    if axis is Axis.ARRANGEMENT:
        usable = []
        for i in pool:
            reason = members[i].unformed if members[i].found else ""
            if reason:
                left_out[f"{members[i].trial.arrangement.value}: {reason}"] += 1
            else:
                usable.append(i)
        return usable
    if axis in (Axis.GPU, Axis.NODE):
        places = Counter(_devices(members[i]) for i in pool if members[i].found)
        same = {d for d, n in places.items() if n > 1 and d[0]}
        usable = [i for i in pool if _devices(members[i]) not in same]
        if len(usable) < len(pool):
            left_out["slots report the same devices"] += len(pool) - len(usable)
        return usable
    return list(pool)


def _devices(member: Member) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return member.gpu_uuids, tuple(d.share for d in member.cell.slot.devices)


def _split(
    axis: Axis, name: str, usable: list[int], members: Sequence[Member], varied: str
) -> list[Group]:
    """One group, or two where some members' logprobs were asked for in another way."""
    if not usable:
        return []
    reference = members[usable[0]]
    voting = axis in VOTING
    if not voting:
        value = reference.keys[varied]
        usable = [usable[0], *(i for i in usable[1:] if members[i].keys[varied] != value)]
    if len({members[i].keys[varied] for i in usable}) < 2:
        return []
    alike = [i for i in usable if members[i].logprobs == reference.logprobs]
    others = [usable[0], *(i for i in usable if members[i].logprobs != reference.logprobs)]
    split = [
        Group(axis, name, tuple(alike), voting, not reference.has_logprobs),
        Group(axis, name, tuple(others), voting, True),
    ]
    return [g for g in split if len(g.members) > 1]


def _across_models(members: Sequence[Member], held: tuple[str, ...], varied: str) -> Counter[str]:
    """Trials that have no partner of their own GPU model, but one of another."""
    free = tuple(k for k in held if k != "models")
    pools: dict[tuple[Any, ...], list[Member]] = {}
    for member in members:
        if member.run == 0:
            pools.setdefault(tuple(member.keys[k] for k in free), []).append(member)
    reasons: Counter[str] = Counter()
    for pool in pools.values():
        models = Counter(m.keys["models"] for m in pool)
        if len(models) > 1 and len({m.keys[varied] for m in pool}) > 1:
            names = ", ".join(sorted(models))
            reasons[f"GPU models differ ({names}): compared within each model only"] += len(pool)
    return reasons
