"""History for people and for programs: lines, one JSON document, one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from raytest.history import AxisTrend, GpuTrend, RunPoint, axis_trends, gpu_trends
from raytest.report import charts
from raytest.report.facts import duration_words, percent
from raytest.report.page import render
from raytest.report.table import table_lines

MOST_RUNS = 30


def history_document(points: Sequence[RunPoint], used: Mapping[str, int]) -> dict[str, Any]:
    """``raytest history --format json``."""
    return {
        "schema": "raytest.history/1",
        "runs": [{**asdict(p), "path": str(p.path), "suspects": _suspects(p)} for p in points],
        "specs": {
            name: [asdict(t) for t in axis_trends(own)] for name, own in _by_name(points).items()
        },
        "gpus": [asdict(t) for t in gpu_trends(points, used)],
    }


def history_lines(points: Sequence[RunPoint], used: Mapping[str, int]) -> list[str]:
    """The latest runs, the newest last; then each axis' habit, then the suspects."""
    if not points:
        return ["no runs yet"]
    shown = points[-MOST_RUNS:]
    header = ("run", "when", "took", "verdict", "axes that differ", "suspects")
    lines = table_lines(header, [_row(p) for p in shown])
    if len(points) > len(shown):
        lines.append(f"… and {len(points) - len(shown)} older runs (--format json has them all)")
    for name, own in _by_name(points).items():
        lines += ["", *(_axis_line(name, t) for t in axis_trends(own))]
    gpus = gpu_trends(points, used)
    return [*lines, *([""] if gpus else []), *(_gpu_line(t) for t in gpus)]


def history_html(points: Sequence[RunPoint], used: Mapping[str, int]) -> str:
    """One page with a trend line per axis of each spec."""
    specs = _by_name(points)
    drawn = {}
    for i, (name, own) in enumerate(specs.items()):
        axes = list(dict.fromkeys(a for p in own for a in p.axes))
        rates = {a: [p.axes[a].rate if a in p.axes else None for p in own] for a in axes}
        runs = [p.run_id for p in own]
        drawn[f"rate-{i}"] = charts.trend(runs, rates, f"rate-{i}", f"{name}: share that differs")
        times = {"duration": [p.duration_s for p in own]}
        drawn[f"time-{i}"] = charts.trend(runs, times, f"time-{i}", f"{name}: seconds a run takes")
    return render(
        "history.html",
        points=list(reversed(points)),
        rows={p.run_id: _row(p) for p in points},
        specs=[(name, axis_trends(own)) for name, own in specs.items()],
        gpus=gpu_trends(points, used),
        charts=drawn,
    )


def _by_name(points: Sequence[RunPoint]) -> dict[str, list[RunPoint]]:
    found: dict[str, list[RunPoint]] = {}
    for p in points:
        found.setdefault(p.name, []).append(p)
    return found


def _row(point: RunPoint) -> tuple[str, ...]:
    differ = [
        f"{axis} {percent(a.rate)}{' fails' if a.result == 'fails' else ''}"
        for axis, a in point.axes.items()
        if a.rate
    ]
    return (
        point.run_id,
        point.created_at[:16].replace("T", " "),
        duration_words(point.duration_s),
        point.verdict or (point.status if point.status != "finished" else "") or "no verdict",
        ", ".join(differ) or "none",
        ", ".join(uuid for uuid, _, _ in point.suspects[:3])
        + (f" and {len(point.suspects) - 3} more" if len(point.suspects) > 3 else ""),
    )


def _suspects(point: RunPoint) -> list[dict[str, str]]:
    return [{"gpu_uuid": u, "serial": s, "hostname": h} for u, s, h in point.suspects]


def _axis_line(name: str, trend: AxisTrend) -> str:
    return f"{name}: {trend.axis}: {trend.kind}, failed in {trend.n_failed} of {trend.n_runs} runs"


def _gpu_line(trend: GpuTrend) -> str:
    hosts = f"{len(trend.hosts)} host{'s' if len(trend.hosts) > 1 else ''}"
    serial = f" (serial {trend.serial})" if trend.serial else ""
    return (
        f"suspect {trend.gpu_uuid}{serial}: on {trend.n_suspect} of {trend.n_runs} runs, "
        f"on {hosts} ({', '.join(trend.hosts)}), last in {trend.last}"
    )
