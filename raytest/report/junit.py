"""JUnit XML that the strict readers take: a test case per axis and variant, per slot, per control.

Failure: something differs that must not. Error: it could not be run or proved. Skipped: the plan
does not vary it. The last case is the run's own verdict, so the file is red wherever the exit code
is not 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from raytest.plan import HELD, Cell, varied_axes
from raytest.report.facts import duration_s, interval_words
from raytest.report.material import Material, failing_axes, member_cells
from raytest.report.table import printable
from raytest.schema import Axis

LONGEST = 4000
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Case:
    """``state`` is ``passed``, ``failure``, ``error`` or ``skipped``."""

    suite: str
    name: str
    state: str
    message: str = ""
    detail: str = field(default="")


def junit_xml(material: Material) -> str:
    """The document as text."""
    document = material.document
    cases = [*_axes(material), *_slots(material), *_rest(document)]
    root = Element("testsuites", name="raytest")
    for suite in dict.fromkeys(c.suite for c in cases):
        _suite(root, material, suite, [c for c in cases if c.suite == suite])
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, material: Material, name: str, cases: Sequence[Case]) -> None:
    run = material.document["run"]
    hosts = material.hostnames().values()
    suite = SubElement(
        root,
        "testsuite",
        name=f"raytest.{_clean(material.spec.name)}.{name}",
        tests=str(len(cases)),
        failures=str(sum(c.state == "failure" for c in cases)),
        errors=str(sum(c.state == "error" for c in cases)),
        skipped=str(sum(c.state == "skipped" for c in cases)),
        time=f"{duration_s(run) or 0:.3f}",
        timestamp=_timestamp(run.get("created_at")),
        hostname=_clean(min(hosts, default="localhost")),
    )
    properties = SubElement(suite, "properties")
    for key, value in _properties(material).items():
        SubElement(properties, "property", name=key, value=_clean(value))
    for case in cases:
        element = SubElement(
            suite, "testcase", name=_clean(case.name), classname=suite.attrib["name"], time="0"
        )
        if case.state != "passed":
            told = SubElement(element, case.state, message=_clean(case.message), type=case.suite)
            told.text = _clean(case.detail) or None
        elif case.detail:
            SubElement(element, "system-out").text = _clean(case.detail)


def _properties(material: Material) -> dict[str, str]:
    document = material.document
    return {
        "run_id": material.run_id,
        "verdict": document["verdict"],
        "exit_code": str(document["exit_code"]),
        "finished": str(material.judged).lower(),
        "raytest_version": str(document["run"].get("raytest_version", "")),
        "judgement_digest": str(document["judgement_digest"]),
    }


def _axes(material: Material) -> Iterator[Case]:
    """A case per axis and variant."""
    by_axis = {a["axis"]: a for a in material.document["axes"]}
    incomplete = _incomplete(material)
    variants = [v.name for v in material.spec.variants]
    cells = {v: [c for c in material.plan.cells if c.variant == v] for v in variants}
    for axis in HELD:
        judged = by_axis.get(axis.value)
        outside = member_cells(material.verdicts, axis.value)
        for variant in variants:
            name = f"{axis.value}[{variant}]"
            if judged is None or not _applies(axis, variant, cells, material):
                yield Case("axes", name, "skipped", f"the plan does not vary {axis.value} here")
                continue
            holes = [t for c in cells[variant] for t in incomplete.get(c.cell_id, ())]
            concerned = sum(outside.get(c.cell_id, 0) for c in cells[variant])
            elsewhere = bool(incomplete) and not holes
            yield _axis_case(name, judged, concerned, not outside, holes, elsewhere)


def _applies(
    axis: Axis, variant: str, cells: Mapping[str, Sequence[Cell]], material: Material
) -> bool:
    """Whether the plan compares this variant along the axis, with itself or with another."""
    own = cells[variant]
    if axis not in (Axis.TP, Axis.PP, Axis.VARIANT):
        return axis in varied_axes(own, material.plan.trials)
    return any(
        axis in varied_axes([*own, *theirs], material.plan.trials[:1])
        for other, theirs in cells.items()
        if other != variant
    )


def _axis_case(
    name: str,
    axis: Mapping[str, Any],
    concerned: int,
    nobody: bool,
    holes: Sequence[str],
    elsewhere: bool,
) -> Case:
    """``nobody``: nothing differs along the axis at all; ``holes``: what this variant lacks;
    ``elsewhere``: only other variants lack something."""
    told = f"{axis['contract']}: {axis['reason']}"
    detail = f"{told}\nrequests that differ: {interval_words(axis)}"
    if not concerned and not nobody:
        detail = f"no result of this variant stands outside; the axis: {detail}"
    if axis["result"] == "fails" and (concerned or nobody):
        return Case("axes", name, "failure", told, f"{detail}\n{_worst(axis)}")
    if axis["result"] == "undecided" and not (elsewhere and axis["comparisons"]["made"]):
        return Case("axes", name, "error", told, detail)
    if holes:
        return Case("axes", name, "error", f"{len(holes)} trials or launches are missing", detail)
    return Case("axes", name, "passed", detail=detail)


def _worst(axis: Mapping[str, Any]) -> str:
    worst = axis["worst"]
    if worst is None:
        return ""
    return (
        f"worst: request {worst['request_id']} sample {worst['sample_index']}, {worst['verdict']} "
        f"({worst['reason']}) at position {worst['position']}: {worst['reference']} against "
        f"{', '.join(worst['members'][:8])}"
    )


def _incomplete(material: Material) -> dict[str, list[str]]:
    """What is missing or failed, by cell."""
    document = material.document
    found: dict[str, list[str]] = {}
    for trial in document["trials"]["missing"]:
        found.setdefault(trial.rpartition("/")[0], []).append(f"{trial} is missing")
    for failure in document["failures"]:
        text = f"launch {failure['launch']} failed: {failure['reason']}"
        found.setdefault(failure["cell_id"], []).append(text)
    for error in document["errors"]:
        text = f"{error['n']} observations of {error['trial']} are errors: {error['error']}"
        found.setdefault(error["trial"].rpartition("/")[0], []).append(text)
    return found


def _slots(material: Material) -> Iterator[Case]:
    """A case per cell: whether the slot stands outside the majority on a gated axis."""
    incomplete = _incomplete(material)
    outside: dict[str, list[str]] = {}
    for axis in failing_axes(material.document):
        for cell_id, n in member_cells(material.verdicts, axis).items():
            outside.setdefault(cell_id, []).append(
                f"{axis}: {n} results outside the reference class"
            )
    for cell in material.plan.cells:
        devices = ", ".join(d.uuid for d in cell.slot.devices)
        detail = f"node {cell.slot.node}\ndevices {devices}"
        found = outside.get(cell.cell_id, [])
        holes = incomplete.get(cell.cell_id, [])
        if found:
            lines = "\n".join([*found, *holes[:20], detail])
            yield Case("slots", cell.cell_id, "failure", found[0], lines)
        elif holes:
            lines = "\n".join([*holes[:20], detail])
            yield Case("slots", cell.cell_id, "error", holes[0], lines)
        else:
            yield Case("slots", cell.cell_id, "passed", detail=detail)


def _rest(document: Mapping[str, Any]) -> Iterator[Case]:
    """Controls, values that cannot be right, and the run itself."""
    for control in document["controls"]:
        state = "passed" if control["caught"] else "error"
        told = f"planted {control['planted']}: {control['detail']}"
        yield Case("controls", control["name"], state, told, told)
    for finding in document["findings"]:
        if finding["category"] == "values":
            entities = "\n".join(finding["entities"])
            state = "passed" if finding["severity"] == "monitor" else "failure"
            yield Case("values", finding["code"], state, finding["detail"], entities)
    compared = document.get("baseline")
    if compared:
        told = "; ".join(compared["reasons"])
        title = f"{compared['name']}/{compared['number']}"
        yield Case("baseline", title, _state(compared["verdict"]), told, told)
    reasons = list(document["reasons"])
    state = _state(document["verdict"])
    told = "; ".join(reasons[:3])
    yield Case("run", "verdict", state, f"{document['verdict']}: {told}", "\n".join(reasons))


def _state(verdict: str) -> str:
    return {"pass": "passed", "mismatch": "failure"}.get(verdict, "error")


def _timestamp(value: object) -> str:
    try:
        return datetime.fromisoformat(str(value)).strftime("%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return "1970-01-01T00:00:00"


def _clean(text: str) -> str:
    """What XML may hold, control and format characters shown as escapes, not too long."""
    shown = "\n".join(printable(line) for line in str(text).split("\n"))
    shown = _NOT_XML.sub("\ufffd", shown)
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[:LONGEST]}… ({len(shown) - LONGEST} more characters)"
