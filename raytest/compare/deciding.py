"""Which trials a run still needs, where ``trials.until = "decided"``.

An axis is decided when no further trial can change its gate's result, or when a statistical gate
was decided at a look that was fixed beforehand:

- bitwise, tokens: by the first mismatch. Equality of everything is only known at the end.
- may-differ: by the first comparison; nothing is demanded.
- must-differ: at the end.
- thresholds: a bound on what can only get worse with more trials (:data:`MONOTONE`) fails for good
  by its value. With ``confidence`` c the others are looked at when a quarter, a half and three
  quarters of the planned trials have finished, and at the end, each time at the level
  1 - (1 - c) / 4. By Bonferroni's inequality the chance of any wrong decision at the four looks
  together is at most 1 - c, however they depend on each other; it is the simplest of the
  alpha-spending rules (Lan & DeMets, Biometrika 70 (1983); linear spending). Without a confidence
  there is nothing to decide early.

A trial is needed as long as an axis that is not decided compares it with another.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytest.compare.axes import group_members
from raytest.compare.evaluate import AxisResult, evaluate
from raytest.compare.gates import GateResult
from raytest.compare.observed import members_of
from raytest.schema import Axis
from raytest.spec import LOOKS, Thresholds
from raytest.store import RunFolder, TrialKey

# Bounds that no further trial can make hold again: shares of requests of which every comparison
# is equal, and largest values.
MONOTONE = (
    "tokens", "bitwise", "near_tie_margin", "max_logprob_difference", "max_logit_residual_ulp",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decided:
    """One axis, how its gate came out, and why that stands."""

    axis: Axis
    result: GateResult
    reason: str


def decided(result: AxisResult, *, at_look: bool) -> Decided | None:
    """Whether the axis is decided; ``at_look``: this is one of the looks that were fixed
    beforehand."""
    gate, outcome = result.contract.gate, result.outcome
    if not result.numbers.n_comparisons:
        return None
    if isinstance(gate, Thresholds):
        return _thresholds(result, gate, at_look)
    final = {
        "bitwise": GateResult.FAILS,
        "tokens": GateResult.FAILS,
        "may-differ": GateResult.RECORDED,
    }.get(gate)
    if outcome.result is final:
        return Decided(result.axis, outcome.result, outcome.reason)
    return None


def _thresholds(result: AxisResult, gate: Thresholds, at_look: bool) -> Decided | None:
    bounds = result.outcome.bounds or {}
    results = {name: bound["result"] for name, bound in bounds.items()}
    failed = [n for n, r in results.items() if r == GateResult.FAILS.value]
    statistical = gate.confidence is not None
    if any(n in MONOTONE for n in failed) or (failed and statistical and at_look):
        return Decided(result.axis, GateResult.FAILS, result.outcome.reason)
    if statistical and at_look and set(results.values()) == {GateResult.HOLDS.value}:
        values = ", ".join(f"{name} {bound['value']:.6g}" for name, bound in bounds.items())
        return Decided(result.axis, GateResult.HOLDS, f"{values} at 1 of {LOOKS} looks")
    return None


def look(folder: RunFolder) -> set[TrialKey]:
    """Judge what is on disk, note which axes are decided by it as events of the run, and give the
    trials that no axis needs any more."""
    plan = folder.plan()
    done = len(folder.finished_trials())
    taken, known = 0, {}
    for event in folder.events():
        if event["event"] == "look":
            taken = max(taken, int(event["number"]))
        elif event["event"] == "axis decided":
            known[Axis(event["axis"])] = event
    due = LOOKS * done // max(1, plan.n_trials)
    at_look = taken < due < LOOKS
    if at_look:
        folder.event("look", number=due, trials_done=done)
    evaluation = evaluate(folder)
    for result in evaluation.axes:
        found = None if result.axis in known else decided(result, at_look=at_look)
        if found is not None:
            known[found.axis] = {}
            folder.event(
                "axis decided",
                axis=found.axis.value,
                result=found.result.value,
                reason=found.reason,
                trials_done=done,
            )
    return _unneeded(folder, [r.axis for r in evaluation.axes if r.axis not in known])


def _unneeded(folder: RunFolder, undecided: list[Axis]) -> set[TrialKey]:
    spec = folder.spec()
    members = members_of(spec, folder.plan(), 0, folder.run_id)
    needed = {
        i
        for axis in undecided
        for group in group_members(axis, members, spec).groups
        for i in group.members
    }
    return {m.key for i, m in enumerate(members) if i not in needed}
