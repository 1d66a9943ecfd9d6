"""The spine on a real two-node Ray with the reference engine: run, store, compare, verdict."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import duckdb
import psutil
import pyarrow.parquet as pq
import pytest

from raytest.store import RunFolder
from tests.support.command import REFERENCE, Ended, raytest, start

VARIANTS = """
[[variants]]
name = "tp1"
launches = 2
[[variants]]
name = "tp2"
tensor_parallel_size = 2
[[variants]]
name = "pp2"
pipeline_parallel_size = 2
[gates]
repeat = "bitwise"
launch = "bitwise"
node = "bitwise"
pp = "bitwise"
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    folder = tmp_path_factory.mktemp("main")
    (folder / "s.toml").write_text(REFERENCE + VARIANTS)
    return folder, raytest("run", "s.toml", "--run-id", "one", cwd=folder)


def test_equal_work_passes_with_exit_code_0(finished: tuple[Path, Ended]) -> None:
    _, ended = finished
    assert ended.code == 0, ended.err + ended.out
    for axis in ("repeat", "launch", "node", "pp", "tp"):
        assert axis in ended.out


def test_stdout_has_no_colour_and_stderr_no_bars_when_piped(finished: tuple[Path, Ended]) -> None:
    _, ended = finished
    assert "\x1b" not in ended.out + ended.err


