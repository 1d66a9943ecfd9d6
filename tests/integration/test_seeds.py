"""A rank that a seed or a variable did not reach ends its cell, and the run says which rank and
what."""

from __future__ import annotations

import json

import pytest

from raytest.store import RunFolder
from tests.support.command import REFERENCE, Ended, raytest

SPEC = (
    REFERENCE
    + """
[[variants]]
name = "tp1"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
fault = { kind = "wrong_seed", rank = 1 }
[[variants]]
name = "unset"
tensor_parallel_size = 2
env = { OMP_NUM_THREADS = "3" }
fault = { kind = "env_unset", rank = 1 }
[limits]
retries = 0
"""
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Ended]:
    path = tmp_path_factory.mktemp("seeds")
    (path / "s.toml").write_text(SPEC)
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=path)
    return RunFolder.open(path / "results" / "r"), ended


def test_the_cell_ends_with_generator_and_rank(run: tuple[RunFolder, Ended]) -> None:
    folder, ended = run
    assert ended.code == 3, ended.out + ended.err
    failures = folder.failures()
    assert {f["variant"] for f in failures} == {"tp2", "unset"}
    for failure in failures:
        if failure["variant"] == "unset":
            continue
        assert "seed audit before trial 0" in failure["reason"]
        assert "reference.numpy: rank 1 differ" in failure["reason"]


def test_a_variable_that_did_not_reach_a_rank_ends_its_cell(run: tuple[RunFolder, Ended]) -> None:
    folder, _ = run
    reasons = {f["reason"] for f in folder.failures() if f["variant"] == "unset"}
    assert reasons == {"OMP_NUM_THREADS is unset in rank 1, the spec demands '3'"}


def test_every_process_left_its_states_before_load_and_before_each_trial(
    run: tuple[RunFolder, Ended],
) -> None:
    folder, _ = run
    events = [e for e in folder.events() if str(e.get("cell_id", "")).startswith("tp1")]
    started = [e["seed_states"] for e in events if e["event"] == "started"]
    trials = [e["seed_states"] for e in events if e["event"] == "trial done"]
    assert len(started) == 2
    assert len(trials) == 4
    for states in (*started, *trials):
        assert {"actor", "rank 0"} <= set(states)
        assert {"random", "numpy", "torch"} <= set(states["actor"])
    assert len({json.dumps(s, sort_keys=True) for s in trials}) == 1
