"""The report as one HTML file: no network, no script, opens from disk and in a mail's preview."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raytest.report import charts
from raytest.report.agreement import Agreement, cell_agreement
from raytest.report.decode import decoder
from raytest.report.diagnosis import diagnosis_lines, diagnosis_of
from raytest.report.environment import fingerprint_differences
from raytest.report.facts import bound_words, duration_s, duration_words, percent, trials_words
from raytest.report.material import Material, axis_verdict
from raytest.report.page import render
from raytest.report.quarantine import isolated
from raytest.report.spec_toml import spec_toml
from raytest.report.spread import SPREAD_HEADER, spread_rows
from raytest.report.streams import divergent_rows, streams
from raytest.report.terminal import next_steps
from raytest.report.timeline import spans

MOST_STREAMS = 200
MOST_CLASSES = 60
MOST_CELLS = 40
LARGEST_PICTURE = 400_000
PICTURES = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True, slots=True)
class Box:
    """One slot of the topology view. ``colour`` is the class's rank within its variant, capped."""

    label: str
    colour: int
    class_name: str
    title: str


def html_text(material: Material) -> str:
    """The whole page."""
    document = material.document
    agreement = cell_agreement(material)
    rows = divergent_rows(material, None)
    differences, n_facts = fingerprint_differences(material)
    found = spans(material.folder.events())
    return render(
        "report.html",
        name=material.spec.name,
        description=material.spec.description,
        run_id=material.run_id,
        judged=material.judged,
        document=document,
        trials=trials_words(document["trials"]),
        duration=duration_words(duration_s(document["run"])),
        axes=[_axis(a) for a in document["axes"]],
        spread_header=SPREAD_HEADER,
        spread=spread_rows(document["axes"]),
        diagnosis=diagnosis_lines(diagnosis_of(material.folder)),
        suspects=list(isolated(material)),
        findings=_findings(document["findings"]),
        next_steps=next_steps(document, material.run_id, material.judged),
        classes=agreement.classes[:MOST_CLASSES],
        n_classes=len(agreement.classes),
        most_cells=MOST_CELLS,
        topology=_topology(material, agreement),
        sampled=agreement.sampled,
        charts=_charts(material, agreement, found),
        streams=list(streams(material, rows[:MOST_STREAMS], decoder(material.spec))),
        n_streams=len(rows),
        differences=differences,
        n_facts=n_facts,
        n_spans=len(found),
        most_spans=charts.MOST_SPANS,
        pictures=_pictures(material),
        spec=spec_toml(material.folder.manifest["spec"]),
        environment=material.folder.manifest.get("environment", {}),
    )


def _axis(axis: Mapping[str, Any]) -> dict[str, Any]:
    requests, metrics = axis["requests"], axis["metrics"]
    return {
        **axis,
        "verdict": axis_verdict(axis),
        "differ": requests["compared"] - requests["bitwise"],
        "bound": bound_words(axis),
        "agreement": None if metrics["agreement"] is None else percent(metrics["agreement"]),
    }


def _findings(findings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Findings of one kind as one: how many, whom they name, and the first one's words."""
    kinds: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for f in findings:
        kinds.setdefault((f["severity"], f["code"], f["axis"] or ""), []).append(f)
    return [
        {**found[0], "n": len(found), "entities": [e for f in found for e in f["entities"]]}
        for found in kinds.values()
    ]


def _charts(material: Material, agreement: Agreement, found: Sequence[Any]) -> dict[str, str]:
    axes = material.document["axes"]
    differences: dict[str, list[float]] = {}
    margins: dict[str, list[float]] = {}
    columns = ("axis", "max_logprob_difference", "margin")
    values = [material.verdicts.column(c).to_pylist() for c in columns]
    for axis, difference, margin in zip(*values, strict=True):
        if difference is not None:
            differences.setdefault(axis, []).append(difference)
        if margin is not None:
            margins.setdefault(axis, []).append(margin)
    drawn = {
        "survival": charts.survival(axes),
        "differences": charts.distribution(
            differences,
            "differences",
            "largest |Δ logprob| (nats)",
            "Largest logprob difference of each divergence before its flip, by axis",
        ),
        "margins": charts.distribution(
            margins,
            "margins",
            "top-1/top-2 margin (nats)",
            "Margin between the two tokens at each flip, by axis",
        ),
        "timeline": charts.timeline(found),
    }
    if agreement.classes:
        what = "Share of equal results of each two cells"
        drawn["bitwise"] = charts.heat_map(
            agreement, agreement.bitwise, "bitwise", f"{what}: tokens and logprob bits"
        )
        drawn["tokens"] = charts.heat_map(
            agreement, agreement.tokens, "tokens", f"{what}: tokens alone"
        )
    return drawn


def _topology(material: Material, agreement: Agreement) -> dict[str, dict[str, list[Box]]]:
    """Boxes by variant and node (hostname beside the name where they differ)."""
    ranks, names = agreement.rank_of(), agreement.name_of()
    hostnames = material.hostnames()
    found: dict[str, dict[str, list[Box]]] = {}
    for cell in material.plan.cells:
        slot = cell.slot
        nodes = [n if hostnames.get(n, n) == n else f"{n} ({hostnames[n]})" for n in slot.nodes]
        rank = ranks.get(cell.cell_id)
        name = names.get(cell.cell_id, "no results")
        devices = ", ".join(f"{d.uuid} {d.model}".strip() for d in slot.devices)
        title = f"{cell.cell_id}: class {name}: {devices}"
        box = Box(
            slot.local if len(slot.nodes) == 1 else slot.name,
            8 if rank is None else min(rank, 7),
            name.rpartition(" ")[2] if rank is not None else "?",
            title,
        )
        found.setdefault(cell.variant, {}).setdefault(" + ".join(nodes), []).append(box)
    return found


def _pictures(material: Material) -> list[tuple[str, str]]:
    """Plots that localize left, as data URIs: an image can run no script."""
    found = []
    for path in sorted((material.folder.path / "activations").glob("*/*")):
        kind = PICTURES.get(path.suffix)
        if kind and path.stat().st_size <= LARGEST_PICTURE:
            data = base64.b64encode(path.read_bytes()).decode("ascii")
            found.append((f"{path.parent.name}/{path.name}", f"data:{kind};base64,{data}"))
    return found[:8]
