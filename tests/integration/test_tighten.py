"""Tighten and run --explain on a real Ray with the reference engine."""

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
devices_per_node = 1
[[cluster.nodes]]
name = "left"
env = { OMP_NUM_THREADS = "1", SITE_SETTING = "x" }
[[cluster.nodes]]
name = "right"
env = { OMP_NUM_THREADS = "2", SITE_SETTING = "y" }
[placement]
scope = "every-node"
[[variants]]
name = "tp1"
[gates]
node = "bitwise"
"""


def test_the_level_that_fixes_threads_is_the_cheapest_that_suffices(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SPEC)
    ended = raytest("tighten", "s.toml", "--format", "json", cwd=tmp_path)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["level"] == 2
    first, second = document["levels"]
    assert (first["level"], first["holds"]) == (1, False)
    assert [g["result"] for g in first["gates"] if g["axis"] == "node"] == ["fails"]
    assert (second["level"], second["holds"]) == (2, True)
    assert first["price"]["ratio"] == 1
    assert second["price"]["trials"] == first["price"]["trials"] > 1
    assert second["price"]["least"] <= second["price"]["tokens_per_s"] <= second["price"]["most"]


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("explained")
    (folder / "s.toml").write_text(SPEC)
    return folder, raytest("run", "s.toml", "--run-id", "one", "--explain", cwd=folder)


def test_a_failed_gate_is_followed_to_the_variable_in_terminal_and_page(
    explained: tuple[Path, Ended],
) -> None:
    folder, ended = explained
    assert ended.code == 1, ended.err
    proved = [line for line in ended.out.splitlines() if line.startswith("proved node: ")]
    assert proved[0].startswith("proved node: isolate: with env OMP_NUM_THREADS = ")
    assert "different" in proved[1]
    assert any("node: localize: " in line for line in proved)
    page = (folder / "results/one/report.html").read_text()
    assert "What running again proved" in page
    assert "node: isolate: with env OMP_NUM_THREADS = " in page
    document = json.loads((folder / "results/one/diagnosis.json").read_text())
    assert document["engine_starts"] <= document["budget"]
    assert [a["axis"] for a in document["axes"]] == ["node"]
    assert [c["name"] for c in document["axes"][0]["isolate"]["cause"]] == ["env OMP_NUM_THREADS"]
