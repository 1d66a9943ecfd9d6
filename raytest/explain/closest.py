"""Which two cells of a run to study: those that differ in result and in little else."""

from __future__ import annotations

from raytest.errors import StoreError
from raytest.explain.divergence import Side, side_named
from raytest.schema import Axis, verdicts_schema
from raytest.spec import Spec
from raytest.store import RunFolder, read_table

# Repeats and launches differ in nothing that could be set.
_NOTHING_TO_SET = (Axis.REPEAT, Axis.LAUNCH, Axis.RUN)


def closest_pair(folder: RunFolder, axis: str | None = None) -> tuple[Side, Side] | None:
    """Two sides whose results differ (on ``axis``, else on an axis whose gate failed if any did)
    and whose settings differ least; None where nothing differs. Raises StoreError."""
    path = folder.path / "verdicts.parquet"
    if not path.exists():
        raise StoreError(f"{path}: is missing; 'raytest compare {folder.run_id}' writes it")
    columns = ["axis", "reference_member", "member", "reference_payload_id", "payload_id"]
    rows = [
        r
        for r in read_table(path, verdicts_schema(), columns).to_pylist()
        if r["payload_id"] and r["reference_payload_id"] and r["axis"] != Axis.RUN
    ]
    if axis is not None:
        rows = [r for r in rows if r["axis"] == axis]
    else:
        failed = {
            a["axis"] for a in (folder.verdict() or {}).get("axes", ()) if a["result"] == "fails"
        }
        rows = [r for r in rows if r["axis"] in failed] or rows
        rows = [r for r in rows if r["axis"] not in _NOTHING_TO_SET] or rows
    plan, spec = folder.plan(), folder.spec()
    pairs = dict.fromkeys((r["reference_member"], r["member"]) for r in rows)
    sides = [(side_named(plan, one), side_named(plan, other)) for one, other in pairs]
    return min(sides, key=lambda p: _distance(spec, *p), default=None)


def _distance(spec: Spec, a: Side, b: Side) -> tuple[int, int, int]:
    """Settings that differ, then how far apart the devices are, then the arrangement."""
    one, other = (next(v for v in spec.variants if v.name == s.cell.variant) for s in (a, b))
    mine, theirs = one.model_dump(), other.model_dump()
    apart = 0
    for key in mine.keys() - {"name"}:
        if mine[key] != theirs[key]:
            nested = isinstance(mine[key], dict) and isinstance(theirs[key], dict)
            apart += len(mine[key].items() ^ theirs[key].items()) if nested else 1
    places = (a.cell.slot.name != b.cell.slot.name) + (a.cell.slot.node != b.cell.slot.node)
    return apart, places, int(a.trial.arrangement != b.trial.arrangement)
