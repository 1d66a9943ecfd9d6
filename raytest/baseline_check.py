"""A run against a baseline: what changed since, in results, in the environment, or in both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from raytest.baseline import Baseline, find_baseline
from raytest.compare.runs import compare_runs
from raytest.compare.verdict_json import verdict_document
from raytest.errors import NotComparableError, UsageError
from raytest.fingerprint.diff import Group, group_of
from raytest.report.environment import run_environment
from raytest.report.facts import epoch_s
from raytest.schema import Axis, RunVerdict
from raytest.store import RunFolder

MOST_NAMED = 5
PRECEDENCE = (
    RunVerdict.MISMATCH,
    RunVerdict.NOT_COMPARABLE,
    RunVerdict.INCONCLUSIVE,
    RunVerdict.PASS,
)
CODES = {
    RunVerdict.PASS: 0,
    RunVerdict.MISMATCH: 1,
    RunVerdict.INCONCLUSIVE: 3,
    RunVerdict.NOT_COMPARABLE: 4,
}


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that is not what it was; None where a side does not have it."""

    group: str
    key: str
    baseline: str | None
    run: str | None


Amend = Callable[[dict[str, Any]], dict[str, Any]]


def amender(results: str, name: str | None) -> Callable[[RunFolder], Amend | None]:
    """For a run's folder, what adds its comparison with baseline ``name`` to its document; nothing
    where ``name`` is None. Raises UsageError at once where there is no such baseline."""
    if name is None:
        return lambda _: None
    find_baseline(results, name)

    def amend(folder: RunFolder) -> Amend:
        return lambda document: with_baseline(
            document, compare_with_baseline(results, name, folder)
        )

    return amend


def environment_changes(
    before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]
) -> list[Change]:
    """Facts whose values differ, the most telling group first."""
    order = list(Group)
    found = [
        Change(group_of(key).value, key, _joined(before.get(key)), _joined(now.get(key)))
        for key in before.keys() | now.keys()
        if list(before.get(key, ())) != list(now.get(key, ()))
    ]
    return sorted(found, key=lambda c: (order.index(Group(c.group)), c.key))


def compare_with_baseline(results: str, name: str, folder: RunFolder) -> dict[str, Any]:
    """The ``baseline`` part of a verdict document: what changed since, results and environment.

    A baseline of another environment is stale: not comparable, with the results' difference beside
    the environment's. Raises UsageError where there is no such baseline.
    """
    baseline = find_baseline(results, name)
    if baseline.run_id == folder.run_id:
        raise UsageError(f"{folder.run_id} is baseline {baseline.title} itself")
    changes = environment_changes(baseline.environment, run_environment(folder))
    try:
        evaluation = compare_runs([RunFolder.open(baseline.path), folder])
        document = verdict_document(evaluation, folder.manifest)
        axis = next(a for a in document["axes"] if a["axis"] == Axis.RUN)
        verdict, reasons = RunVerdict(document["verdict"]), list(document["reasons"])
    except NotComparableError as error:
        axis, verdict, reasons = None, RunVerdict.NOT_COMPARABLE, [str(error)]
    if changes:
        verdict, reasons = RunVerdict.NOT_COMPARABLE, [_stale(baseline, changes, axis, reasons)]
    age = epoch_s(baseline.saved_at)
    return {
        "name": baseline.name,
        "number": baseline.number,
        "run_id": baseline.run_id,
        "saved_at": baseline.saved_at,
        "age_s": None if age is None else max(0.0, datetime.now(UTC).timestamp() - age),
        "stale": bool(changes),
        "verdict": verdict.value,
        "reasons": reasons,
        "environment": [
            {"group": c.group, "key": c.key, "baseline": c.baseline, "run": c.run} for c in changes
        ],
        "axis": axis,
    }


def with_baseline(document: Mapping[str, Any], compared: Mapping[str, Any]) -> dict[str, Any]:
    """A run's document judged by its baseline too: the worse verdict holds, with both's reasons."""
    own, other = RunVerdict(document["verdict"]), RunVerdict(compared["verdict"])
    worse = min(own, other, key=PRECEDENCE.index)
    title = f"baseline {compared['name']}/{compared['number']}"
    told = [r if r.startswith("baseline ") else f"{title}: {r}" for r in compared["reasons"]]
    if other is RunVerdict.PASS:
        told = []
    first = PRECEDENCE.index(other) < PRECEDENCE.index(own)
    reasons = [*told, *document["reasons"]] if first else [*document["reasons"], *told]
    return {
        **document,
        "verdict": worse.value,
        "exit_code": CODES[worse],
        "reasons": reasons,
        "baseline": dict(compared),
    }


def _stale(
    baseline: Baseline,
    changes: Sequence[Change],
    axis: Mapping[str, Any] | None,
    reasons: Sequence[str],
) -> str:
    named = [
        f"{c.key} was {_value(c.baseline)} and is {_value(c.run)}" for c in changes[:MOST_NAMED]
    ]
    if len(changes) > MOST_NAMED:
        named.append(f"and {len(changes) - MOST_NAMED} more facts")
    if axis is None:
        did = "; ".join(reasons)
    else:
        requests = axis["requests"]
        differ = requests["compared"] - requests["bitwise"]
        did = f"{differ} of {requests['compared']} requests differ from it"
    return f"baseline {baseline.title} is of another environment: {', '.join(named)}; {did}"


def _value(value: str | None) -> str:
    return "unset" if value is None else repr(value)


def _joined(values: Sequence[str] | None) -> str | None:
    return None if values is None else ", ".join(values)
