"""What breaks on a cluster, on a real Ray of several nodes: what is finished stays, the rest is
told with node and cause, nothing is left behind. A killed worker, signals to the driver alone and a
worker that always dies are in test_main_job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from raytest.store import RunFolder
from tests.support.command import RAYTEST, REFERENCE, environment, raytest

pytestmark = pytest.mark.timeout(300)

ONE_NODE = REFERENCE.replace("nodes = 2", "nodes = 1")
SLOW = '[[variants]]\nname = "slow"\nfault = { kind = "slow", value = 0.15 }\n'


def begin(folder: Path, spec: str, run_id: str = "r") -> subprocess.Popen[str]:
    """Start a run as the leader of a process group of its own."""
    (folder / "s.toml").write_text(spec)
    return subprocess.Popen(
        [RAYTEST, "run", "s.toml", "--run-id", run_id],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    if not (run / "manifest.json").exists():
        return []
    return [e for e in RunFolder.open(run).events() if e["event"] == kind]


def wait_for(run: Path, kind: str, n: int = 1, timeout: float = 120) -> list[dict[str, Any]]:
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        if len(found := events(run, kind)) >= n:
            return found
        time.sleep(0.05)
    raise AssertionError(f"fewer than {n} events {kind!r} within {timeout} s")


def raylet_of(pid: int) -> psutil.Process:
    """The raylet that started a worker."""
    parents = psutil.Process(pid).parents()
    return next(p for p in parents if "raylet" in p.name())


def gone(pids: list[int], timeout: float = 60) -> bool:
    began = time.monotonic()
    while time.monotonic() - began < timeout:
        if not any(psutil.pid_exists(p) for p in pids):
            return True
        time.sleep(0.1)
    return False


def judgement(folder: Path, run_id: str) -> bytes:
    """verdict.json without what names the run, its times and how long it took."""
    document = RunFolder.open(folder / "results" / run_id).verdict()
    assert document is not None
    for key in ("run", "run_ids"):
        document.pop(key, None)
    return json.dumps(document, sort_keys=True).replace(run_id, "RUN").encode()


def test_a_lost_node_costs_its_own_cells_and_no_others(tmp_path: Path) -> None:
    process = begin(tmp_path, REFERENCE + SLOW + "[trials]\nrepeats = 8\n[limits]\nplace_s = 15\n")
    run = tmp_path / "results" / "r"
    wait_for(run, "trial done", 2)
    pins = {e["cell_id"]: e["pid"] for e in wait_for(run, "pinned", 2)}
    # node-0 is the head; the other one is lost
    lost = next(cell for cell in pins if "node-1" in cell)
    raylet = raylet_of(pins[lost])
    for part in (raylet, *raylet.children(recursive=True)):
        part.kill()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, out + err
    folder = RunFolder.open(run)
    (failure,) = folder.failures()
    assert failure["cell_id"] == lost
    assert failure["nodes"] == ["node-1"]
    assert failure["reason"]
    kept = folder.finished_trials()
    assert len([k for k in kept if k[0] != lost]) == 8
    assert 0 < len([k for k in kept if k[0] == lost]) < 8
    assert "node-1" in out
    assert gone(list(pins.values()))


def test_a_driver_that_is_killed_is_resumed_to_the_same_verdict(tmp_path: Path) -> None:
    spec = ONE_NODE + SLOW + "[trials]\nrepeats = 6\n"
    process = begin(tmp_path, spec, "taken-up")
    run = tmp_path / "results" / "taken-up"
    wait_for(run, "trial done")
    pids = [e["pid"] for e in events(run, "pinned")]
    process.kill()
    process.communicate(timeout=60)
    assert gone(pids), "the driver's workers outlived it"
    done = RunFolder.open(run).finished_trials()
    assert 0 < len(done) < 6
    resumed = raytest("run", "s.toml", "--run-id", "taken-up", "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err + resumed.out
    whole = raytest("run", "s.toml", "--run-id", "whole", cwd=tmp_path)
    assert whole.code == 0, whole.err + whole.out
    assert judgement(tmp_path, "taken-up") == judgement(tmp_path, "whole")


def test_a_start_that_hangs_is_ended_and_frees_its_device(tmp_path: Path) -> None:
    spec = ONE_NODE + (
        '[[variants]]\nname = "hangs"\nscope = "one"\nfault = { kind = "hang_on_start" }\n'
        '[[variants]]\nname = "good"\nscope = "one"\n'
        "[limits]\nstart_s = 4\nretries = 1\nparallel = 1\n"
    )
    process = begin(tmp_path, spec)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, out + err
    folder = RunFolder.open(tmp_path / "results" / "r")
    (failure,) = folder.failures()
    assert failure["variant"] == "hangs"
    assert (failure["phase"], failure["kind"]) == ("loading", "time-out")
    assert "within 4 s" in failure["reason"]
    assert failure["attempt"] == 1
    slots = {e["cell_id"]: e["gpu_uuids"] for e in folder.events() if e["event"] == "pinned"}
    assert len(set(map(tuple, slots.values()))) == 1, "both variants were to share one device"
    assert {k[0] for k in folder.finished_trials()} == {c for c in slots if c.startswith("good")}
    assert gone([e["pid"] for e in folder.events() if e["event"] == "pinned"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ('{ kind = "out_of_memory" }', "out of memory"),
        ('{ kind = "die_on_start", value = "kill" }', "died"),
    ],
)
def test_an_engine_without_memory_is_told_with_node_device_and_cause(
    tmp_path: Path, fault: str, said: str
) -> None:
    spec = ONE_NODE + (
        f'[[variants]]\nname = "big"\nscope = "one"\nfault = {fault}\n[limits]\nretries = 0\n'
    )
    process = begin(tmp_path, spec)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 3, out + err
    (failure,) = RunFolder.open(tmp_path / "results" / "r").failures()
    assert said in failure["reason"].lower()
    assert failure["nodes"] == ["node-0"]
    assert failure["gpu_uuids"] == ["cpu:node-0:0"]
    assert "node-0" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_whole_group_ends_the_run_in_good_order(
    tmp_path: Path, number: signal.Signals
) -> None:
    """As Ctrl-C at a terminal and ``timeout`` do it: Ray's head must not die of it."""
    process = begin(tmp_path, ONE_NODE + SLOW + "[trials]\nrepeats = 40\n")
    run = tmp_path / "results" / "r"
    wait_for(run, "trial done")
    pids = [e["pid"] for e in events(run, "pinned")]
    os.killpg(process.pid, number)
    # Ray's own time limit, after which a run without a head would end, is 60 s
    out, err = process.communicate(timeout=45)
    assert process.returncode == 128 + number, out + err
    assert gone(pids)
    assert RunFolder.open(run).manifest["status"] in ("interrupted", "terminated")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB at ``results``."""
    folder = tmp_path / "results"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(
    tmp_path: Path, small_disk: Path
) -> None:
    spec = ONE_NODE + '[[variants]]\nname = "tp1"\nscope = "one"\n[trials]\nrepeats = 40\n'
    process = begin(tmp_path, spec)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 75, out + err
    (line,) = [x for x in err.splitlines() if x.startswith("raytest:")]
    assert "cannot be written: No space left on device; make room" in line
    assert str(small_disk) in line or "results/r" in line
    folder = RunFolder.open(small_disk / "r")
    done = folder.finished_trials()
    assert 0 < len(done) < 40
    assert sum(t.num_rows for _, t in folder.iter_observations(["request_id"])) == 6 * len(done)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    resumed = raytest("run", "s.toml", "--run-id", "r", "--resume", cwd=tmp_path)
    assert resumed.code == 0, resumed.err + resumed.out
    assert len(folder.finished_trials()) == 40
