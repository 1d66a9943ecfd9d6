"""Climbing the levels: one at a time, none skipped in silence, each with its price."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raytest.errors import UsageError
from raytest.explain.tighten import Climb, at_level, lines_of, price, price_spec
from tests.support.make_run import spec

GATED = '[gates]\nrepeat = "bitwise"\n'


def climb(text: str, holds_at: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A climb on the CPU with real vLLM's rules, and without any engine."""
    made = spec(text).model_copy(update={"backend": "vllm"})
    one = Climb(made, source="s", address="local", results="r", base_dir=".", tell=lambda _: None)
    gate = {"axis": "repeat", "differ": 2, "compared": 6}

    def level(number: int) -> dict[str, Any]:
        holds = number >= holds_at
        found = one._refused(number, "")
        result = "holds" if holds else "fails"
        return {**found, "supported": True, "holds": holds, "gates": [{**gate, "result": result}]}

    monkeypatch.setattr(one, "_platform", lambda: "cpu")
    monkeypatch.setattr(one, "_level", level)
    monkeypatch.setattr(one, "_prices", lambda levels: {n: price([9.0], [10.0]) for n in levels})
    monkeypatch.setattr("raytest.explain.tighten.RunFolder.open", lambda _: _Folder())
    monkeypatch.setattr("raytest.explain.tighten.write_json", lambda *_: None)
    return one.run()


class _Folder:
    path = Path("r")


def test_the_climb_ends_at_the_first_level_that_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    document = climb(GATED, 2, monkeypatch)
    assert [x["level"] for x in document["levels"]] == [1, 2]
    assert document["level"] == 2
    assert document["exit_code"] == 0


def test_levels_that_the_platform_lacks_are_said_and_what_still_differs_is_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    document = climb(GATED, 6, monkeypatch)
    assert [x["supported"] for x in document["levels"]] == [True, True, True, False, False]
    lines = lines_of(document)
    assert "level 4 (batch-invariant): not supported: vLLM has no batch-invariant" in lines[3]
    assert lines[-1] == (
        "no level suffices: at level 3, the highest supported, repeat fails (2 of 6 differ)"
    )
    assert document["exit_code"] == 1


def test_without_a_stated_gate_there_is_nothing_to_climb_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"s: gates: .*none is stated"):
        climb("", 1, monkeypatch)


def test_a_price_sets_trials_in_turn_against_each_other() -> None:
    found = price([8.0, 40.0, 9.0], [10.0, 50.0, 10.0])
    assert found is not None
    # the machine was five times faster for the second pair: that is no gain of the level
    assert (found["ratio"], found["ratio_least"], found["ratio_most"]) == (0.8, 0.8, 0.9)
    assert price([], [1.0]) is None


def test_engines_take_turns_and_never_share_the_machine() -> None:
    made = price_spec(spec(GATED), [1, 2])
    assert [(v.name, v.level, v.scope) for v in made.variants] == [
        ("level-1", 1, "one"),
        ("level-2", 2, "one"),
    ]
    assert made.limits.parallel == 1
    assert made.trials.launches > 1


def test_a_variant_with_a_level_of_its_own_climbs_too() -> None:
    text = GATED + '[[variants]]\nname = "v"\nlevel = 1\n'
    made = at_level(spec(text), 3)
    assert [made.level(v) for v in made.variants] == [3]
