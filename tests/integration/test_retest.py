"""A bad device is run again, on a real Ray with the reference engine: the fault follows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import REFERENCE, Ended, raytest

pytestmark = pytest.mark.timeout(300)

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1")
    .replace("devices_per_node = 2", "devices_per_node = 4")
    .replace("every-node", "every-gpu")
    + """
[[variants]]
name = "tp1"
fault = { kind = "weight_bit_flip", device = "cpu:node-0:2" }
[gates]
gpu = "bitwise"
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("retest")
    (made / "s.toml").write_text(SPEC)
    ended = raytest("run", "s.toml", "--run-id", "one", cwd=made)
    assert ended.code == 1, ended.err + ended.out
    assert "raytest retest one" in ended.out
    return made


@pytest.fixture(scope="module")
def again(folder: Path) -> Ended:
    return raytest("retest", "one", "--times", "4", "--format", "json", cwd=folder)


def document(ended: Ended) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ended.out)
    return found


def test_the_fault_follows_the_device_and_has_a_rate(again: Ended) -> None:
    assert again.code == 0, again.err
    (suspect,) = document(again)["suspects"]
    assert (suspect["entity"], suspect["variant"]) == ("node-0:2", "tp1")
    own, other = suspect["arms"]
    assert (own["slot"], own["outside"], own["repeats"]) == ("node-0:2", 4, 4)
    # Clopper-Pearson of 4 in 4 and of 0 in 4, from tables
    assert own["rate_low"] == pytest.approx(0.398, abs=1e-3)
    assert other["name"] == "other devices of the node"
    assert other["slot"] != "node-0:2"
    assert (other["outside"], other["repeats"]) == (0, 4)
    assert other["rate_high"] == pytest.approx(0.602, abs=1e-3)
    assert suspect["conclusion"].endswith("it follows the device")


def test_the_first_verdict_stays_and_every_retest_is_kept(folder: Path, again: Ended) -> None:
    run = folder / "results" / "one"
    verdict = (run / "verdict.json").read_bytes()
    second = raytest("retest", "one", "--times", "2", cwd=folder)
    assert second.code == 0, second.err
    assert "it follows the device" in second.out
    assert (run / "verdict.json").read_bytes() == verdict
    assert json.loads((run / "retest" / "1.json").read_text()) == document(again)
    assert (run / "retest" / "2.json").exists()
    assert raytest("verdict", "one", cwd=folder).code == 1


def test_a_run_without_suspects_has_nothing_to_run_again(folder: Path) -> None:
    spec = SPEC.replace('fault = { kind = "weight_bit_flip", device = "cpu:node-0:2" }', "")
    (folder / "healthy.toml").write_text(spec)
    assert raytest("run", "healthy.toml", "--run-id", "two", cwd=folder).code == 0
    ended = raytest("retest", "two", cwd=folder)
    assert ended.code == 0
    assert "no suspects" in ended.out
    assert not (folder / "results" / "two" / "retest").exists()
