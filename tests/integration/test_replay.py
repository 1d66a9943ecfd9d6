"""Replay on a real Ray with the reference engine: in the run, after it, and again from disk."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.command import REFERENCE, Ended, raytest

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace("every-node", "one")
    + """
[trials]
repeats = 1
replay = true
[[variants]]
name = "a"
[[variants]]
name = "same"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
[gates]
tp = "may-differ"
variant = "may-differ"
"""
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("replay")
    (folder / "s.toml").write_text(SPEC)
    return folder, raytest("run", "s.toml", "--run-id", "one", "--quiet", cwd=folder)


def replayed(folder: Path, *arguments: str) -> dict[str, dict[str, object]]:
    ended = raytest("replay", "one", "--format", "json", *arguments, cwd=folder)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["schema"] == "raytest.replay/1"
    return {cell["cell_id"].partition("@")[0]: cell for cell in document["cells"]}


def test_a_run_with_replay_scores_every_cell_and_keeps_its_verdict(
    finished: tuple[Path, Ended],
) -> None:
    folder, ended = finished
    assert ended.code == 0, ended.err + ended.out
    assert "scoring in" not in ended.err  # no engine was started for it alone
    root = folder / "results" / "one"
    assert len(list((root / "replay").glob("*.parquet"))) == 3
    assert json.loads((root / "verdict.json").read_text())["verdict"] == "pass"
    assert not list((root / "observations").rglob("*replay*"))


def test_an_equal_cell_is_bitwise_and_another_tp_size_is_not(finished: tuple[Path, Ended]) -> None:
    cells = replayed(finished[0])
    same, split = (cells[n]["against_reference"] for n in ("same", "tp2"))
    assert isinstance(same, dict)
    assert isinstance(split, dict)
    assert same["n_positions"] == split["n_positions"] > 6
    assert (same["share_bitwise"], same["max_abs"], same["k3_kl"]) == (1.0, 0.0, 0.0)
    assert split["share_bitwise"] < 1.0
    assert 0 < split["max_abs"] < 1e-3


def test_scoring_names_the_tokens_that_decoding_chose(finished: tuple[Path, Ended]) -> None:
    for cell in replayed(finished[0]).values():
        own = cell["consistency"]
        assert isinstance(own, dict)
        assert own["n_same"] == own["n_positions"] > 0
        assert own["first_other"] is None


def test_cells_without_scores_are_started_again_and_give_the_same(
    finished: tuple[Path, Ended], tmp_path: Path
) -> None:
    folder, _ = finished
    shutil.copytree(folder / "results", tmp_path / "results")
    shutil.rmtree(tmp_path / "results" / "one" / "replay")
    assert replayed(tmp_path) == replayed(folder)


def test_a_run_without_a_finished_trial_has_nothing_to_score(
    finished: tuple[Path, Ended], tmp_path: Path
) -> None:
    shutil.copytree(finished[0] / "results", tmp_path / "results")
    root = tmp_path / "results" / "one"
    shutil.rmtree(root / "replay")
    shutil.rmtree(root / "observations")
    ended = raytest("replay", "one", cwd=tmp_path)
    assert ended.code == 2
    assert ended.said == [
        "raytest: results/one: no trial has finished, so there are no tokens to score"
    ]


def test_the_decode_path_has_scores_of_its_own(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    cells = replayed(folder, "--path", "decode")
    assert cells == replayed(folder)
    kept = folder / "results" / "one" / "replay"
    assert len(list((kept / "decode").glob("*.parquet"))) == 3
    assert (kept / "replay-decode.json").exists()
