"""From a run on a real Ray with the reference engine to the variable that parts its nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import Ended, raytest

SPEC = """
name = "threads"
backend = "reference"
[model]
path = "reference"
dtype = "float32"
max_model_len = 256
[workload]
limit = 6
sampling = { max_tokens = 8, logprobs = 3 }
[determinism]
level = 1
[cluster]
devices_per_node = 2
[[cluster.nodes]]
name = "left"
env = { OMP_NUM_THREADS = "1" }
[[cluster.nodes]]
name = "right"
env = { OMP_NUM_THREADS = "2" }
[placement]
scope = "every-gpu"
[[variants]]
name = "tp1"
[gates]
node = "bitwise"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("explain")
    (folder / "s.toml").write_text(SPEC)
    return folder, raytest("run", "s.toml", "--run-id", "threads", cwd=folder)


def test_threads_that_differ_between_nodes_are_what_explains_them(
    finished: tuple[Path, Ended],
) -> None:
    folder, run = finished
    assert run.code == 1, run.err + run.out
    ended = raytest("explain", "latest", cwd=folder)
    assert ended.code == 0, ended.err
    assert "all 2 slots of class A and no other have env.OMP_NUM_THREADS 1" in ended.out
    assert "all 2 slots of class B and no other have env.OMP_NUM_THREADS 2" in ended.out
    # four slots on two nodes prove nothing, and the explanation says so
    assert "no cause is proved" in ended.out


def test_the_document_has_every_factor_that_is_confounded_with_them(
    finished: tuple[Path, Ended],
) -> None:
    folder, _ = finished
    ended = raytest("explain", "threads", "--format", "json", cwd=folder)
    document = json.loads(ended.out)
    assert document["schema"] == "raytest.explain/1"
    assert document["n_factors"] > 50
    (alike,) = document["causes"][0]["members"]
    by_name = {a["name"]: a for a in alike}
    assert alike[0]["name"] == "env.OMP_NUM_THREADS"
    assert by_name["node"]["role"] == "label"
    assert by_name["reference.threads"]["values"] == ["1", "2"]
