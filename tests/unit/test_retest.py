"""Where a fault goes when its suspect is run again, from what each way of running it gave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raytest.explain.retest import Arm, conclude, majority, ways
from raytest.inventory import Inventory, Slot
from tests.support.make_run import RunMaker, inventory, plant, spec, swap_token

OWN = Arm("same devices", "n:0", 5, 5, 0.48, 1.0, 3, "")
OTHER = replace(OWN, name="other devices of the node", slot="n:1", outside=0)
SWAPPED = replace(OWN, name="same devices, ranks swapped")


@pytest.mark.parametrize(
    ("arms", "said"),
    [
        ([OWN, OTHER], "in none of 5: it follows the device"),
        ([OWN, OTHER, SWAPPED], "it follows the device"),
        ([OWN, replace(OTHER, outside=1)], "it does not follow the device"),
        ([OWN], "no other devices to tell device and node apart"),
        ([OWN, replace(OTHER, error="gone")], "no other devices"),
        ([replace(OWN, outside=0, rate_high=0.52), OTHER], "the true rate is below 52%"),
        ([replace(OWN, error="gone"), OTHER], "not told: gone"),
    ],
)
def test_the_conclusion_follows_from_the_counts(arms: list[Arm], said: str) -> None:
    assert said in conclude(arms)


def names(slots: list[tuple[str, Slot]]) -> dict[str, str]:
    return {name: slot.name for name, slot in slots}


def cells(text: str, where: Inventory) -> Any:
    return RunMaker(spec(text), where).plan


EVERY = '[placement]\nscope = "every-gpu"\n[[variants]]\nname = "v"\n'


def test_another_device_of_the_node_is_taken_and_else_another_node() -> None:
    where = inventory(2, 2)
    plan = cells(EVERY, where)
    assert names(ways(plan.cells[1].slot, plan, where)) == {
        "same devices": "node-0:1",
        "other devices of the node": "node-0:0",
    }
    where = inventory(2, 1)
    plan = cells(EVERY, where)
    assert names(ways(plan.cells[0].slot, plan, where)) == {
        "same devices": "node-0:0",
        "devices of another node": "node-1:0",
    }


def test_ranks_are_swapped_where_there_are_several() -> None:
    where = inventory(1, 4)
    plan = cells(EVERY + "tensor_parallel_size = 2\n", where)
    found = dict(ways(plan.cells[0].slot, plan, where))
    swapped = found["same devices, ranks swapped"]
    assert [d.index for d in swapped.devices] == [1, 0]
    assert {d.index for d in found["other devices of the node"].devices} == {2, 3}


def test_what_most_others_gave_is_expected_and_the_suspect_has_no_vote(tmp_path: Path) -> None:
    wrong = plant(swap_token(5), slot="node-0:0")
    split = plant(swap_token(6), slot=["node-0:1", "node-0:2"], request=1)
    maker = RunMaker(spec(EVERY), inventory(1, 5), changes=[wrong, split])
    folder = maker.write(tmp_path)
    expected = majority(folder, maker.plan, maker.plan.cells[0])
    healthy = RunMaker(spec(EVERY), inventory(1, 5)).write(tmp_path, "healthy")
    right = majority(healthy, maker.plan, maker.plan.cells[1])
    assert set(right) == {("r0", 0), ("r1", 0), ("r2", 0), ("r3", 0)}
    # of request 1 nobody can say who is right: two against two
    assert expected == {k: v for k, v in right.items() if k != ("r1", 0)}
