"""What replay keeps in a run folder, apart from the run's own observations: ``replay/``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raytest.errors import StoreError
from raytest.schema import observations_schema, payloads_schema
from raytest.store import (
    Payload,
    RunFolder,
    payload_rows,
    read_json,
    read_table,
    write_json,
    write_table,
)

if TYPE_CHECKING:
    import pyarrow as pa


# How an engine gets at fixed tokens: as the end of a prompt, or one by one.
ReplayPath = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Recorded:
    """The completions of one finished trial, sample 0 of each request, by request id."""

    cell_id: str
    launch: int
    trial: int
    payloads: Mapping[str, Payload]


@dataclass(frozen=True, slots=True)
class Scored:
    """One cell's scores of the reference's tokens, by request id; ``errors`` where it gave none."""

    cell_id: str
    payloads: Mapping[str, Payload]
    errors: Mapping[str, str]


def reference_of(folder: RunFolder, *, any_cell: bool) -> Recorded | None:
    """The completions that every cell scores: the first finished trial of the plan's first cell,
    kept by name once chosen, so that a run taken up again scores the same. None where it has not
    finished; with ``any_cell`` the first cell that finished a trial stands in."""
    path = _root(folder) / "reference.json"
    if path.exists():
        chosen = read_json(path)
        try:
            key = str(chosen["cell_id"]), int(chosen["launch"]), int(chosen["trial"])
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path}: expected cell_id, launch and trial") from None
        return read_recorded(folder, key)
    finished = sorted(folder.finished_trials())
    cells = [c.cell_id for c in folder.plan().cells]
    for cell_id in cells if any_cell else cells[:1]:
        first = next((k for k in finished if k[0] == cell_id), None)
        if first is not None:
            write_json(path, dict(zip(("cell_id", "launch", "trial"), first, strict=True)))
            return read_recorded(folder, first)
    return None


def first_recorded(folder: RunFolder, cell_id: str) -> Recorded | None:
    """A cell's own first finished trial, or None."""
    key = next((k for k in sorted(folder.finished_trials()) if k[0] == cell_id), None)
    return None if key is None else read_recorded(folder, key)


def read_recorded(folder: RunFolder, key: tuple[str, int, int]) -> Recorded:
    """One trial's completions. Raises StoreError."""
    table = folder.read_trial(key, ["request_id", "sample_index", "payload_id"])
    ids = {
        row["request_id"]: row["payload_id"]
        for row in table.to_pylist()
        if row["sample_index"] == 0 and row["payload_id"] is not None
    }
    payloads = folder.payloads(ids.values())
    return Recorded(*key, {request: payloads[p] for request, p in ids.items()})


def write_scored(
    folder: RunFolder,
    cell_id: str,
    launch: int,
    observations: pa.Table,
    payloads: pa.Table,
    path: ReplayPath = "prefill",
) -> None:
    """Keep one cell's scores: payloads first, then the observations that refer to them."""
    name = f"{cell_id}-{launch}.parquet"
    write_table(_root(folder, path) / "payloads" / name, payloads, payloads_schema())
    write_table(_root(folder, path) / name, observations, observations_schema())


def scored_files(folder: RunFolder, path: ReplayPath = "prefill") -> dict[str, Path]:
    """The file of each cell that has been scored, in the plan's order."""
    found: dict[str, Path] = {}
    for cell in folder.plan().cells:
        for launch in range(cell.launches):
            file = _root(folder, path) / f"{cell.cell_id}-{launch}.parquet"
            if file.exists():
                found.setdefault(cell.cell_id, file)
    return found


def read_scored(path: Path) -> Scored:
    """One cell's scores. Raises StoreError for a damaged file, or one without its payloads."""
    table = read_table(path, observations_schema())
    rows: list[dict[str, Any]] = table.to_pylist()
    beside = path.parent / "payloads" / path.name
    payloads = {p.payload_id: p for p in payload_rows(read_table(beside, payloads_schema()))}
    lost = [r["payload_id"] for r in rows if r["payload_id"] and r["payload_id"] not in payloads]
    if lost or not rows:
        raise StoreError(f"{path}: {len(lost)} payloads are missing of {len(rows)} observations")
    return Scored(
        cell_id=rows[0]["cell_id"],
        payloads={r["request_id"]: payloads[r["payload_id"]] for r in rows if r["payload_id"]},
        errors={r["request_id"]: r["error"] for r in rows if r["error"] is not None},
    )


def _root(folder: RunFolder, path: ReplayPath = "prefill") -> Path:
    root = folder.path / "replay"
    return root / "decode" if path == "decode" else root
