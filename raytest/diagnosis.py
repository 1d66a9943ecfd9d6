"""What follows a failed gate with ``raytest run --explain``: explain, isolate, localize, within a
budget of engine starts, kept in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.errors import RaytestError
from raytest.explain.isolate import isolate_run
from raytest.explain.localize_run import localize_run
from raytest.explain.replay_pair import Tell
from raytest.explain.run import explain_run
from raytest.report.diagnosis import FILE
from raytest.report.explanation import explanation_lines
from raytest.report.material import failing_axes
from raytest.stopping import StoppedError
from raytest.store import RunFolder, write_json

SCHEMA = "raytest.diagnosis/1"
# Engine starts of a replay with hooks at most: both sides, and the first again.
LOCALIZE_STARTS = 3
_ISOLATE_KEYS = ("finding", "sentence", "recipe", "cause", "pair", "engine_starts", "exit_code")
_LOCALIZE_KEYS = ("finding", "sentence", "pair", "module", "engine_starts", "folder", "exit_code")


def diagnose(
    folder: RunFolder, verdict: Mapping[str, Any], address: str, budget: int, tell: Tell
) -> dict[str, Any] | None:
    """Look for the cause of each failed gate; None where none failed. At most ``budget`` engines
    are started in all. What cannot be found out is a note: the verdict stands.
    Raises StoppedError."""
    axes = failing_axes(verdict)
    if not axes:
        return None
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": folder.run_id,
        "explain": explanation_lines(folder.run_id, explain_run(folder)),
        "axes": [],
        "budget": budget,
        "engine_starts": 0,
    }
    for number, axis in enumerate(axes):
        left = budget - document["engine_starts"]
        share = left // (len(axes) - number)
        found = _axis(folder, axis, address, share, tell)
        document["axes"].append(found)
        for step in ("isolate", "localize"):
            document["engine_starts"] += (found[step] or {}).get("engine_starts", 0)
        write_json(folder.path / FILE, document)
    return document


def _axis(folder: RunFolder, axis: str, address: str, budget: int, tell: Tell) -> dict[str, Any]:
    found: dict[str, Any] = {"axis": axis, "isolate": None, "localize": None, "notes": []}
    if budget <= LOCALIZE_STARTS:
        found["notes"].append(
            f"nothing was run again: {budget} engine starts are left; "
            f"next: raytest isolate {folder.run_id}"
        )
        return found
    try:
        tell(f"{axis}: isolate")
        isolated = isolate_run(
            folder, None, address, tell, budget=budget - LOCALIZE_STARTS, axis=axis
        )
        found["isolate"] = {k: isolated[k] for k in _ISOLATE_KEYS if k in isolated}
        pair = isolated.get("pair")
        if pair:
            tell(f"{axis}: localize")
            localized = localize_run(folder, (pair[0], pair[1]), address, tell)
            found["localize"] = {k: localized[k] for k in _LOCALIZE_KEYS if k in localized}
    except StoppedError:
        raise
    except RaytestError as error:
        found["notes"] += str(error).splitlines()
    return found
