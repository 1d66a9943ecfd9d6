"""Isolate on a real Ray with the reference engine: planted causes are named exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import REFERENCE, Ended, raytest

HARMLESS = 12
# Of the settings of b two matter, and neither is a usual suspect: both must be put right.
SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace('"every-node"', '"one"')
    + """
[gates]
variant = "bitwise"
[[variants]]
name = "a"
env = { A_ENV }
[[variants]]
name = "b"
engine = { weights_seed = 3, max_num_seqs = 128, reference_version = "1.1" }
env = { B_ENV }
[[variants]]
name = "same"
env = { B_ENV }
"""
)


def spec() -> str:
    text = SPEC
    for side in "ab":
        values = ", ".join(f'SITE_SETTING_{i} = "{side}"' for i in range(HARMLESS))
        text = text.replace(f"{side.upper()}_ENV", values)
    return text


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("isolate")
    (made / "s.toml").write_text(spec())
    ended = raytest("run", "s.toml", "--run-id", "one", cwd=made)
    assert ended.code == 1, ended.err + ended.out
    return made


def document(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_two_causes_are_named_exactly_and_a_budget_that_ran_out_is_gone_on_from(
    folder: Path,
) -> None:
    command = ("isolate", "one", "--pair", "a", "b", "--format", "json")
    planned = document(raytest(*command, "--dry-run", cwd=folder))
    assert len(planned["changes"]) == HARMLESS + 3
    assert planned["asked"] == {}
    first = raytest(*command, "--budget", "4", cwd=folder)
    assert first.code == 3, first.err
    begun = document(first)
    assert begun["finding"] == "budget spent"
    assert begun["engine_starts"] == 4
    causes = {"engine weights_seed", "engine reference_version"}
    assert causes <= {c["name"] for c in begun["cause"]}
    second = raytest(*command, cwd=folder)
    assert second.code == 0, second.err
    ended = document(second)
    assert {c["name"] for c in ended["cause"]} == causes
    assert ended["confirmed"]
    assert begun["engine_starts"] + ended["engine_starts"] == len(ended["asked"])
    third = raytest(*command[:-2], cwd=folder)
    with_, without = third.out.splitlines()[:2]
    assert with_.startswith("with engine reference_version = (unset), engine weights_seed")
    assert ": equal (" in with_
    assert ": different (" in without
    assert "0 engine starts" in third.out


def test_two_equal_cells_end_in_one_line(folder: Path) -> None:
    ended = raytest("isolate", "one", "--pair", "a", "same", cwd=folder)
    assert ended.code == 0, ended.err
    (line,) = ended.out.splitlines()
    assert line.startswith("no difference found: ")


def test_what_one_node_sets_and_the_other_does_not_is_taken_away(tmp_path: Path) -> None:
    nodes = """nodes = [
  { name = "left", env = { OMP_NUM_THREADS = "2" } },
  { name = "right", env = { OMP_NUM_THREADS = "2", VLLM_BATCH_INVARIANT = "1" } },
]"""
    text = REFERENCE.replace("nodes = 2", nodes)
    text += '[determinism]\nlevel = 1\n[[variants]]\nname = "v"\n[gates]\nnode = "may-differ"\n'
    (tmp_path / "s.toml").write_text(text)
    ran = raytest("run", "s.toml", "--run-id", "one", cwd=tmp_path)
    assert ran.code == 0, ran.err + ran.out
    pair = ("--pair", "v@left-0", "v@right-0")
    ended = raytest("isolate", "one", *pair, "--format", "json", cwd=tmp_path)
    assert ended.code == 0, ended.err + ended.out
    cause = document(ended)["cause"]
    assert cause == [{"name": "env VLLM_BATCH_INVARIANT", "a": None, "b": "1"}]
