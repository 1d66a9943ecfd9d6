"""Which two trials of a run to set against each other, and which request of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytest.errors import StoreError, UsageError
from raytest.plan import Cell, Plan, Trial
from raytest.schema import Axis, verdicts_schema
from raytest.store import Payload, RunFolder, read_table

# Payloads of one pair of trials that are read to find its earliest divergence.
MOST_PAYLOADS = 512


@dataclass(frozen=True, slots=True)
class Side:
    """One trial of one launch of one cell."""

    cell: Cell
    launch: int
    trial: Trial

    @property
    def name(self) -> str:
        """As in verdicts.parquet: cell, launch and trial."""
        return f"{self.cell.cell_id}/{self.launch}-{self.trial.trial}"

    @property
    def engine(self) -> tuple[str, int]:
        """Equal for two trials that ran in one engine."""
        return self.cell.cell_id, self.launch


@dataclass(frozen=True, slots=True)
class Divergence:
    """One sample of one request on two sides. ``first`` is the position of the first other token in
    the completion; None where the tokens are equal. ``bitwise`` says that the logprobs are too."""

    a: Side
    b: Side
    request_id: str
    sample_index: int
    payload_a: Payload
    payload_b: Payload

    @property
    def first(self) -> int | None:
        """Position of the first token that differs."""
        from raytest.compare.metrics import first_divergence

        at = first_divergence(self.payload_a.token_ids, self.payload_b.token_ids)
        return None if at < 0 else at

    @property
    def bitwise(self) -> bool:
        """Whether nothing that was recorded differs."""
        return self.payload_a.payload_id == self.payload_b.payload_id

    def common_tokens(self) -> tuple[int, ...]:
        """The completion as far as both sides agree."""
        return tuple(int(t) for t in self.payload_a.token_ids[: self.first])


def find_divergence(folder: RunFolder, pair: tuple[str, str] | None) -> Divergence | None:
    """The earliest divergence of the run (on an axis whose gate failed, if any did), or of two
    given sides; those may be equal, and then any request of theirs is given.

    A side is a cell or the name of a variant with one cell, alone or with an arrangement
    (``tp1@node-0-0/solo``) or with launch and trial (``tp1@node-0-0/0-3``). None where nothing in
    the run differs. Raises UsageError and StoreError.
    """
    plan = folder.plan()
    if pair is not None:
        return _of_pair(folder, plan, pair)
    row = _earliest(folder)
    if row is None:
        return None
    a, b = (side_named(plan, row[key]) for key in ("reference_member", "member"))
    payloads = folder.payloads([row["reference_payload_id"], row["payload_id"]])
    return Divergence(
        a,
        b,
        row["request_id"],
        row["sample_index"],
        payloads[row["reference_payload_id"]],
        payloads[row["payload_id"]],
    )


def _earliest(folder: RunFolder) -> dict[str, Any] | None:
    path = folder.path / "verdicts.parquet"
    if not path.exists():
        raise StoreError(f"{path}: is missing; 'raytest compare {folder.run_id}' writes it")
    columns = [
        "axis", "request_id", "sample_index", "reference_member", "member",
        "reference_payload_id", "payload_id", "first_divergence",
    ]  # fmt: skip
    rows = [
        row
        for row in read_table(path, verdicts_schema(), columns).to_pylist()
        if row["payload_id"] and row["reference_payload_id"] and row["axis"] != Axis.RUN
    ]
    axes = (folder.verdict() or {}).get("axes", [])
    failed = {a["axis"] for a in axes if a.get("result") == "fails"}
    rows = [row for row in rows if row["axis"] in failed] or rows
    known = [row for row in rows if row["first_divergence"] is not None]
    return min(known, key=lambda row: int(row["first_divergence"]), default=None)


def side_named(plan: Plan, name: str) -> Side:
    """The side that verdicts.parquet names (cell, launch and trial). Raises StoreError."""
    cell_id, _, place = name.rpartition("/")
    launch, _, trial = place.partition("-")
    for cell in plan.cells:
        for one in plan.trials:
            if (cell.cell_id, str(one.trial)) == (cell_id, trial) and launch.isdigit():
                return Side(cell, int(launch), one)
    raise StoreError(f"verdicts.parquet: {name}: no such trial in the run's plan")


def _of_pair(folder: RunFolder, plan: Plan, pair: tuple[str, str]) -> Divergence:
    equal: Divergence | None = None
    best: Divergence | None = None
    finished = folder.finished_trials()
    for a, b in _pairs(plan, pair):
        if not all((*s.engine, s.trial.trial) in finished for s in (a, b)):
            continue
        for found in _compare(folder, a, b):
            if found.bitwise:
                equal = equal or found
            elif best is None or _position(found) < _position(best):
                best = found
    chosen = best or equal
    if chosen is None:
        raise UsageError(f"--pair {' '.join(pair)}: the run has no finished request of both")
    return chosen


def _position(found: Divergence) -> int:
    return len(found.payload_a.token_ids) if found.first is None else found.first


def _pairs(plan: Plan, pair: tuple[str, str]) -> Iterator[tuple[Side, Side]]:
    """Trials of the two sides that differ in nothing but what the pair says."""
    (first, place_a), (second, place_b) = (_resolve(plan, side) for side in pair)
    if (first.cell_id, place_a) == (second.cell_id, place_b):
        raise UsageError(
            f"--pair {' '.join(pair)}: both are the same; with an arrangement "
            f"({first.cell_id}/{plan.trials[0].arrangement}) or with launch and trial "
            f"({first.cell_id}/0-0) two trials of one cell can be told apart"
        )
    for a in _sides(plan, first, place_a, pair[0]):
        for b in _sides(plan, second, place_b, pair[1]):
            named = [_is_trial(p) for p in (place_a, place_b)]
            if not any(named) and (a.launch, a.trial.repeat) != (b.launch, b.trial.repeat):
                continue
            if not (place_a and place_b) and a.trial.arrangement != b.trial.arrangement:
                continue
            if a != b:
                yield a, b


def _resolve(plan: Plan, text: str) -> tuple[Cell, str]:
    head, _, tail = text.partition("/")
    cells = [c for c in plan.cells if c.cell_id == head]
    cells = cells or [c for c in plan.cells if c.variant == head]
    if len(cells) == 1:
        return cells[0], tail
    known = ", ".join(c.cell_id for c in (cells or plan.cells)[:12])
    problem = f"{len(cells)} cells of that variant" if cells else "no such cell or variant"
    raise UsageError(f"--pair {text}: {problem}; the run has {known}")


def _sides(plan: Plan, cell: Cell, place: str, text: str) -> list[Side]:
    sides = [Side(cell, launch, t) for launch in range(cell.launches) for t in plan.trials]
    if place:
        sides = [
            s for s in sides if place in (s.trial.arrangement.value, f"{s.launch}-{s.trial.trial}")
        ]
    if not sides:
        known = ", ".join(dict.fromkeys(t.arrangement.value for t in plan.trials))
        raise UsageError(
            f"--pair {text}: expected an arrangement of the run ({known}) or launch-trial after /"
        )
    return sides


def _is_trial(place: str) -> bool:
    return place.partition("-")[0].isdigit()


def _compare(folder: RunFolder, a: Side, b: Side) -> Sequence[Divergence]:
    """Every request's sample on both sides, equal ones too where none differs."""
    columns = ["request_id", "sample_index", "payload_id"]
    mine, theirs = (
        {
            (row["request_id"], row["sample_index"]): row["payload_id"]
            for row in folder.read_trial((*s.engine, s.trial.trial), columns).to_pylist()
            if row["payload_id"] is not None
        }
        for s in (a, b)
    )
    both = [key for key in mine if key in theirs]
    keys = [key for key in both if mine[key] != theirs[key]][: MOST_PAYLOADS // 2] or both[:1]
    payloads = folder.payloads({side[key] for key in keys for side in (mine, theirs)})
    return [Divergence(a, b, *key, payloads[mine[key]], payloads[theirs[key]]) for key in keys]
