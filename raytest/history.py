"""Runs over time, from manifests and verdicts alone: what always fails, what now and then, and
which GPUs are suspect again and again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from raytest.driver import is_abandoned
from raytest.errors import StoreError
from raytest.report.facts import duration_s
from raytest.store import read_json


@dataclass(frozen=True, slots=True)
class AxisPoint:
    """One axis of one run; ``rate`` is the share of requests that differ, None where none were
    compared."""

    result: str
    rate: float | None


@dataclass(frozen=True, slots=True)
class RunPoint:
    """One run. ``verdict`` is '' and ``exit_code`` None where it has no finished verdict;
    ``suspects`` are (GPU UUID, board's serial, hostname)."""

    run_id: str
    path: Path
    name: str
    created_at: str
    duration_s: float | None
    status: str
    verdict: str
    exit_code: int | None
    axes: Mapping[str, AxisPoint]
    suspects: tuple[tuple[str, str, str], ...]
    baseline: str


@dataclass(frozen=True, slots=True)
class AxisTrend:
    """``kind``: steady (never failed), flaky (fails and holds in turns), broken (fails since some
    run and ever after), mended (failed once, holds since), or open (never decided)."""

    axis: str
    kind: str
    n_runs: int
    n_failed: int


@dataclass(frozen=True, slots=True)
class GpuTrend:
    """One GPU that was a suspect: on how many runs of those that used it, and on which hosts."""

    gpu_uuid: str
    serial: str
    n_suspect: int
    n_runs: int
    hosts: tuple[str, ...]
    last: str


def read_history(results: str, name: str | None = None) -> tuple[list[RunPoint], dict[str, int]]:
    """Runs oldest first (of the spec ``name``, or of all), and in how many of them each GPU was.

    A folder that is damaged or no run is passed over.
    """
    points: list[RunPoint] = []
    used: dict[str, int] = {}
    for path in Path(results).glob("*/manifest.json"):
        try:
            manifest = read_json(path)
            verdict_file = path.parent / "verdict.json"
            document = read_json(verdict_file) if verdict_file.exists() else {}
            point = _point(path.parent, manifest, document)
        except (StoreError, KeyError, TypeError, AttributeError):
            continue
        if name is not None and point.name != name:
            continue
        points.append(point)
        for uuid in {d["uuid"] for c in manifest["plan"]["cells"] for d in _devices(c)}:
            used[uuid] = used.get(uuid, 0) + 1
    return sorted(points, key=lambda p: (p.created_at, p.run_id)), used


def _point(path: Path, manifest: Mapping[str, Any], document: Mapping[str, Any]) -> RunPoint:
    compared = document.get("baseline") or {}
    return RunPoint(
        run_id=str(manifest["run_id"]),
        path=path,
        name=str(manifest["spec"]["name"]),
        created_at=str(manifest.get("created_at", "")),
        duration_s=duration_s(manifest),
        status="abandoned" if is_abandoned(path, manifest) else str(manifest.get("status", "")),
        verdict=str(document.get("verdict", "")),
        exit_code=document.get("exit_code"),
        axes={a["axis"]: _axis_point(a) for a in document.get("axes", ())},
        suspects=tuple(sorted(set(_suspects(manifest, document)))),
        baseline=f"{compared['name']}/{compared['number']}" if compared else "",
    )


def _axis_point(axis: Mapping[str, Any]) -> AxisPoint:
    requests = axis["requests"]
    n = requests["compared"]
    return AxisPoint(axis["result"], (n - requests["bitwise"]) / n if n else None)


def _suspects(
    manifest: Mapping[str, Any], document: Mapping[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Devices of the slots and cells that findings ask to isolate."""
    names = {
        entity
        for f in document.get("findings", ())
        if f["severity"] == "isolate"
        for entity in f["entities"]
    }
    if not names:
        return
    hosts = {n["name"]: n["hostname"] for n in manifest.get("inventory", {}).get("nodes", ())}
    for cell in manifest["plan"]["cells"]:
        if cell["cell_id"] in names or _slot_name(cell) in names:
            for device in _devices(cell):
                host = hosts.get(device["node"], device["node"])
                yield device["uuid"], device.get("serial", ""), host


def _devices(cell: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    devices: list[Mapping[str, Any]] = cell["slot"]["devices"]
    return devices


def _slot_name(cell: Mapping[str, Any]) -> str:
    from raytest.inventory import Device, Slot

    return Slot(tuple(Device(**d) for d in _devices(cell))).name


def axis_trends(points: Sequence[RunPoint]) -> list[AxisTrend]:
    """Per axis, whether it holds, fails or wavers; undecided runs count as neither."""
    axes = dict.fromkeys(axis for p in points for axis in p.axes)
    trends = []
    for axis in axes:
        results = [p.axes[axis].result for p in points if axis in p.axes]
        decided = [r == "fails" for r in results if r != "undecided"]
        trends.append(AxisTrend(axis, _kind(decided), len(results), sum(decided)))
    return trends


def _kind(failed: Sequence[bool]) -> str:
    if not failed:
        return "open"
    if not any(failed):
        return "steady"
    changes = sum(a != b for a, b in pairwise(failed))
    if failed[-1] and changes <= 1:
        return "broken"
    if not failed[-1] and changes == 1:
        return "mended"
    return "flaky"


def gpu_trends(points: Sequence[RunPoint], used: Mapping[str, int]) -> list[GpuTrend]:
    """GPUs that were suspect, the most often first."""
    seen: dict[str, list[tuple[RunPoint, str]]] = {}
    serials: dict[str, str] = {}
    for point in points:
        for uuid, serial, host in point.suspects:
            seen.setdefault(uuid, []).append((point, host))
            serials[uuid] = serial or serials.get(uuid, "")
    trends = [
        GpuTrend(
            uuid,
            serials[uuid],
            len(found),
            used.get(uuid, len(found)),
            tuple(sorted({host for _, host in found})),
            found[-1][0].run_id,
        )
        for uuid, found in seen.items()
    ]
    return sorted(trends, key=lambda t: (-t.n_suspect, t.gpu_uuid))
