"""When an axis is decided before the end of the plan, and what is then not needed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from raytest.compare.deciding import decided, look
from raytest.compare.evaluate import AxisResult, evaluate
from raytest.compare.gates import Contract, GateResult, judge_gate
from raytest.needs import Needs, decisions, not_needed
from raytest.schema import Axis, RunVerdict
from raytest.spec import LOOKS, Gate, Thresholds
from raytest.store import RunFolder, TrialKey
from tests.support.make_run import Change, RunMaker, inventory, plant, spec, swap_token
from tests.unit.test_gates import numbers


def result(gate: Gate, differ: int = 0, flips: int = 0, n: int = 100) -> AxisResult:
    seen = numbers(n, differ, flips, n_not_made=7)
    contract = Contract(gate, True)
    return AxisResult(Axis.GPU, contract, judge_gate(contract, seen), seen, {}, 0, None)


@pytest.mark.parametrize(
    ("gate", "differ", "flips", "expected"),
    [
        ("bitwise", 0, 0, None),
        ("bitwise", 1, 0, GateResult.FAILS),
        ("tokens", 1, 0, None),
        ("tokens", 1, 1, GateResult.FAILS),
        ("may-differ", 0, 0, GateResult.RECORDED),
        ("must-differ", 0, 0, None),
        ("must-differ", 1, 0, None),
        (Thresholds(tokens=0.9), 0, 0, None),
        (Thresholds(tokens=0.9), 11, 11, GateResult.FAILS),
        (Thresholds(max_logprob_difference=0.1), 1, 0, GateResult.FAILS),
        (Thresholds(mean_logprob_difference=1e-3), 50, 0, None),
        (Thresholds(flip_hazard=1e-6), 50, 50, None),
    ],
)
def test_between_the_looks_only_what_no_trial_can_change_is_decided(
    gate: Gate, differ: int, flips: int, expected: GateResult | None
) -> None:
    for at_look in (False, True):
        found = decided(result(gate, differ, flips), at_look=at_look)
        assert (found and found.result) == expected


@pytest.mark.parametrize(
    ("bounds", "differ", "expected"),
    [
        ({"tokens": 0.5}, 0, GateResult.HOLDS),
        ({"tokens": 0.99}, 0, None),
        ({"mean_logprob_difference": 1e-3}, 50, GateResult.FAILS),
        ({"mean_logprob_difference": 0.1}, 50, GateResult.HOLDS),
    ],
)
def test_a_statistical_gate_is_decided_at_a_look_alone(
    bounds: dict[str, float], differ: int, expected: GateResult | None
) -> None:
    gate = Thresholds(**bounds, confidence=0.95)
    assert decided(result(gate, differ), at_look=False) is None
    found = decided(result(gate, differ), at_look=True)
    assert (found and found.result) == expected


def test_nothing_compared_decides_nothing() -> None:
    assert decided(result("may-differ", n=0), at_look=True) is None


def test_the_looks_share_the_error_that_the_confidence_allows() -> None:
    text = '[trials]\nuntil = "{}"\n[gates]\ngpu = {{ tokens = 0.9, confidence = 0.9 }}\n'
    for until, confidence in (("all", 0.9), ("decided", 1 - 0.1 / LOOKS)):
        gate = spec(text.format(until)).judged_gates()[Axis.GPU]
        assert isinstance(gate, Thresholds)
        assert gate.confidence == pytest.approx(confidence)


def partly(tmp_path: Path, gates: str, trials: int, *changes: Change) -> RunFolder:
    """A run of two GPUs and four repeats, of which ``trials`` have finished on each."""
    made = spec(f'[trials]\nrepeats = 4\nuntil = "decided"\n[gates]\n{gates}\n')
    later = [(f"tp1@node-0-{gpu}", 0, t) for gpu in (0, 1) for t in range(trials, 4)]
    maker = RunMaker(made, inventory(1, 2), n_requests=6, changes=changes, skip=later)
    return maker.write(tmp_path, "run")


ONE_GPU = plant(swap_token(), slot="node-0:1", request=2)


def leave_out(folder: RunFolder, keys: set[tuple[str, int, int]]) -> None:
    for cell_id, launch, trial in sorted(keys):
        folder.event("not needed", cell_id=cell_id, launch=launch, trial=trial)


def test_a_mismatch_makes_the_rest_needless_and_nothing_is_missing(tmp_path: Path) -> None:
    folder = partly(tmp_path, 'gpu = "bitwise"\nrepeat = "may-differ"', 2, ONE_GPU)
    unneeded = look(folder)
    rest = {k for k in unneeded if k[2] >= 2}
    assert len(rest) == 4
    leave_out(folder, unneeded)
    assert not_needed(folder) == rest
    assert decisions(folder) == {"repeat": 4, "gpu": 4}
    found = evaluate(folder)
    assert found.verdict is RunVerdict.MISMATCH
    assert (found.integrity.missing_trials, found.integrity.incomplete) == ((), ())
    assert (found.coverage.n_trials_planned, found.coverage.n_trials_not_needed) == (8, 4)
    (gpu,) = (a for a in found.axes if a.axis is Axis.GPU)
    assert gpu.numbers.n_not_made == 0
    assert "decided after 4 of 8 trials, 4 were not needed" in gpu.outcome.reason


def test_an_axis_that_is_open_keeps_its_trials(tmp_path: Path) -> None:
    folder = partly(tmp_path, 'gpu = "bitwise"\nrepeat = "bitwise"', 2, ONE_GPU)
    assert look(folder) == set()
    assert decisions(folder) == {"gpu": 4}


def test_what_is_said_to_be_needless_never_makes_equality_hold(tmp_path: Path) -> None:
    folder = partly(tmp_path, 'gpu = "bitwise"\nrepeat = "bitwise"', 2)
    assert look(folder) == set()
    leave_out(folder, {(f"tp1@node-0-{gpu}", 0, t) for gpu in (0, 1) for t in (2, 3)})
    found = evaluate(folder)
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert any("4 planned trials did not run" in reason for reason in found.reasons)


def test_each_look_is_taken_once(tmp_path: Path) -> None:
    gates = "gpu = { tokens = 0.3, confidence = 0.9 }\nrepeat = { tokens = 0.3, confidence = 0.9 }"
    folder = partly(tmp_path, gates, 2)
    assert len(look(folder)) == 8
    assert len(look(folder)) == 8
    looks = [e["number"] for e in folder.events() if e["event"] == "look"]
    assert looks == [2]


def test_launches_that_finish_together_share_a_look(tmp_path: Path) -> None:
    folder = partly(tmp_path, 'gpu = "bitwise"', 2)
    looks: list[int] = []

    def slow(_: RunFolder) -> set[TrialKey]:
        looks.append(len(looks))
        time.sleep(0.05)
        return set()

    async def ask() -> None:
        needs = Needs(folder, slow)
        await asyncio.gather(*(needs.again() for _ in range(20)))

    asyncio.run(ask())
    assert len(looks) <= 2
