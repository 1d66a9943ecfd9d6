"""A run that stops as soon as its gates are decided: fewer trials, and nothing is 'missing'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import REFERENCE, Ended, raytest

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace("every-node", "one")
    + """
[trials]
repeats = 8
until = "decided"
[limits]
parallel = 1
[[variants]]
name = "a"
[[variants]]
name = "b"
fault = { kind = "nan_row", module = "layers.1.post_attention_layernorm", request = 2 }
[gates]
variant = "bitwise"
repeat = "may-differ"
"""
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("adaptive")
    (folder / "s.toml").write_text(SPEC)
    return folder, raytest("run", "s.toml", "--run-id", "one", "--quiet", cwd=folder)


def test_the_first_mismatch_ends_the_run(finished: tuple[Path, Ended]) -> None:
    folder, ended = finished
    assert ended.code == 1, ended.err + ended.out
    root = folder / "results" / "one"
    trials = json.loads((root / "verdict.json").read_text())["trials"]
    assert trials["planned"] == 16
    assert trials["missing"] == []
    assert trials["ran"] == len(list((root / "observations").glob("*/*.parquet")))
    assert 0 < trials["ran"] < 16
    assert trials["not_needed"] == 16 - trials["ran"]
    assert f"trials {trials['ran']} of 16 ({trials['not_needed']} not needed)" in ended.out


def test_the_verdict_says_what_was_decided_after_how_many(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    document = json.loads((folder / "results" / "one" / "verdict.json").read_text())
    axes = {a["axis"]: a for a in document["axes"]}
    assert axes["variant"]["result"] == "fails"
    assert axes["repeat"]["result"] == "recorded"
    for axis in axes.values():
        assert axis["decided_after_trials"] <= document["trials"]["ran"]
        assert "were not needed" in axis["reason"]
    assert document["complete"]


def test_a_decided_run_that_is_taken_up_again_runs_nothing(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    root = folder / "results" / "one"
    before = json.loads((root / "verdict.json").read_text())
    ended = raytest("run", "s.toml", "--run-id", "one", "--resume", "--quiet", cwd=folder)
    assert ended.code == 1, ended.err
    after = json.loads((root / "verdict.json").read_text())
    assert after["judgement_digest"] == before["judgement_digest"]
