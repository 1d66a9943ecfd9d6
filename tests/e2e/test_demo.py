"""The main job on real vLLM: two nodes, TP=1, TP=2 and PP=2, as a newcomer runs it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest

from raytest.store import RunFolder
from tests.support.command import Ended, raytest, start

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, raytest("demo", "--run-id", "demo", cwd=folder, timeout=800)


@pytest.fixture(scope="module")
def verdict(demo: tuple[Path, Ended]) -> dict[str, Any]:
    folder, ended = demo
    assert ended.code == 0, ended.out + ended.err
    document = RunFolder.open(folder / "results" / "demo").verdict()
    assert document is not None
    return document


def axis(document: dict[str, Any], name: str) -> dict[str, Any]:
    return next(a for a in document["axes"] if a["axis"] == name)


@pytest.mark.parametrize("name", ["repeat", "launch", "node", "pp"])
def test_repeats_restarts_nodes_and_pipelines_are_bitwise_equal(
    verdict: dict[str, Any], name: str
) -> None:
    found = axis(verdict, name)
    assert found["contract"] == "bitwise"
    assert found["result"] == "holds"
    requests = found["requests"]
    assert requests["compared"] == requests["bitwise"] == 12


def test_tp2_diverges_from_tp1_and_says_where(verdict: dict[str, Any]) -> None:
    found = axis(verdict, "tp")
    assert found["requests"]["tokens"] < found["requests"]["compared"]
    worst = found["worst"]
    assert worst["request_id"].startswith("builtin/")
    assert worst["position"] >= 0
    assert worst["token"] != worst["reference_token"]
    assert worst["margin"] is not None


def test_the_readmes_query_counts_divergent_requests_per_tp_size(
    demo: tuple[Path, Ended], verdict: dict[str, Any]
) -> None:
    folder, _ = demo
    query = f"""
        with o as (
          select tensor_parallel_size tp, request_id, token_digest
          from read_parquet('{folder}/results/demo/observations/*/*.parquet')
          where arrangement = 'batch' and repeat = 0 and launch = 0 and slot like 'node-0:%'
            and pipeline_parallel_size = 1)
        select b.tp, count(*) filter (where a.token_digest <> b.token_digest)
        from o a join o b using (request_id) where a.tp = 1 and b.tp > 1 group by b.tp
    """
    ((size, divergent),) = duckdb.execute(query).fetchall()
    assert size == 2
    assert divergent > 0


def test_every_rank_left_a_fingerprint_and_its_seed_states(demo: tuple[Path, Ended]) -> None:
    folder, _ = demo
    query = f"""
        select cell_id, count(distinct rank)
        from read_parquet('{folder}/results/demo/fingerprints/*.parquet')
        where key = 'seed.torch' group by cell_id
    """
    ranks = dict(duckdb.execute(query).fetchall())
    # the actor counts as rank -1
    assert {c.split("@")[0]: n for c, n in ranks.items()} == {"tp1": 2, "tp2": 3, "pp2": 3}


def test_the_same_work_with_a_stricter_contract_exits_1(tmp_path: Path) -> None:
    ended = raytest(
        "demo",
        *("--set", "cluster.nodes=1", "--set", "trials.arrangements=['batch']"),
        *("--set", "variants.tp1.launches=1", "--set", "workload.limit=6"),
        *("--set", "variants.pp2.tensor_parallel_size=2"),
        *("--set", "variants.pp2.pipeline_parallel_size=1", "--set", "variants.2.level=2"),
        *("--set", "gates={ repeat = 'bitwise', tp = 'bitwise' }"),
        cwd=tmp_path,
        timeout=600,
    )
    assert ended.code == 1, ended.out + ended.err
    assert raytest("verdict", "latest", cwd=tmp_path).code == 1


def test_a_killed_engine_is_tried_again_and_the_run_is_whole(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(
        "".join(json.dumps({"id": f"q{i}", "prompt": f"Question {i}:"}) + "\n" for i in range(4))
    )
    (tmp_path / "s.toml").write_text(
        'name = "kill"\n[model]\npath = "synthetic:tiny"\nmax_model_len = 256\n'
        '[workload]\nprompts = "mine.jsonl"\nsampling = { max_tokens = 64, ignore_eos = true }\n'
        '[[variants]]\nname = "tp2"\ntensor_parallel_size = 2\n[trials]\nrepeats = 6\n'
    )
    process = start("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    run = tmp_path / "results" / "r"
    pid = None
    for _ in range(3000):
        events = list(RunFolder.open(run).events()) if (run / "manifest.json").exists() else []
        if any(e["event"] == "trial done" for e in events):
            pid = next(e["pid"] for e in events if e["event"] == "pinned")
            break
        time.sleep(0.1)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, out + err
    folder = RunFolder.open(run)
    assert len(folder.finished_trials()) == 6
    assert sum(e["event"] == "attempt failed" for e in folder.events()) == 1
