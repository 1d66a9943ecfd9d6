"""How long an explanation takes for 1,000 slots and 400 recorded keys (CPU seconds)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from raytest.explain.run import explain_run
from raytest.explain.tables import Explanation
from tests.support.fleet import Fleet, Values, write_fingerprints
from tests.support.make_run import RunMaker, flip_bit, inventory, plant, spec

NODES, DEVICES, KEYS, REQUESTS = 125, 8, 400, 100
RNG = np.random.default_rng(0)
BAD = {int(n) for n in RNG.choice(NODES, 20, replace=False)}
CLASSES = RNG.integers(0, 2, size=(NODES, DEVICES))


def keys() -> dict[str, Values]:
    """Most are equal everywhere or follow the node, some vary freely or name the slot."""
    facts: dict[str, Values] = {
        "driver": lambda n, d: "575.57" if n in BAD else "580",
        "env.NCCL_ALGO": lambda n, d: d % 2,
    }
    for i in range(KEYS - len(facts)):
        by_node, freely = RNG.integers(0, 3, NODES), RNG.integers(0, 2, (NODES, DEVICES))
        kinds: list[Values] = [
            lambda n, d: 0,
            lambda n, d, t=by_node: t[n],
            lambda n, d, t=freely: t[n, d],
            lambda n, d: 8 * n + d,
        ]
        facts[f"package.{i}"] = kinds[0 if i % 2 else 1 + i // 2 % 3]
    return facts


CASES: Mapping[str, tuple[Callable[[int, int], object], Mapping[str, Values]]] = {
    "one cause": (lambda n, d: int(n in BAD), {}),
    "two causes": (lambda n, d: int(n in BAD and d % 2 == 1), {}),
    "confounded": (lambda n, d: int(n in BAD), {"os.kernel": lambda n, d: int(n in BAD)}),
    "random": (lambda n, d: int(CLASSES[n, d]), {}),
    "mostly": (lambda n, d: int((n in BAD) != ((n, d) == (0, 0))), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_attribution_of_a_fleet(case: str) -> None:
    result, more = CASES[case]
    fleet = Fleet(NODES, DEVICES, {**keys(), **more}, result=result, requests=REQUESTS)
    outcomes, factors = fleet.outcomes(), fleet.factors()
    began = time.process_time()
    from raytest.explain.attribute import attribute

    found = attribute(outcomes, factors)
    sys.stdout.write(f"\n{case}: {time.process_time() - began:.2f} s of CPU: {told(found)}\n")


def test_explaining_a_run_folder(tmp_path: Path) -> None:
    bad = [f"node-{n}" for n in sorted(BAD)]
    text = "[trials]\nrepeats = 1\n"
    maker = RunMaker(
        spec(text), inventory(NODES, DEVICES), changes=[plant(flip_bit(), node=bad)], length=4
    )
    folder = maker.write(tmp_path)
    facts = keys()
    write_fingerprints(
        folder,
        lambda launch, rank: {
            k: str(of(int(launch.cell.slot.node[5:]), launch.cell.slot.devices[0].index))
            for k, of in facts.items()
        },
    )
    began = time.process_time()
    found = explain_run(folder)
    seconds = time.process_time() - began
    sys.stdout.write(f"\nfrom the folder: {seconds:.2f} s of CPU: {told(found)}\n")


def told(found: Explanation) -> str:
    sets = [[m[0].name for m in c.members] for c in (*found.causes, *found.partial)]
    return f"{found.n_slots} slots, {found.n_factors} factors: {found.conclusion} {sets}"
