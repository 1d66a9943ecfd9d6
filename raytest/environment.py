"""The environment commands: fingerprint, its differences, lock and doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from raytest.configure import Target, variant_findings
from raytest.doctor import diagnose, model_default_findings
from raytest.errors import ExitCode, UsageError
from raytest.fingerprint import lock as locks
from raytest.fingerprint.diff import Difference, diff
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.model import generation_defaults
from raytest.spec import Spec
from raytest.store import RunFolder
from raytest.survey import model_facts, survey

Facts = dict[str, str]


def run_processes(folder: RunFolder) -> dict[str, Facts]:
    """Facts of every process of a run, by ``cell/launch/rank`` (the actor's rank is ``actor``).

    A later attempt and a later stage win: what counts is what the trials ran with.
    """
    table = folder.fingerprints().sort_by([("attempt", "ascending"), ("stage", "ascending")])
    processes: dict[str, Facts] = {}
    columns = [table.column(n).to_pylist() for n in ("cell_id", "launch", "rank", "key", "value")]
    for cell_id, launch, rank, key, value in zip(*columns, strict=True):
        name = f"{cell_id}/{launch}/{'actor' if rank < 0 else rank}"
        processes.setdefault(name, {})[key] = value
    return processes


def choose(processes: Mapping[str, Facts], wanted: str) -> tuple[str, Facts]:
    """The process that ``wanted`` names: ``cell/launch/rank``, ``cell/launch``, ``cell``, or any
    part of a cell's id that fits only one cell. Without a rank, rank 0 with the actor's facts
    under it. Raises UsageError naming what there is."""
    if wanted in processes:
        return wanted, processes[wanted]
    cells = sorted({name.rsplit("/", 2)[0] for name in processes})
    part, _, launch = wanted.partition("/")
    fitting = [c for c in cells if c == part] or [c for c in cells if part in c]
    if len(fitting) != 1:
        some = ", ".join(fitting or cells)
        raise UsageError(f"{wanted!r}: {'fits several' if fitting else 'no such process'}: {some}")
    name = f"{fitting[0]}/{launch or 0}"
    if f"{name}/actor" not in processes:
        raise UsageError(f"{wanted!r}: {fitting[0]} has no launch {launch or 0}")
    return name, {**processes[f"{name}/actor"], **processes.get(f"{name}/0", {})}


def differences(folder: RunFolder, a: str, b: str) -> list[Difference]:
    """What differs between two processes of a run, the most telling first."""
    processes = run_processes(folder)
    return diff(choose(processes, a)[1], choose(processes, b)[1])


def difference_document(a: str, b: str, found: Sequence[Difference]) -> dict[str, Any]:
    """``raytest fingerprint --diff --format json``."""
    return {
        "schema": "raytest.fingerprint-diff/1",
        "a": a,
        "b": b,
        "differences": [asdict(d) for d in found],
    }


def doctor(
    address: str, spec: Spec | None, results: str, lock_file: str | None
) -> list[tuple[str, Finding]]:
    """Findings by node ('' for those between nodes). Raises UnavailableError without a cluster."""
    model = "" if spec is None or spec.model.synthetic_size else spec.model.path
    hub = bool(model) and not model.startswith(("/", ".", "~"))
    paths = tuple(p for p in (results, "" if hub else model) if p)
    nodes = survey(address, spec, paths)
    found = [("", f) for f in diagnose(nodes, "" if hub else model)]
    if spec is not None:
        found += [("", f) for f in _spec_findings(spec, nodes)]
    if lock_file is not None:
        lock = locks.read(lock_file)
        hashes = model_facts(address, spec, model) if spec is not None and model else {}
        for node, facts in nodes.items():
            deviations = locks.check_lock(lock, facts, hashes.get(node))
            found += [(node, f) for f in deviations]
    return found


def _spec_findings(spec: Spec, nodes: Mapping[str, Facts]) -> list[Finding]:
    """What is wrong with the spec's variants for this vLLM, and what the model's own defaults would
    do to requests that leave something open."""
    if spec.backend != "vllm" or not nodes:
        return []
    facts = next(iter(nodes.values()))
    platform = "cuda" if any(n.get("gpu.count", "0") != "0" for n in nodes.values()) else "cpu"
    target = Target(platform, facts.get("vllm.version", ""))
    found = [
        replace(finding, where=f"variants.{variant.name}, {finding.where}")
        for variant in spec.variants
        for finding in variant_findings(spec, variant, target)
    ]
    folder = Path(spec.model.path).expanduser()
    return found + model_default_findings(generation_defaults(folder))


def doctor_exit_code(found: Sequence[tuple[str, Finding]]) -> ExitCode:
    """1 where a finding would change results, else 0."""
    serious = any(f.severity == "error" for _, f in found)
    return ExitCode.MISMATCH if serious else ExitCode.PASS


def doctor_document(found: Sequence[tuple[str, Finding]]) -> dict[str, Any]:
    """``raytest doctor --format json``."""
    return {
        "schema": "raytest.doctor/1",
        "exit_code": int(doctor_exit_code(found)),
        "findings": [{"node": node, **asdict(f)} for node, f in found],
    }


def doctor_lines(found: Sequence[tuple[str, Finding]]) -> list[str]:
    """A paragraph a finding: severity, where, sentence, and under it what mends it."""
    lines = []
    for node, f in found:
        where = f"{node}: {f.where}" if node else f.where
        lines.append(f"{f.severity:<8} {where}: {f.sentence}")
        if f.remedy:
            lines.append(f"         {f.remedy}")
    counts = [sum(f.severity == s for _, f in found) for s in ("error", "warning", "info")]
    lines.append(f"{counts[0]} errors, {counts[1]} warnings, {counts[2]} notes")
    return lines


def make_lock(spec: Spec | None, model_path: str | None) -> dict[str, Any]:
    """The lock of this machine, with the hashes of a spec's model where one is named."""
    from raytest.fingerprint.capture import capture
    from raytest.fingerprint.model import model_fingerprint

    model = model_fingerprint(model_path) if spec is not None and model_path else None
    return locks.make_lock(capture("lock", all_gpus=True), model)