def test_every_planned_row_is_there_once(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    query = f"""
        select count(*), count(distinct (cell_id, launch, trial, request_id, sample_index))
        from read_parquet('{folder}/results/one/observations/*/*.parquet')
    """
    (rows,) = duckdb.execute(query).fetchall()
    # 2 nodes x (2 launches of tp1 + tp2 + pp2) x 2 repeats x 6 requests
    assert rows == (96, 96)


def test_the_folder_joins_in_duckdb_without_raytest(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    root = folder / "results" / "one"
    query = f"""
        select count(*), min(len(token_ids)) from read_parquet('{root}/observations/*/*.parquet')
        join read_parquet('{root}/payloads/*.parquet') using (payload_id)
    """
    ((rows, shortest),) = duckdb.execute(query).fetchall()
    assert rows == 96
    assert shortest > 0


def test_equal_payloads_are_kept_once(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    paths = (folder / "results" / "one" / "payloads").glob("*.parquet")
    ids = [i for p in paths for i in pq.read_table(p).column("payload_id").to_pylist()]
    query = f"""
        select count(distinct payload_id)
        from read_parquet('{folder}/results/one/observations/*/*.parquet')
    """
    assert duckdb.execute(query).fetchall() == [(len(set(ids)),)]
    # only engines that ran their first trial side by side may have handed over the same payload
    assert len(ids) <= 2 * len(set(ids))


def test_each_worker_ran_where_it_was_planned(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    run = RunFolder.open(folder / "results" / "one")
    node_ids = {n["name"]: n["node_id"] for n in run.manifest["inventory"]["nodes"]}
    seen = {}
    for (cell_id, _, _), table in run.iter_observations(["node_id"]):
        seen.setdefault(cell_id, set()).update(table.column("node_id").to_pylist())
    planned = {c.cell_id: {node_ids[c.slot.nodes[0]]} for c in run.plan().cells}
    assert seen == planned


def test_the_verdict_is_the_one_authority(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    ended = raytest("verdict", "one", "--as", "json", cwd=folder)
    assert ended.code == 0
    assert json.loads(ended.out)["verdict"] == "pass"


def test_comparing_again_gives_the_same_judgement(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    before = RunFolder.open(folder / "results" / "one").verdict()
    again = raytest("compare", "one", "--format", "json", cwd=folder)
    assert again.code == 0
    assert before is not None
    assert json.loads(again.out)["judgement_digest"] == before["judgement_digest"]


def test_a_run_id_in_use_is_refused(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    ended = raytest("run", "s.toml", "--run-id", "one", cwd=folder)
    assert ended.code == 2
    assert "run id in use" in ended.said[-1]


def test_a_broken_gate_is_exit_code_1(tmp_path: Path) -> None:
    spec = REFERENCE.replace("nodes = 2", "nodes = 1") + VARIANTS.replace(
        'pp = "bitwise"', 'pp = "bitwise"\ntp = "bitwise"'
    ).replace('node = "bitwise"\n', "")
    (tmp_path / "s.toml").write_text(spec)
    ended = raytest("run", "s.toml", cwd=tmp_path)
    assert ended.code == 1, ended.err + ended.out
    assert raytest("verdict", "latest", cwd=tmp_path).code == 1


def test_a_users_own_prompts_run_and_a_bad_one_costs_no_other(tmp_path: Path) -> None:
    lines = [
        {"id": "good", "prompt": "Hello", "reference": "42"},
        {"id": "bad", "prompt": ""},
        {"prompt": "Again"},
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    spec = REFERENCE.replace("limit = 6", 'prompts = "mine.jsonl"')
    spec = spec.replace("nodes = 2", "nodes = 1")
    (tmp_path / "s.toml").write_text(spec + '[[variants]]\nname = "tp1"\n')
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    assert ended.code == 0, ended.err + ended.out
    folder = RunFolder.open(tmp_path / "results" / "r")
    table = folder.requests()
    errors = dict(
        zip(table.column("request_id").to_pylist(), table.column("error").to_pylist(), strict=True)
    )
    assert errors["good"] is None
    assert errors["bad"]
    assert len(errors) == 3
    # a reference answer: the text is kept, so that answers can be graded
    assert all(t.column("text").null_count == 0 for t in folder.iter_payload_tables())
    axes = (folder.verdict() or {})["axes"]
    assert {a["axis"]: a["spread"]["std_at_accuracy"] for a in axes}["repeat"] == 0.0


def test_a_worker_that_always_dies_is_named_and_the_others_finish(tmp_path: Path) -> None:
    spec = REFERENCE + (
        '[[variants]]\nname = "good"\n'
        '[[variants]]\nname = "dies"\nscope = "one"\nfault = { kind = "die_in_trial" }\n'
        '[gates]\nrepeat = "bitwise"\n'
    )
    (tmp_path / "s.toml").write_text(spec)
    ended = raytest("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    assert ended.code == 3, ended.err + ended.out
    run = RunFolder.open(tmp_path / "results" / "r")
    (failure,) = run.failures()
    assert failure["variant"] == "dies"
    assert failure["nodes"] == ["node-0"]
    assert "died" in failure["reason"].lower()
    attempts = [e for e in run.events() if e["event"] == "attempt failed"]
    assert len(attempts) == 2
    assert {k[0] for k in run.finished_trials()} == {
        c.cell_id for c in run.plan().cells if c.variant == "good"
    }
    assert "node-0" in ended.out


def test_a_worker_that_is_killed_once_is_tried_again_on_its_slot(tmp_path: Path) -> None:
    spec = REFERENCE.replace("nodes = 2", "nodes = 1") + (
        '[[variants]]\nname = "slow"\nscope = "one"\nfault = { kind = "slow", value = 0.3 }\n'
        "[trials]\nrepeats = 4\n"
    )
    (tmp_path / "s.toml").write_text(spec)
    process = start("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    pid = _wait_for(tmp_path / "results" / "r", "trial done", "pinned")["pid"]
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    run = RunFolder.open(tmp_path / "results" / "r")
    assert len(run.finished_trials()) == 4
    assert [e["attempt"] for e in run.events() if e["event"] == "attempt failed"] == [0]
    slots = {t.column("slot")[0].as_py() for _, t in run.iter_observations(["slot"])}
    assert slots == {"node-0:0"}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_is_taken_up_where_it_stopped(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    spec = REFERENCE.replace("nodes = 2", "nodes = 1") + (
        '[[variants]]\nname = "slow"\nscope = "one"\nfault = { kind = "slow", value = 0.2 }\n'
        "[trials]\nrepeats = 6\n"
    )
    (tmp_path / "s.toml").write_text(spec)
    process = start("run", "s.toml", "--run-id", "r", cwd=tmp_path)
    pid = _wait_for(tmp_path / "results" / "r", "trial done", "pinned")["pid"]
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, out + err
    assert not psutil.pid_exists(pid)
    run = RunFolder.open(tmp_path / "results" / "r")
    done = run.finished_trials()
    assert 0 < len(done) < 6
    assert run.verdict() is None
    assert raytest("verdict", "r", cwd=tmp_path).code == 3
    before = {k: (run.path / "observations" / k[0] / f"{k[1]}-{k[2]}.parquet").stat() for k in done}
    resumed = raytest("run", "s.toml", "--run-id", "r", "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err + resumed.out
    assert len(run.finished_trials()) == 6
    for key, stat in before.items():
        path = run.path / "observations" / key[0] / f"{key[1]}-{key[2]}.parquet"
        assert path.stat().st_mtime_ns == stat.st_mtime_ns


def test_a_resume_with_another_spec_is_refused(finished: tuple[Path, Ended]) -> None:
    folder, _ = finished
    ended = raytest("run", "s.toml", "--run-id", "one", "--resume", "--set", "seed=7", cwd=folder)
    assert ended.code == 2
    assert "made from another spec" in ended.said[-1]


def _wait_for(run: Path, event: str, field_of: str, timeout: float = 120) -> dict[str, object]:
    """Wait until ``event`` happened; the last event of kind ``field_of``."""
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        if (run / "manifest.json").exists():
            events = list(RunFolder.open(run).events())
            if any(e["event"] == event for e in events):
                return [e for e in events if e["event"] == field_of][-1]
        time.sleep(0.1)
    raise AssertionError(f"no event {event!r} within {timeout} s")
