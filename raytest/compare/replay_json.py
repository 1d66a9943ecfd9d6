"""``raytest.replay/1``: what a run folder's scores say, cell by cell. Pure reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raytest.compare.replay import consistency, consistency_json, distance, distance_json
from raytest.errors import ExitCode
from raytest.replay_folder import Recorded, ReplayPath, first_recorded, read_scored, scored_files
from raytest.store import RunFolder

SCHEMA = "raytest.replay/1"
PATHS = {
    ("vllm", "prefill"): "prefill (prompt_logprobs)",
    ("vllm", "decode"): "decode (trace replay)",
    ("reference", "prefill"): "decode (the reference engine's only one)",
    ("reference", "decode"): "decode (the reference engine's only one)",
}


def replay_document(
    folder: RunFolder,
    reference: Recorded,
    failed: Mapping[str, str],
    path: ReplayPath = "prefill",
) -> dict[str, Any]:
    """Every cell's scores against the reference cell's, and each against its own greedy output.

    ``failed`` says why a cell gave no scores. The exit code judges coverage alone: 3 where a cell
    or a request was not scored. Raises StoreError.
    """
    spec, plan = folder.spec(), folder.plan()
    files = scored_files(folder, path)
    base = read_scored(files[reference.cell_id]) if reference.cell_id in files else None
    greedy = _greedy(folder)
    dtypes = {v.name: v.dtype or spec.model.dtype for v in spec.variants}
    cells = []
    for cell in plan.cells:
        if cell.cell_id not in files:
            continue
        scored = read_scored(files[cell.cell_id])
        own = first_recorded(folder, cell.cell_id)
        against = None if base is None else distance(base, scored)
        itself = consistency(scored, own.payloads if own else {}, greedy, dtypes[cell.variant])
        cells.append(
            {
                "cell_id": cell.cell_id,
                "against_reference": None if against is None else distance_json(against),
                "consistency": consistency_json(itself),
                "errors": dict(scored.errors),
            }
        )
    why = "not scored yet; 'raytest replay' scores it"
    absent = [c.cell_id for c in plan.cells if c.cell_id not in files]
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "run_id": folder.run_id,
        "reference": {
            "cell_id": reference.cell_id,
            "launch": reference.launch,
            "trial": reference.trial,
        },
        "path": PATHS[spec.backend, path],
        "cells": cells,
        "not_scored": {cell_id: failed.get(cell_id, why) for cell_id in absent},
    }
    return {**document, "exit_code": int(_exit_code(document))}


def _exit_code(document: Mapping[str, Any]) -> ExitCode:
    """Complete, or not: nothing compared is no agreement."""
    complete = not document["not_scored"] and all(
        not cell["errors"] and (cell["against_reference"] or {}).get("n_positions")
        for cell in document["cells"]
    )
    return ExitCode.PASS if complete else ExitCode.INCONCLUSIVE


def _greedy(folder: RunFolder) -> set[str]:
    """Requests whose own output is the most likely token at every position."""
    table = folder.requests().select(["request_id", "sampling"])
    found = set()
    for row in table.to_pylist():
        sampling = json.loads(row["sampling"])
        if not sampling.get("temperature") and not sampling.get("beam_width"):
            found.add(row["request_id"])
    return found
