"""Metrics for the node exporter's textfile collector: no timestamps, no series twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raytest.report.facts import duration_s, epoch_s
from raytest.report.material import Material
from raytest.report.quarantine import isolated
from raytest.schema import RunVerdict

HELP = {
    "raytest_info": "The run that the other series are from.",
    "raytest_run_verdict": "1 for the verdict that holds, per axis; axis all is the run's own.",
    "raytest_exit_code": "Exit code of the run.",
    "raytest_last_run_timestamp_seconds": "When the last run ended.",
    "raytest_last_success_timestamp_seconds": "When the last run that passed ended.",
    "raytest_run_duration_seconds": "How long the run took.",
    "raytest_trials": "Trials by state.",
    "raytest_cells": "Cells by state.",
    "raytest_requests_compared": "Requests compared along an axis.",
    "raytest_requests_divergent": "Requests that differ along an axis.",
    "raytest_control_caught": "Whether a planted difference was flagged.",
    "raytest_baseline_stale": "Whether the baseline is of another environment.",
    "raytest_baseline_age_seconds": "Age of the baseline that the run was compared with.",
    "raytest_gpu_suspect": "Whether a finding asks to isolate the GPU.",
}
OUTCOMES = {
    "holds": RunVerdict.PASS,
    "recorded": RunVerdict.PASS,
    "fails": RunVerdict.MISMATCH,
    "undecided": RunVerdict.INCONCLUSIVE,
}
SUCCESS = "raytest_last_success_timestamp_seconds"

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def prometheus_text(material: Material, before: str = "") -> str:
    """The exposition format. ``before`` is the text of the previous run's file, whose last success
    is kept where this run is none."""
    document = material.document
    spec = material.spec.name
    series: Series = {}

    def put(name: str, value: float, **labels: str) -> None:
        series[name, tuple(sorted({"spec": spec, **labels}.items()))] = value

    run = document["run"]
    version = str(run.get("raytest_version", ""))
    put("raytest_info", 1, run_id=material.run_id, version=version)
    put("raytest_exit_code", document["exit_code"])
    outcomes = {a["axis"]: OUTCOMES[a["result"]].value for a in document["axes"]}
    for axis, outcome in {"all": document["verdict"], **outcomes}.items():
        for word in RunVerdict:
            put("raytest_run_verdict", float(word == outcome), axis=axis, verdict=word.value)
    ended = epoch_s(run.get("ended_at"))
    succeeded = ended if document["verdict"] == RunVerdict.PASS else last_success(before, spec)
    for name, at in (("raytest_last_run_timestamp_seconds", ended), (SUCCESS, succeeded)):
        if at is not None:
            put(name, at)
    seconds = duration_s(run)
    if seconds is not None:
        put("raytest_run_duration_seconds", seconds)
    for axis in document["axes"]:
        requests = axis["requests"]
        differ = requests["compared"] - requests["bitwise"]
        put("raytest_requests_compared", requests["compared"], axis=axis["axis"])
        put("raytest_requests_divergent", differ, axis=axis["axis"])
    for control in document["controls"]:
        put("raytest_control_caught", float(control["caught"]), control=control["name"])
    for kind, counts in (
        ("raytest_trials", _trials(document)),
        ("raytest_cells", _cells(material)),
    ):
        for state, n in counts.items():
            put(kind, n, state=state)
    compared = document.get("baseline")
    if compared:
        put("raytest_baseline_stale", float(compared["stale"]), baseline=compared["name"])
        if compared["age_s"] is not None:
            put("raytest_baseline_age_seconds", compared["age_s"], baseline=compared["name"])
    suspects = {entity for entity, _ in isolated(material)}
    hostnames = material.hostnames()
    for cell in material.plan.cells:
        for device in cell.slot.devices:
            suspect = float(device.uuid in suspects)
            node = hostnames.get(device.node, device.node)
            put("raytest_gpu_suspect", suspect, gpu_uuid=device.uuid, node=node)
    return _text(series)


def read_before(path: Path) -> str:
    """The previous run's file, or nothing."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def last_success(text: str, spec: str) -> float | None:
    """The last success that a metrics file tells of ``spec``."""
    pattern = rf"^{SUCCESS}\{{spec=\"{re.escape(_escaped(spec))}\"\}} (\S+)$"
    match = re.search(pattern, text, re.MULTILINE)
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _trials(document: Mapping[str, Any]) -> dict[str, int]:
    trials = document["trials"]
    return {
        "planned": trials["planned"],
        "ran": trials["ran"],
        "missing": trials["planned"] - trials["ran"] - trials.get("not_needed", 0),
    }


def _cells(material: Material) -> dict[str, int]:
    failed = {f["cell_id"] for f in material.document["failures"]}
    short = {t.rpartition("/")[0] for t in material.document["trials"]["missing"]} - failed
    planned = {c.cell_id for c in material.plan.cells}
    return {
        "planned": len(planned),
        "failed": len(failed),
        "missing": len(short),
        "done": len(planned - failed - short),
    }


def _text(series: Series) -> str:
    lines = []
    for name, help_text in HELP.items():
        own = sorted((labels, value) for (n, labels), value in series.items() if n == name)
        if own:
            lines += [f"# HELP {name} {help_text}", f"# TYPE {name} gauge"]
        for labels, value in own:
            inside = ",".join(f'{k}="{_escaped(v)}"' for k, v in labels)
            lines.append(f"{name}{{{inside}}} {_number(value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
