"""From two cells to the engines between them: what can be changed, in what order, and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytest.explain.divergence import Side
from raytest.explain.interventions import Environment, Interventions, untestable
from raytest.plan import make_plan
from raytest.spec import Spec
from tests.support.make_run import inventory, spec

NOTHING: Mapping[str, str] = {}


def between(
    text: str,
    a: tuple[int, int],
    b: tuple[int, int],
    inherited: tuple[Mapping[str, str], Mapping[str, str]] = (NOTHING, NOTHING),
    ranking: Sequence[str] = (),
) -> Interventions:
    """``a`` and ``b``: index of a cell, and of a trial."""
    made: Spec = spec(text)
    plan = make_plan(made, inventory(2, 2))
    sides = [Side(plan.cells[cell], 0, plan.trials[trial]) for cell, trial in (a, b)]
    variants = {v.name: v for v in made.variants}
    environments = [
        Environment(variants[s.cell.variant].env, own)
        for s, own in zip(sides, inherited, strict=True)
    ]
    return Interventions(made, *sides, (environments[0], environments[1]), ranking)


def names(interventions: Interventions) -> list[str]:
    return [c.name for c in interventions.changes]


def test_nodes_differ_in_placement_and_in_what_their_processes_inherit() -> None:
    own = {"OMP_NUM_THREADS": "1", "ZETA": "z"}, {"OMP_NUM_THREADS": "2", "RAY_X": "1"}
    found = between("", (0, 0), (2, 0), own)
    assert names(found) == ["env OMP_NUM_THREADS", "placement", "env ZETA"] or names(found) == [
        "env OMP_NUM_THREADS",
        "env ZETA",
        "placement",
    ]
    # b's place: what b's node lacks is set, nothing is taken away
    made = found.make(frozenset({"env ZETA"}))
    assert made.variant.env == {"OMP_NUM_THREADS": "2", "ZETA": "z"}
    assert made.unset == ()
    # a's place without ZETA: what a's node has must be taken away
    moved = found.make(frozenset({"placement"}))
    assert moved.slot.node != made.slot.node
    assert moved.variant.env == {"OMP_NUM_THREADS": "2"}
    assert moved.unset == ("ZETA",)


def test_what_explain_suspects_comes_before_what_it_does_not() -> None:
    own = {"ALPHA": "1", "ZETA": "1"}, {"ALPHA": "2", "ZETA": "2"}
    assert names(between("", (0, 0), (2, 0), own, ["env.ZETA"]))[0] == "env ZETA"


VARIANTS = """
[trials]
arrangements = ["batch", "solo"]
repeats = 1
[placement]
scope = "one"
[[variants]]
name = "a"
level = 1
engine = { block_size = 8, same = 1 }
[[variants]]
name = "b"
dtype = "float32"
engine = { same = 1, max_num_seqs = 4 }
"""


def test_settings_of_variants_are_changed_one_by_one() -> None:
    found = between(VARIANTS, (0, 0), (1, 1))
    assert set(names(found)) == {
        "level", "dtype", "engine block_size", "engine max_num_seqs", "arrangement",
    }  # fmt: skip
    none = found.make(frozenset())
    assert none.variant.engine == {"same": 1, "max_num_seqs": 4}
    assert none.trial.arrangement == "solo"
    all_made = found.make(frozenset(names(found)))
    assert all_made.variant.engine == {"same": 1, "block_size": 8}
    assert all_made.variant.level == 1
    assert all_made.trial.arrangement == "batch"


def test_facts_that_nobody_can_set_are_told_apart() -> None:
    own: tuple[dict[str, Any], dict[str, Any]] = ({"X": "1"}, {"X": "2"})
    found = between("", (0, 0), (2, 0), own)
    facts = [{"env.X": str(i), "gpu.0.serial": str(i), "os.kernel": str(i)} for i in (1, 2)]
    keys = untestable(*facts, found.changes)
    assert "env.X" not in keys
    assert {"os.kernel", "gpu[0].serial"} == set(keys)
