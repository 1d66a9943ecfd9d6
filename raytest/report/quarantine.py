"""Suspects as a drain script eats them: a GPU UUID or hostname a line, then a tab and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytest.report.material import Material
from raytest.report.table import printable
from raytest.store import read_json


def quarantine_text(material: Material) -> str:
    """One line per device or host that a finding asks to isolate, sorted; empty where none does.

    Findings to monitor, and systemic ones (no single device explains them), name nobody.
    """
    lines = [f"{printable(entity)}\t# {printable(why)}\n" for entity, why in isolated(material)]
    return "".join(sorted(lines))


def isolated(material: Material) -> Iterator[tuple[str, str]]:
    """Device UUIDs and hostnames, each once, with where it is and all reasons."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    again = _retests(material)
    for finding in material.document["findings"]:
        if finding["severity"] == "isolate":
            why = f"{finding['code']}: {finding['detail']}"
            for entity, place in _places(finding["code"], finding["entities"], material):
                reasons = dict.fromkeys([why, *again.get(entity, ())])
                found.setdefault(place, {}).update(reasons)
    for (entity, where), reasons in found.items():
        yield entity, f"{where}{material.run_id}: {'; '.join(reasons)}"


def _retests(material: Material) -> dict[str, list[str]]:
    """What running suspects again said, by slot or node, in the order in which it was done."""
    said: dict[str, list[str]] = {}
    numbered = (material.folder.path / "retest").glob("*.json")
    for path in sorted(numbered, key=lambda p: (len(p.stem), p.stem)):
        for suspect in read_json(path).get("suspects", ()):
            said.setdefault(suspect["entity"], []).append(f"run again: {suspect['conclusion']}")
    return said


def _places(
    code: str, entities: Sequence[str], material: Material
) -> Iterator[tuple[str, tuple[str, str]]]:
    """By slot, cell or node of a finding its devices or hosts, each with where it is as a
    prefix."""
    hostnames, cells = material.hostnames(), material.cell_of()
    slots = {c.slot.name: c for c in material.plan.cells}
    for entity in entities:
        if code == "outlier-node":
            yield from ((entity, (hostnames.get(n, n), "")) for n in entity.split("+"))
            continue
        cell = slots.get(entity) or cells.get(entity)
        for device in cell.slot.devices if cell else ():
            host = hostnames.get(device.node, device.node)
            yield entity, (device.uuid, f"{host} GPU {device.index}: ")
