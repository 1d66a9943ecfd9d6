"""Localize on a real Ray with the reference engine: both sides start again, and are ended."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.command import REFERENCE, raytest, start

VARIANTS = """
[trials]
arrangements = ["batch", "solo"]
[[variants]]
name = "good"
[[variants]]
name = "same"
[[variants]]
name = "bad"
fault = { kind = "nan_row", module = "layers.1.post_attention_layernorm", request = 2 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("localize")
    text = REFERENCE.replace("nodes = 2", "nodes = 1").replace("every-node", "one")
    (made / "s.toml").write_text(text + VARIANTS)
    ended = raytest("run", "s.toml", "--run-id", "one", cwd=made)
    # NaN is no result
    assert ended.code == 1, ended.err + ended.out
    return made


def test_the_module_at_fault_is_named_and_the_evidence_kept(folder: Path) -> None:
    ended = raytest("localize", "one", cwd=folder)
    assert ended.code == 0, ended.err
    assert ended.out.startswith(
        "layers.1.post_attention_layernorm is the first module whose output differs on equal "
        "input: normalisation"
    )
    (kept,) = (folder / "results" / "one" / "activations").iterdir()
    assert (kept / "growth.svg").read_text().startswith("<?xml")
    document = json.loads((kept / "localization.json").read_text())
    assert document["module"] == "layers.1.post_attention_layernorm"
    assert document["engine_starts"] == 3


def test_two_equal_cells_end_in_no_difference(folder: Path) -> None:
    ended = raytest("localize", "one", "--pair", "good", "same", "--format", "json", cwd=folder)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["finding"] == "no difference found"
    assert document["reproduced"] == {"a": True, "b": True}


def test_two_arrangements_of_one_cell_are_traced_in_one_engine(folder: Path) -> None:
    pair = ("good/batch", "good/solo")
    ended = raytest("localize", "one", "--pair", *pair, "--format", "json", cwd=folder)
    assert ended.code == 0, ended.err
    document = json.loads(ended.out)
    assert document["engine_starts"] == 1
    assert document["reproduced"] == {"a": True, "b": True}
    assert document["pair"] == ["good@node-0-0/0-0", "good@node-0-0/0-2"]


def test_an_unknown_cell_is_refused_before_anything_starts(folder: Path) -> None:
    ended = raytest("localize", "one", "--pair", "good", "goood", cwd=folder)
    assert ended.code == 2
    assert ended.out == ""
    (said,) = ended.said
    assert said.startswith("raytest: --pair goood: no such cell or variant; the run has good@")


def test_a_signal_ends_the_replay_and_its_workers(folder: Path) -> None:
    process = start("localize", "one", "--pair", "good", "bad", cwd=folder)
    assert process.stderr is not None
    for line in process.stderr:
        if "tracing" in line:
            break
    workers = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=120)
    assert process.returncode == 143
    deadline = time.monotonic() + 30
    while any(w.is_running() for w in workers) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(w.is_running() for w in workers)
