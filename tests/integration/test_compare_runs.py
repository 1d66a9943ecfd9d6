"""``raytest compare`` from the command line: runs against runs, and against a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.command import REFERENCE, Ended, raytest

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace("every-node", "one")
    + """
[gates]
run = "bitwise"
[[variants]]
name = "a"
"""
)
FAULT = 'fault = { kind = "nan_row", module = "layers.1.post_attention_layernorm", request = 2 }\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs ``one`` and ``two`` are equal, ``bad`` has a fault, ``other`` has other prompts."""
    made = tmp_path_factory.mktemp("compare")
    (made / "prompts.txt").write_text("One prompt.\nAnother prompt.\n")
    texts = {
        "one": SPEC,
        "two": SPEC,
        "bad": SPEC + FAULT,
        "other": SPEC.replace("[workload]", '[workload]\nprompts = "prompts.txt"'),
    }
    for name, text in texts.items():
        (made / f"{name}.toml").write_text(text)
        ended = raytest("run", f"{name}.toml", "--run-id", name, "--quiet", cwd=made)
        assert ended.code == (1 if name == "bad" else 0), ended.err + ended.out
    return made


def compared(folder: Path, *arguments: str) -> tuple[Ended, dict[str, object]]:
    ended = raytest("compare", *arguments, "--format", "json", cwd=folder)
    document = json.loads(ended.out)
    assert document["exit_code"] == ended.code
    return ended, document


def test_two_equal_runs_pass_in_text_and_in_json(folder: Path) -> None:
    ended, document = compared(folder, "one", "two")
    assert (ended.code, document["verdict"]) == (0, "pass")
    text = raytest("compare", "one", "two", cwd=folder)
    assert text.code == 0
    assert any(line.split()[:1] == ["run"] and "bitwise" in line for line in text.out.splitlines())


def test_a_run_with_a_fault_mismatches_the_run_without(folder: Path) -> None:
    ended, document = compared(folder, "one", "bad")
    assert (ended.code, document["verdict"]) == (1, "mismatch")
    assert raytest("compare", "one", "bad", cwd=folder).code == 1


def test_runs_of_different_prompts_are_not_comparable(folder: Path) -> None:
    ended = raytest("compare", "one", "other", cwd=folder)
    assert ended.code == 4
    assert ended.out == ""
    (said,) = ended.said
    assert said.startswith("raytest: results/one and results/other: no request in common (")


def test_comparing_runs_writes_no_verdict_of_either(folder: Path) -> None:
    path = folder / "results" / "one" / "verdict.json"
    before = path.read_bytes()
    compared(folder, "one", "bad")
    assert path.read_bytes() == before


def test_a_baseline_holds_an_equal_run_and_refuses_a_changed_one(folder: Path) -> None:
    assert raytest("baseline", "save", "golden", "one", cwd=folder).code == 0
    ended, document = compared(folder, "two", "--baseline", "golden")
    assert (ended.code, document["verdict"]) == (0, "pass")
    ended, document = compared(folder, "bad", "--baseline", "golden")
    assert (ended.code, document["verdict"]) == (1, "mismatch")


def test_a_baseline_takes_one_run(folder: Path) -> None:
    ended = raytest("compare", "one", "two", "--baseline", "golden", cwd=folder)
    assert ended.code == 2
