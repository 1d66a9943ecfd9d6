"""Suspects as a drain script eats them: a GPU UUID or hostname a line, then a tab and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytest.report.material import Material
from raytest.report.table import printable


def quarantine_text(material: Material) -> str:
    """One line per device or host that a finding asks to isolate, sorted; empty where none does.

    Findings to monitor, and systemic ones (no single device explains them), name nobody.
    """
    lines = [f"{printable(entity)}\t# {printable(why)}\n" for entity, why in isolated(material)]
    return "".join(sorted(lines))


def isolated(material: Material) -> Iterator[tuple[str, str]]:
    """Device UUIDs and hostnames, each once, with where it is and all reasons."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for finding in material.document["findings"]:
        if finding["severity"] == "isolate":
            why = f"{finding['code']}: {finding['detail']}"
            for place in _places(finding["code"], finding["entities"], material):
                found.setdefault(place, {})[why] = None
    for (entity, where), reasons in found.items():
        yield entity, f"{where}{material.run_id}: {'; '.join(reasons)}"


def _places(code: str, entities: Sequence[str], material: Material) -> Iterator[tuple[str, str]]:
    """Devices or hosts of a finding's slots, cells or nodes; where each is, as a prefix."""
    hostnames, cells = material.hostnames(), material.cell_of()
    slots = {c.slot.name: c for c in material.plan.cells}
    for entity in entities:
        if code == "outlier-node":
            yield from ((hostnames.get(n, n), "") for n in entity.split("+"))
            continue
        cell = slots.get(entity) or cells.get(entity)
        for device in cell.slot.devices if cell else ():
            yield device.uuid, f"{hostnames.get(device.node, device.node)} GPU {device.index}: "
