"""Localize on real vLLM: TP=1 against TP=2, and against a pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.support.command import Ended, raytest

pytestmark = pytest.mark.timeout(1200)

SPEC = """
name = "localize"
seed = 42
[model]
path = "synthetic:tiny"
dtype = "bfloat16"
max_model_len = 512
[workload]
prompts = "builtin:mixed"
limit = 3
sampling = { temperature = 0.0, max_tokens = 12, logprobs = 5 }
[determinism]
level = 3
[cluster]
nodes = 1
devices_per_node = 2
[placement]
scope = "one"
[[variants]]
name = "tp1"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
[[variants]]
name = "pp2"
pipeline_parallel_size = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("localize")
    (made / "s.toml").write_text(SPEC)
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=made, timeout=900)
    assert ended.code in (0, 1), ended.err
    return made


def localize(folder: Path, a: str, b: str) -> dict[str, Any]:
    ended: Ended = raytest(
        "localize", "r", "--pair", a, b, "--format", "json", cwd=folder, timeout=900
    )
    assert ended.code == 0, ended.err
    document: dict[str, Any] = json.loads(ended.out)
    assert document["schema"] == "raytest.localize/1"
    # hooks changed no bit of what the run had given without them
    assert document["reproduced"] == {"a": True, "b": True}
    assert document["notes"] == []
    return document


def test_tp1_against_tp2_ends_in_the_first_row_parallel_product(folder: Path) -> None:
    found = localize(folder, "tp1", "tp2")
    assert found["finding"] == "found"
    assert found["module"] == "model.layers.0.self_attn.o_proj"
    assert found["operation"] == "row-parallel product after its all-reduce"
    assert (found["part"], found["layer"], found["step"]) == ("output", 0, 0)
    assert found["input_equal"] is True
    assert found["cause"] == "split"
    assert 0 < found["distance"]["n_different"] < found["distance"]["n_elements"]
    different = [g for g in found["growth"] if g["n_different"]]
    assert different[0]["module"] == "model.layers.0.self_attn.o_proj"
    assert different[-1]["relative"] > 0
    kept = Path(folder / found["folder"])
    assert {p.name for p in kept.iterdir()} == {
        "a.parquet", "b.parquet", "growth.svg", "localization.json",
    }  # fmt: skip
    trace = pq.read_table(kept / "b.parquet")
    assert set(trace.column("rank").to_pylist()) == {0, 1}
    assert set(trace.column("part").to_pylist()) >= {"input", "partial", "output"}


def test_a_pipeline_is_equal_to_one_engine_in_every_module(folder: Path) -> None:
    found = localize(folder, "tp1", "pp2")
    assert found["finding"] == "no difference found"
    # four layers of 13 modules, the embedding, the norm, the logits and the output product
    assert found["modules_compared"] >= 4 * 13 + 4
    assert found["not_compared"] == {}
