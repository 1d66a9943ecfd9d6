"""What ``raytest run --explain`` found out about the gates that failed, as lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.report.table import printable
from raytest.store import RunFolder, read_json

FILE = "diagnosis.json"


def diagnosis_of(folder: RunFolder) -> dict[str, Any] | None:
    """The document of the run folder, or None. Raises StoreError for a damaged one."""
    path = folder.path / FILE
    return read_json(path) if path.exists() else None


def diagnosis_lines(document: Mapping[str, Any] | None) -> list[str]:
    """Per failed gate: the recipe, then the first module; [] without a diagnosis."""
    lines = []
    for found in (document or {}).get("axes", ()):
        for step in ("isolate", "localize"):
            step_lines = _step(found.get(step))
            lines += [f"{found['axis']}: {step}: {line}" for line in step_lines]
        lines += [f"{found['axis']}: {note}" for note in found["notes"]]
    return [printable(line) for line in lines]


def _step(found: Mapping[str, Any] | None) -> list[str]:
    return [] if found is None else [*found.get("recipe", ()), found["sentence"]]
