"""Four nights on real vLLM: a baseline, an equal night, a changed variable, a wrong result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytest.store import RunFolder, find_run
from tests.support.command import Ended, raytest
from tests.support.webhook import Hook, listening

pytestmark = pytest.mark.timeout(900)

SPEC = """
name = "night"
[model]
path = "synthetic:tiny"
dtype = "bfloat16"
max_model_len = 1024
[workload]
prompts = "builtin:long"       # a long prompt's work is split over the threads
limit = 4
sampling = { max_tokens = 8, logprobs = 5, ignore_eos = true }
[determinism]
level = 1
[cluster]
nodes = [{ devices = 2 }]
[placement]
scope = "one"
[trials]
repeats = 2
arrangements = ["solo"]
[[variants]]
name = "tp1"
env = { VLLM_ENABLE_V1_MULTIPROCESSING = "0", OMP_NUM_THREADS = "1" }
[gates]
repeat = "bitwise"
run = "bitwise"
"""
VARIABLE = 'variants.tp1.env.OMP_NUM_THREADS="2"'
WRONG = 'variants.tp1.fault={ kind = "weight_bit_flip" }'


@pytest.fixture(scope="module")
def hook() -> Iterator[Hook]:
    with listening() as server:
        yield server


@pytest.fixture(scope="module")
def nights(
    tmp_path_factory: pytest.TempPathFactory, hook: Hook
) -> list[tuple[Ended, RunFolder, int]]:
    """How each night ended, its folder, and how often the webhook had rung by then."""
    folder = tmp_path_factory.mktemp("nights")
    (folder / "s.toml").write_text(SPEC)
    found = []
    for overrides in ((), (), (VARIABLE,), (WRONG,)):
        options = [x for o in overrides for x in ("--set", o)]
        ended = raytest(
            *("nightly", "s.toml", "--baseline", "golden", "--create-baseline", "--quiet"),
            *("--webhook", hook.url, *options),
            cwd=folder,
        )
        run = RunFolder.open(find_run(folder / "results", "latest"))
        found.append((ended, run, len(hook.calls)))
    return found


def outputs(night: tuple[Ended, RunFolder, int]) -> dict[str, str]:
    ended, folder, _ = night
    names = ("report.html", "junit.xml", "verdict.json", "summary.md")
    files = {n: (folder.path / n).read_text().replace("\\", "") for n in names}
    return {"terminal": ended.out, **files}


def test_the_first_night_saves_the_baseline(nights: list[tuple[Ended, RunFolder, int]]) -> None:
    ended, _, rung = nights[0]
    assert ended.code == 0, ended.err + ended.out
    assert "saved as baseline golden/1" in ended.err
    assert rung == 0


def test_the_second_is_equal(nights: list[tuple[Ended, RunFolder, int]]) -> None:
    ended, folder, rung = nights[1]
    assert ended.code == 0, ended.err + ended.out
    document = folder.verdict()
    assert document is not None
    assert document["baseline"]["axis"]["requests"]["bitwise"] == 4
    assert rung == 0


def test_a_changed_variable_and_what_it_did_are_named_in_every_output(
    nights: list[tuple[Ended, RunFolder, int]], hook: Hook
) -> None:
    ended, folder, rung = nights[2]
    assert ended.code == 4, ended.err + ended.out
    document = folder.verdict()
    assert document is not None
    requests = document["baseline"]["axis"]["requests"]
    differ = requests["compared"] - requests["bitwise"]
    assert differ > 0, "two threads gave what one gave: this machine shows no divergence"
    for where, text in outputs(nights[2]).items():
        assert "OMP_NUM_THREADS" in text, where
        assert f"{differ} of 4 requests differ" in text or '"stale": true' in text, where
    assert rung == 1
    assert "OMP_NUM_THREADS" in json.dumps(hook.calls[0])


def test_a_wrong_result_with_the_variable_back_is_a_mismatch(
    nights: list[tuple[Ended, RunFolder, int]], hook: Hook
) -> None:
    ended, _, _ = nights[3]
    assert ended.code == 1, ended.err + ended.out
    assert "baseline golden/1" in ended.out
    assert [c["state"] for c in hook.calls] == ["not comparable", "mismatch"]


def test_a_fault_that_no_engine_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text(SPEC)
    wrong = 'variants.tp1.fault={ kind = "gremlin" }'
    ended = raytest("run", "s.toml", "--set", wrong, cwd=tmp_path)
    assert ended.code == 2
    assert "gremlin" in ended.err
    assert "weight_bit_flip" in ended.err
