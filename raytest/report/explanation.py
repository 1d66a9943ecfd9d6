"""What explains the classes of a run: lines for people, one document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from raytest.explain.tables import Alike, Candidate, Conclusion, Explanation, Noise, Retest, Role
from raytest.report.table import printable

MOST_NAMES = 12
MOST_VALUES = 3
MOST_SETS = 4
LIKELY_BY_CHANCE = 0.05


def explanation_document(run_id: str, explanation: Explanation) -> dict[str, Any]:
    """``raytest explain --format json``; roles are named."""
    return {"schema": "raytest.explain/1", "run_id": run_id, **_plain(asdict(explanation))}


def _plain(value: Any) -> Any:
    if isinstance(value, Role):
        return value.name.lower()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def explanation_lines(run_id: str, explanation: Explanation) -> list[str]:
    """What was seen, what explains it, what cannot be told, and what would tell it."""
    e = explanation
    lines = [
        (
            f"{run_id}: {_count(e.n_workers, 'worker')} on {_count(e.n_slots, 'slot')}, "
            f"{_count(e.n_requests, 'request')}, {_count(e.n_factors, 'recorded factor')}"
        )
    ]
    if e.n_left_out:
        lines.append(f"{_count(e.n_left_out, 'worker')} without any result left out")
    if len(e.classes) > 1:
        lines.append(_classes(e))
    lines += _CONCLUSIONS[e.conclusion](e)
    if e.noise is not None:
        lines += _noise(e.noise, e.n_workers)
    elif e.repeats < 2 and e.n_workers:
        lines.append(
            "nothing was repeated: a worker whose own results vary cannot be told from one that "
            "is different (trials.repeats = 2)"
        )
    return [printable(line) for line in [*lines, *_next(run_id, e)]]


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _unit(e: Explanation) -> str:
    return "slot" if e.by_slot else "worker"


def _members(e: Explanation, index: int) -> tuple[str, ...]:
    own = e.classes[index]
    return own.slots if e.by_slot else own.workers


def _letter(index: int) -> str:
    return chr(ord("A") + index) if index < 26 else str(index + 1)


def _classes(e: Explanation) -> str:
    sizes = [
        f"{_letter(i)} {_count(len(_members(e, i)), _unit(e))}" for i in range(len(e.classes[:8]))
    ]
    more = f", and {len(e.classes) - 8} more" if len(e.classes) > 8 else ""
    vote = "no class is the majority" if e.tied else "A is the majority"
    return (
        f"{_count(e.n_divergent, 'divergent request')}; {len(e.classes)} classes of equal results: "
        f"{', '.join(sizes)}{more}; {vote}"
    )


def _equal(e: Explanation) -> list[str]:
    if not e.n_workers:
        return ["no difference to explain: nothing was observed"]
    return [
        (
            f"no difference to explain: {_count(e.n_workers, 'worker')} with equal results on "
            "every request"
        )
    ]


def _not_stable(_: Explanation) -> list[str]:
    return ["no difference between workers; their own repeats differ"]


def _cause(e: Explanation) -> list[str]:
    lines = list(_sets(e, e.causes))
    for label in e.labels[:1]:
        name = _name_of(label)
        lines.append(f"{name} separates the classes too, as a name does whatever acts through it")
    return lines


def _label(e: Explanation) -> list[str]:
    lines = list(_sets(e, e.labels))
    label = e.labels[0]
    acting = [a for member in label.members for a in member if a.role < Role.LABEL]
    lines.append(
        f"a {_name_of(label)}'s name always separates it; "
        + (
            "what acts through it is among the other factors named here"
            if acting
            else "nothing that was recorded and could act through it differs in the same way"
        )
    )
    if e.causes:
        lines.append("settings that fit as well, but so would unrelated ones:")
        lines += [f"    {line}" for line in _sets(e, e.causes)]
    return lines


def _chance(e: Explanation) -> list[str]:
    lines = ["no cause is proved: these separate the classes, but unrelated factors might as well"]
    return lines + [f"    {line}" for line in _sets(e, e.causes or e.labels)]


def _none(e: Explanation) -> list[str]:
    return [
        (
            "no cause can be named: no set of up to three recorded factors separates the classes, "
            f"short of what names each {_unit(e)}"
        )
    ]


def _partly(e: Explanation) -> list[str]:
    lines = ["no recorded factors separate the classes exactly; in part:"]
    for c in e.partial[:MOST_SETS]:
        others = _others(c.members[0])
        lines.append(
            f"    {c.members[0][0].name}: {c.requests} of {c.n_requests} divergent requests, "
            f"{100 * c.explained:.0f}% of what differs (p = {c.adjusted:.2g}){others}"
        )
    return lines


def _single(e: Explanation) -> list[str]:
    slot = e.retest.slot if e.retest else ""
    lines = [
        (
            f"one slot stands alone: {slot}; a single bad device cannot be told from chance by one "
            "partition"
        )
    ]
    alone = [_value(a, -1) for c in e.causes for m in c.members for a in m if a.role < Role.LABEL]
    if alone:
        lines.append(f"only it has {_listed(alone)}")
    if e.retest is not None:
        lines += _retest(e.retest)
    return lines


def _retest(retest: Retest) -> list[str]:
    if retest.group == 1:
        return ["to tell: run it again on the same device, and on another device of its node"]
    if not retest.rounds:
        return [
            (
                f"to tell: run it again, with the ranks of its {retest.group} devices swapped, and "
                "each device alone"
            )
        ]
    rounds = " then ".join(
        "".join("{" + ",".join(map(str, g)) + "}" for g in groups) for groups in retest.rounds
    )
    return [
        (
            "to tell: run it again, with the ranks swapped, or regroup its node's "
            f"{retest.devices} devices: {len(retest.rounds)} rounds name any single bad one"
        ),
        f"    {rounds}",
    ]


def _two(e: Explanation) -> list[str]:
    lines = [
        f"two {_unit(e)}s differ, and which is right cannot be told; what is recorded of them:"
    ]
    alike = [a for c in e.causes for m in c.members for a in m if a.role < Role.LABEL]
    lines += [
        f"    {a.name}: {' against '.join(map(_shown, a.values))}" for a in alike[:MOST_NAMES]
    ]
    if len(alike) > MOST_NAMES:
        lines.append(f"    … and {len(alike) - MOST_NAMES} more factors that differ")
    if not alike:
        lines.append("    nothing differs but what names them")
    return lines


_CONCLUSIONS = {
    Conclusion.EQUAL: _equal,
    Conclusion.NOT_STABLE: _not_stable,
    Conclusion.CAUSE: _cause,
    Conclusion.LABEL: _label,
    Conclusion.CHANCE: _chance,
    Conclusion.NONE: _none,
    Conclusion.PARTLY: _partly,
    Conclusion.SINGLE: _single,
    Conclusion.TWO: _two,
}


def _sets(e: Explanation, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Sentences of each set; sets after the first are other explanations of the same classes."""
    for number, c in enumerate(candidates[:MOST_SETS]):
        if number:
            yield "or, not to be told apart in this run:"
        yield from _sentences(e, c)
        yield from (
            f"    confounded with {m[0].name}:{_others(m)[1:]}" for m in c.members if len(m) > 1
        )
        yield f"    {_surprise(c)}"
    if len(candidates) > MOST_SETS:
        yield f"… and {len(candidates) - MOST_SETS} more sets"


