"""The case that raytest grew out of: two nodes, one variable, two answers, on real vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import raytest

pytestmark = pytest.mark.timeout(900)

SPEC = """
name = "omp"
[model]
path = "synthetic:tiny"
dtype = "bfloat16"
max_model_len = 1024
[workload]
prompts = "builtin:long"       # one prompt at a time: a long one's work is split over the threads
limit = 6
sampling = { max_tokens = 16, logprobs = 5, ignore_eos = true }
[determinism]
level = 1                      # thread counts are left to the node, as people leave them
[cluster]
nodes = [
  { name = "one", devices = 1, env = { OMP_NUM_THREADS = "1", HARMLESS } },
  { name = "two", devices = 1, env = { OMP_NUM_THREADS = "2", HARMLESS } },
]
[placement]
scope = "every-node"
[trials]
repeats = 10
arrangements = ["solo"]
[[variants]]
name = "tp1"
env = { VLLM_ENABLE_V1_MULTIPROCESSING = "0" }
[gates]
repeat = "bitwise"
node = "may-differ"
"""
HARMLESS = 12


def spec() -> str:
    """Beside the variable that matters the nodes differ in a dozen that don't."""
    text = SPEC
    for node in ("one", "two"):
        harmless = ", ".join(f'SITE_SETTING_{i} = "{node}"' for i in range(HARMLESS))
        text = text.replace("HARMLESS", harmless, 1)
    return text


def axis(folder: Path, run: str, name: str) -> dict[str, Any]:
    document = json.loads((folder / "results" / run / "verdict.json").read_text())
    return next(a for a in document["axes"] if a["axis"] == name)


@pytest.fixture(scope="module")
def omp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omp")
    (folder / "s.toml").write_text(spec())
    ended = raytest("run", "s.toml", "--run-id", "apart", cwd=folder, timeout=600)
    assert ended.code == 0, ended.out + ended.err
    return folder


def test_each_node_is_equal_to_itself_over_ten_repeats(omp: Path) -> None:
    requests = axis(omp, "apart", "repeat")["requests"]
    assert requests["bitwise"] == requests["compared"] == 6


def test_the_nodes_differ_from_each_other(omp: Path) -> None:
    requests = axis(omp, "apart", "node")["requests"]
    assert requests["bitwise"] < requests["compared"] == 6


def test_the_difference_of_their_fingerprints_begins_with_the_variable(omp: Path) -> None:
    ended = raytest(
        *("fingerprint", "apart", "--diff", "tp1@one", "tp1@two", "--format", "json"), cwd=omp
    )
    first = json.loads(ended.out)["differences"][0]
    assert (first["key"], first["a"], first["b"]) == ("env.OMP_NUM_THREADS", "1", "2")


def test_with_the_variable_set_equal_the_nodes_agree_bitwise(omp: Path) -> None:
    ended = raytest(
        *("run", "s.toml", "--run-id", "equal", "--set", "trials.repeats=2"),
        *("--set", 'variants.tp1.env.OMP_NUM_THREADS="1"', "--set", 'gates.node="bitwise"'),
        cwd=omp,
        timeout=600,
    )
    assert ended.code == 0, ended.out + ended.err
    requests = axis(omp, "equal", "node")["requests"]
    assert requests["bitwise"] == requests["compared"] == 6


def test_isolate_names_exactly_the_variable_among_a_dozen_others_in_ten_starts(omp: Path) -> None:
    ended = raytest(
        *("isolate", "apart", "--budget", "10", "--format", "json"), cwd=omp, timeout=500
    )
    assert ended.code == 0, ended.out + ended.err
    document = json.loads(ended.out)
    assert len(document["changes"]) > HARMLESS
    assert document["cause"] in (
        [{"name": "env OMP_NUM_THREADS", "a": "1", "b": "2"}],
        [{"name": "env OMP_NUM_THREADS", "a": "2", "b": "1"}],
    )
    assert document["confirmed"]
    assert document["engine_starts"] <= 10
    assert [line.split(":")[1].split(" (")[0] for line in document["recipe"]] == [
        " equal",
        " different",
    ]


def test_tighten_names_the_level_that_fixes_threads_and_its_price(omp: Path) -> None:
    ended = raytest(
        *("tighten", "s.toml", "--set", 'gates.node="bitwise"', "--set", "trials.repeats=2"),
        *("--format", "json"),
        cwd=omp,
        timeout=550,
    )
    assert ended.code == 0, ended.out + ended.err
    document = json.loads(ended.out)
    assert [(x["level"], x["holds"]) for x in document["levels"]] == [(1, False), (2, True)]
    assert document["level"] == 2
    for entry in document["levels"]:
        assert entry["price"]["least"] > 0
        assert entry["price"]["trials"] == 6
