"""What every report is made of: a run's verdict and its divergences, finished or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytest.compare.evaluate import evaluate
from raytest.compare.verdict_json import verdict_document
from raytest.plan import Cell, Plan
from raytest.schema import verdicts_schema
from raytest.spec import Spec
from raytest.store import RunFolder, read_table

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Material:
    """``judged`` is false where the run has no verdict.json: the document is then made from what is
    on disk. ``verdicts`` is verdicts.parquet with ``members``."""

    folder: RunFolder
    document: Mapping[str, Any]
    verdicts: pa.Table
    spec: Spec
    plan: Plan
    judged: bool

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self.folder.run_id

    def cell_of(self) -> dict[str, Cell]:
        """Cells by id."""
        return {c.cell_id: c for c in self.plan.cells}

    def hostnames(self) -> dict[str, str]:
        """Hostname of each node by its name; the name itself where the inventory is unknown."""
        names = {n: n for c in self.plan.cells for n in c.slot.nodes}
        for node in self.folder.manifest.get("inventory", {}).get("nodes", ()):
            names[str(node["name"])] = str(node["hostname"])
        return names


def gather(folder: RunFolder) -> Material:
    """Read what reports need. Raises StoreError for files that are damaged or of another schema."""
    import pyarrow as pa

    document = folder.verdict()
    if document is not None and (folder.path / "verdicts.parquet").exists():
        members = pa.field("members", pa.list_(pa.string()), nullable=False)
        verdicts = read_table(folder.path / "verdicts.parquet", verdicts_schema().append(members))
        return Material(folder, document, verdicts, folder.spec(), folder.plan(), True)
    evaluation = evaluate(folder)
    document = verdict_document(evaluation, folder.manifest)
    return Material(folder, document, evaluation.verdicts, folder.spec(), folder.plan(), False)


def cell_of_member(member: str) -> str:
    """Cell id of a member's name (``<cell id>/<launch>-<trial>``)."""
    return member.rpartition("/")[0]


def member_cells(verdicts: pa.Table, axis: str) -> dict[str, int]:
    """Cells outside the reference class along ``axis``, with the number of their divergences."""
    import pyarrow.compute as pc

    rows = verdicts.filter(pc.equal(verdicts.column("axis"), axis))
    counts: dict[str, int] = {}
    for entry in pc.value_counts(pc.list_flatten(rows.column("members"))).to_pylist():
        cell = cell_of_member(entry["values"])
        counts[cell] = counts.get(cell, 0) + entry["counts"]
    return counts


def failing_axes(document: Mapping[str, Any]) -> list[str]:
    """Axes whose gate fails."""
    return [a["axis"] for a in document["axes"] if a["result"] == "fails"]


def axis_verdict(axis: Mapping[str, Any]) -> str:
    """The worst verdict that an axis' comparisons came to."""
    from raytest.schema import Verdict

    if not axis["comparisons"]["made"]:
        return "not compared"
    order = [v.value for v in Verdict]
    return max(axis["verdicts"], key=order.index, default=Verdict.BITWISE.value)