def _sentences(e: Explanation, c: Candidate) -> Iterator[str]:
    """``all 6 divergent slots and no other have driver 575.57``."""
    indices = range(len(e.classes)) if e.tied else range(1, len(e.classes))
    for index in list(indices)[:8]:
        n = len(_members(e, index))
        which = f"{_unit(e)}s of class {_letter(index)}"
        if len(e.classes) == 2 and not e.tied:
            which = f"divergent {_unit(e)}s"
        values = [
            " and ".join(_value(m[0], i) for m in c.members)
            for i, level in enumerate(c.levels)
            if level.classes == (index,)
        ]
        shown = " or ".join(values[:MOST_VALUES])
        if len(values) > MOST_VALUES:
            shown += f" or one of {len(values) - MOST_VALUES} more"
        subject = f"all {n} {which}" if n > 1 else f"the one of the {which}"
        yield f"{subject} and no other {'have' if n > 1 else 'has'} {shown}"


def _value(alike: Alike, index: int) -> str:
    value = alike.values[index]
    return f"{alike.name} {_shown(value)}"


def _shown(value: str) -> str:
    return value or "(empty)"


def _others(member: Sequence[Alike]) -> str:
    """The factors that part the workers just as the first does."""
    return f", {_listed([a.name for a in member[1:]])}" if len(member) > 1 else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _name_of(c: Candidate) -> str:
    """The label of a set of which one member is a label."""
    labels = [a.name for member in c.members for a in member if a.role is Role.LABEL]
    return labels[0] if labels else c.members[0][0].name


def _surprise(c: Candidate) -> str:
    text = f"p = {c.adjusted:.2g} (whole workers permuted, corrected for all factors tried)"
    by_node = c.p_by_node if c.role < Role.LABEL else None
    if by_node is not None and by_node >= LIKELY_BY_CHANCE:
        text += (
            f"; counted by node p = {by_node:.2g}: which of the nodes' own factors it is, is "
            "not proved"
        )
    return text


def _noise(noise: Noise, n_workers: int) -> list[str]:
    lines = [
        (
            f"repeats of the same worker differ on {_count(noise.n_requests, 'request')} and "
            f"{noise.n_workers} of {n_workers} workers: no recorded factor can explain that; "
            f"as a rate, {100 * noise.rate:.2g}% of results"
        )
    ]
    for c in noise.causes[:MOST_SETS]:
        unstable = [
            " and ".join(_value(m[0], i) for m in c.members)
            for i, level in enumerate(c.levels)
            if level.classes == (1,)
        ]
        also = "".join(_others(m) for m in c.members)
        known = f"p = {c.adjusted:.2g}" + (f"; confounded with {also[2:]}" if also else "")
        have = "have" if noise.n_workers > 1 else "has"
        lines.append(
            f"all {_count(noise.n_workers, 'unstable worker')} and no other {have} "
            f"{' or '.join(unstable[:MOST_VALUES])} ({known})"
        )
    for r in noise.rates[:MOST_SETS]:
        rates = ", ".join(
            f"{100 * rate:.2g}% at {_shown(value)}"
            for value, rate in list(zip(r.values, r.rates, strict=True))[: MOST_VALUES + 1]
        )
        lines.append(f"    {r.factor}: {rates} (p = {r.adjusted:.2g})")
    return lines


def _next(run_id: str, e: Explanation) -> list[str]:
    if e.conclusion in (Conclusion.EQUAL, Conclusion.NOT_STABLE):
        return []
    if e.conclusion in (Conclusion.SINGLE, Conclusion.NONE):
        return [f"next: raytest retest {run_id}"]
    return [f"next: raytest isolate {run_id}, which proves it by re-running"]
