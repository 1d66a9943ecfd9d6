"""Golden runs, saved under a name and keyed by what they ran in."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raytest.digest import json_digest
from raytest.errors import StoreError, UsageError
from raytest.fingerprint.lock import make_lock
from raytest.report.environment import process_facts, run_environment
from raytest.schema import RunVerdict
from raytest.store import RUN_ID_PATTERN, RunFolder, read_json, write_json

FOLDER = "baselines"
# What a comparison reads; logs, reports and events stay with the run.
KEPT = ("observations", "payloads", "fingerprints")
KEPT_FILES = ("manifest.json", "requests.parquet", "verdicts.parquet", "verdict.json")


@dataclass(frozen=True, slots=True)
class Baseline:
    """One saved run. ``key`` digests ``environment``: each fact with its values in the run."""

    name: str
    number: int
    path: Path
    run_id: str
    saved_at: str
    key: str
    environment: Mapping[str, Sequence[str]]

    @property
    def title(self) -> str:
        """Name and number."""
        return f"{self.name}/{self.number}"


def save_baseline(results: str, name: str, folder: RunFolder, *, replace: bool) -> Baseline:
    """Save a run under ``name``, as the next number; older ones stay.

    Raises UsageError for a run that is partial, inconsistent or without a caught control, and where
    the name is in use and ``replace`` is not said.
    """
    _check_name(name)
    _refuse_unfit(folder)
    root = Path(results) / FOLDER / name
    numbers = _numbers(root)
    if numbers and not replace:
        raise UsageError(
            f"baseline {name!r} exists ({root}/{numbers[-1]}); --replace adds a newer one and "
            "keeps it"
        )
    environment = run_environment(folder)
    number = numbers[-1] + 1 if numbers else 1
    facts = {k: v for own in process_facts(folder).values() for k, v in own.items()}
    record = {
        "schema": "raytest.baseline/1",
        "name": name,
        "number": number,
        "run_id": folder.run_id,
        "saved_at": datetime.now(UTC).isoformat(),
        "key": json_digest("environment", environment),
        "environment": environment,
        "lock": make_lock(facts),
    }
    temporary = root / f".{uuid.uuid4().hex[:8]}"
    try:
        _copy(folder.path, temporary)
        write_json(temporary / "baseline.json", record)
        os.rename(temporary, root / str(number))
    except OSError as error:
        raise StoreError(f"{root}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _read(root / str(number))


def list_baselines(results: str) -> list[Baseline]:
    """All saved runs, by name and number. Raises StoreError for one that is damaged."""
    root = Path(results) / FOLDER
    names = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    return [_read(name / str(number)) for name in names for number in _numbers(name)]


def has_baseline(results: str, name: str) -> bool:
    """Whether anything is saved as ``NAME`` (or ``NAME/n``). Raises UsageError for no name."""
    _check_name(name.partition("/")[0])
    return bool(_numbers(Path(results) / FOLDER / name.partition("/")[0]))


def find_baseline(results: str, name: str) -> Baseline:
    """The newest of ``NAME``, or the one that ``NAME/n`` says. Raises UsageError."""
    plain, _, number = name.partition("/")
    _check_name(plain)
    root = Path(results) / FOLDER / plain
    numbers = _numbers(root)
    if not numbers:
        names = ", ".join(dict.fromkeys(b.name for b in list_baselines(results))) or "none"
        raise UsageError(f"no baseline {plain!r} in {root.parent}; there are: {names}")
    if number and number not in map(str, numbers):
        have = ", ".join(map(str, numbers))
        raise UsageError(f"baseline {plain!r} has no number {number}; there are: {have}")
    return _read(root / (number or str(numbers[-1])))


def remove_baseline(results: str, name: str) -> list[Path]:
    """Remove ``NAME`` with all its numbers, or ``NAME/n``; what was removed. Raises UsageError."""
    baseline = find_baseline(results, name)
    path = baseline.path if "/" in name else baseline.path.parent
    try:
        shutil.rmtree(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from None
    return [path]


def _refuse_unfit(folder: RunFolder) -> None:
    document = folder.verdict()
    why = ""
    if document is None:
        why = "has no finished verdict"
    elif not document["complete"]:
        why = "is incomplete"
    elif not any(c["name"] == "engine" and c["caught"] for c in document["controls"]):
        why = "has no engine control that was caught"
    elif not all(c["caught"] for c in document["controls"]):
        why = "missed a control"
    elif document["verdict"] != RunVerdict.PASS and not _only_baseline(document):
        why = f"ended with {document['verdict']}"
    if why:
        raise UsageError(f"{folder.path}: {why}; only a complete run that passed can be a baseline")


def _only_baseline(document: Mapping[str, Any]) -> bool:
    """Whether nothing but its comparison with an older baseline keeps the run from passing."""
    compared = document.get("baseline")
    if compared is None:
        return False
    own = [r for r in document["reasons"] if not r.startswith("baseline ")]
    return not own


def _check_name(name: str) -> None:
    if not RUN_ID_PATTERN.match(name):
        raise UsageError(
            f"baseline name {name!r}: use letters, digits, '.', '_' and '-', at most 100"
        )


def _numbers(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    return sorted(int(p.name) for p in root.iterdir() if p.is_dir() and p.name.isdigit())


def _read(path: Path) -> Baseline:
    record = read_json(path / "baseline.json")
    try:
        return Baseline(
            str(record["name"]),
            int(record["number"]),
            path,
            str(record["run_id"]),
            str(record["saved_at"]),
            str(record["key"]),
            record["environment"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"{path}/baseline.json: {error!s} is missing or wrong") from None


def _copy(source: Path, target: Path) -> None:
    """Hard links where the file system has them: a run's files are replaced, never changed."""
    for name in KEPT:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name, copy_function=_link)
    target.mkdir(parents=True, exist_ok=True)
    for name in KEPT_FILES:
        shutil.copy2(source / name, target / name)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
