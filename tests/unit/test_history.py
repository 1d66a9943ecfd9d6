"""Runs over time: habits of axes, GPUs that come back, retention, and a page."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from raytest.baseline import find_baseline, save_baseline
from raytest.cli import cli
from raytest.driver import SILENT_S, is_abandoned, this_driver
from raytest.history import axis_trends, gpu_trends, read_history
from raytest.report.trend import history_document, history_html, history_lines
from raytest.retention import collect
from raytest.store import RunFolder
from tests.support.html_page import Page
from tests.support.judged import write_judged
from tests.support.make_run import plant, swap_token

SPEC = '[placement]\nscope = "every-gpu"\n[gates]\ngpu = "bitwise"\n'
WRONG = plant(swap_token(5), slot="node-0:1", request=range(6))


def night(results: Path, day: int, *, wrong: bool = False, **options: Any) -> RunFolder:
    began = f"2026-12-{day:02d}T01:00:00+00:00"
    ended = f"2026-12-{day:02d}T01:10:00+00:00"
    defaults = {"text": SPEC, "nodes": 1, "devices": 6, "n_requests": 8, "length": 12}
    changes = [WRONG] if wrong else []
    merged = {**defaults, "changes": changes, **options}
    return write_judged(results, f"night-{day:02d}", began=began, ended=ended, **merged)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("history")
    for day, wrong in enumerate([False, True, False, True], start=1):
        night(root, day, wrong=wrong)
    moved = json.loads((root / "night-04" / "manifest.json").read_text())
    for cell in moved["plan"]["cells"]:
        for device in cell["slot"]["devices"]:
            device["serial"] = f"165{device['index']}"
    moved["inventory"] = {"nodes": [{"name": "node-0", "hostname": "other-host"}]}
    (root / "night-04" / "manifest.json").write_text(json.dumps(moved))
    (root / "broken").mkdir()
    (root / "broken" / "manifest.json").write_text("{")
    return root


def test_runs_come_oldest_first_with_verdict_rate_and_duration(results: Path) -> None:
    points, _ = read_history(str(results))
    assert [p.run_id for p in points] == [f"night-0{i}" for i in range(1, 5)]
    assert [p.verdict for p in points] == ["pass", "mismatch", "pass", "mismatch"]
    assert [p.duration_s for p in points] == [600.0] * 4
    assert [p.axes["gpu"].rate for p in points] == [0, 0.75, 0, 0.75]


def test_a_flaky_axis_is_told_from_a_steady_one(results: Path) -> None:
    points, _ = read_history(str(results))
    kinds = {t.axis: (t.kind, t.n_failed, t.n_runs) for t in axis_trends(points)}
    assert kinds["gpu"] == ("flaky", 2, 4)
    assert kinds["repeat"] == ("steady", 0, 4)


@pytest.mark.parametrize(
    ("fails", "kind"),
    [
        ([0, 0, 1, 1], "broken"),
        ([1, 1, 1], "broken"),
        ([1, 1, 0], "mended"),
        ([0, 1, 0], "flaky"),
        ([0, 1, 0, 1], "flaky"),
        ([0, 0], "steady"),
        ([], "open"),
    ],
)
def test_the_habit_of_an_axis(results: Path, fails: list[int], kind: str) -> None:
    from dataclasses import replace

    from raytest.history import AxisPoint

    (first, *_), _ = read_history(str(results))
    words = {0: "holds", 1: "fails"}
    points = [replace(first, axes={"gpu": AxisPoint(words[f], 0.0)}) for f in fails]
    points.append(replace(first, axes={"gpu": AxisPoint("undecided", None)}))
    assert axis_trends(points)[0].kind == kind


def test_a_gpu_is_followed_across_runs_and_hosts(results: Path) -> None:
    (trend,) = gpu_trends(*read_history(str(results)))
    assert trend.gpu_uuid == "GPU-0-1"
    assert (trend.n_suspect, trend.n_runs) == (2, 4)
    assert trend.hosts == ("node-0", "other-host")
    assert trend.last == "night-04"
    lines = history_lines(*read_history(str(results)))
    # older runs knew no serial numbers; the board is the same
    assert trend.serial == "1651"
    assert lines[-1].startswith("suspect GPU-0-1 (serial 1651): on 2 of 4 runs, on 2 hosts")


def test_text_json_and_page_say_the_same(results: Path) -> None:
    points, used = read_history(str(results))
    document = json.loads(json.dumps(history_document(points, used)))
    assert document["specs"]["t"][-1]["kind"] in ("flaky", "steady")
    page = Page(history_html(points, used))
    assert not [t for t, _ in page.tags if t == "script"]
    for word in ("night-03", "flaky", "GPU-0-1", "other-host", "10 min 00 s"):
        assert word in page.words
        assert word in json.dumps(document) or word == "10 min 00 s"


def test_the_command_prints_lines_or_one_document(results: Path) -> None:
    shown = CliRunner().invoke(cli, ["history", "--results", str(results)])
    assert shown.exit_code == 0
    assert "night-04" in shown.stdout
    printed = CliRunner().invoke(cli, ["history", "--results", str(results), "--format", "json"])
    assert json.loads(printed.stdout)["schema"] == "raytest.history/1"
    other = CliRunner().invoke(cli, ["history", "--results", str(results), "--spec", "none"])
    assert other.stdout == "no runs yet\n"


def test_an_unfinished_run_is_listed_without_a_verdict(tmp_path: Path) -> None:
    folder = night(tmp_path, 1)
    folder.remove_verdict()
    folder.write_manifest(status="deadline")
    (point,) = read_history(str(tmp_path))[0]
    assert (point.verdict, point.exit_code) == ("", None)
    assert "deadline" in history_lines([point], {})[2]


def test_three_hundred_runs_are_read_within_two_seconds(results: Path, tmp_path: Path) -> None:
    for i in range(300):
        target = tmp_path / f"run-{i}"
        target.mkdir()
        for name in ("manifest.json", "verdict.json"):
            shutil.copyfile(results / "night-02" / name, target / name)
    began = time.process_time()
    points, used = read_history(str(tmp_path))
    lines = history_lines(points, used)
    assert time.process_time() - began < 2
    assert len(points) == 300
    assert lines[-1].startswith("suspect GPU-0-1: on 300 of 300 runs")


def fleet(results: Path, days: int) -> None:
    for day in range(1, days + 1):
        night(results, day, wrong=day == 1, n_requests=2 if day > 1 else 8, devices=6)


def test_retention_keeps_the_newest_and_the_failed(tmp_path: Path) -> None:
    fleet(tmp_path, 4)
    would = collect(str(tmp_path), 2, keep_failed=True, dry_run=True)
    assert [p.name for p in would] == ["night-02"]
    assert (tmp_path / "night-02").exists()
    collect(str(tmp_path), 2, keep_failed=True, dry_run=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["night-01", "night-03", "night-04"]
    collect(str(tmp_path), 1, keep_failed=False, dry_run=False)
    assert [p.name for p in tmp_path.iterdir()] == ["night-04"]


def test_retention_leaves_runs_going_on_and_baselines(tmp_path: Path) -> None:
    fleet(tmp_path, 2)
    save_baseline(str(tmp_path), "golden", RunFolder.open(tmp_path / "night-02"), replace=False)
    RunFolder.open(tmp_path / "night-01").write_manifest(status="running", driver=this_driver())
    done = CliRunner().invoke(cli, ["gc", "--keep", "0", "--results", str(tmp_path)])
    assert done.exit_code == 0
    assert done.stdout.strip().endswith("night-02")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["baselines", "night-01"]
    assert find_baseline(str(tmp_path), "golden").run_id == "night-02"


@pytest.mark.parametrize("started", [0.0, None])
def test_a_run_whose_driver_died_is_abandoned_and_not_kept_for_ever(
    tmp_path: Path, started: float | None
) -> None:
    fleet(tmp_path, 2)
    gone = (
        {**this_driver(), "started": started}
        if started is not None
        else {**this_driver(), "pid": 2**22 + 1}
    )
    RunFolder.open(tmp_path / "night-01").write_manifest(status="running", driver=gone)
    points, _ = read_history(str(tmp_path))
    assert [p.status for p in points] == ["abandoned", "finished"]
    collect(str(tmp_path), 1, keep_failed=False, dry_run=False)
    assert [p.name for p in tmp_path.iterdir()] == ["night-02"]


def test_a_run_of_another_host_is_abandoned_after_a_week_of_silence(tmp_path: Path) -> None:
    fleet(tmp_path, 1)
    folder = RunFolder.open(tmp_path / "night-01")
    elsewhere = {**this_driver(), "hostname": "elsewhere"}
    folder.write_manifest(status="running", driver=elsewhere)
    assert not is_abandoned(folder.path, folder.manifest)
    long_ago = time.time() - SILENT_S - 60
    for path in (folder.path / "manifest.json", folder.path / "events.jsonl"):
        if path.exists():
            os.utime(path, (long_ago, long_ago))
    assert is_abandoned(folder.path, folder.manifest)
