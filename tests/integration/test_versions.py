"""Two versions of one package, two answers, on the reference engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytest.store import RunFolder
from tests.support.command import REFERENCE, raytest

SPEC = (
    REFERENCE.replace("nodes = 2", "nodes = 1").replace('"every-node"', '"one"')
    + """
[[variants]]
name = "old"
engine = { reference_version = "1.0" }
[[variants]]
name = "new"
engine = { reference_version = "1.1" }
[trials]
repeats = 3
[gates]
repeat = "bitwise"
variant = "may-differ"
"""
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("versions")
    (path / "s.toml").write_text(SPEC)
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=path)
    assert ended.code == 0, ended.out + ended.err
    return path


def test_each_version_is_equal_to_itself_and_they_differ(folder: Path) -> None:
    document = RunFolder.open(folder / "results" / "r").verdict()
    assert document is not None
    axes: dict[str, Any] = {a["axis"]: a["requests"] for a in document["axes"]}
    assert axes["repeat"]["bitwise"] == axes["repeat"]["compared"] == 6
    assert axes["variant"]["bitwise"] < axes["variant"]["compared"] == 6


def test_the_fingerprints_name_the_version(folder: Path) -> None:
    ended = raytest("fingerprint", "r", "--diff", "old", "new", "--format", "json", cwd=folder)
    found = json.loads(ended.out)["differences"]
    telling = [d for d in found if d["group"] not in ("noise", "names and places")]
    assert ("reference.version", "1.0", "1.1") in [(d["key"], d["a"], d["b"]) for d in telling[:3]]
