"""The sentence that people paste: whether this model, on this hardware and version, is
batch-invariant, and if it is not, the module in which that first shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.compare.gates import GateResult
from raytest.report.facts import bound_words
from raytest.report.material import Material
from raytest.schema import Axis
from raytest.store import read_json


def batch_invariance(material: Material) -> str | None:
    """Said only of runs that demand bitwise equal arrangements and could decide it; None for
    others."""
    axis = next((a for a in material.document["axes"] if a["axis"] == Axis.ARRANGEMENT), None)
    if axis is None or not axis["stated"] or axis["contract"] != "bitwise":
        return None
    what = _subject(material)
    requests = axis["requests"]
    arrangements = ", ".join(a.value for a in material.spec.trials.arrangements)
    if axis["result"] == GateResult.HOLDS:
        return (
            f"Validated: {what}: all {requests['compared']} requests give the same tokens and "
            f"logprob bits in every arrangement ({arrangements}); true rate of requests that "
            f"differ {bound_words(axis)} (95%)."
        )
    if axis["result"] == GateResult.FAILS:
        differ = requests["compared"] - requests["bitwise"]
        return (
            f"Not batch-invariant: {what}: {differ} of {requests['compared']} requests differ "
            f"between arrangements ({arrangements}); {_module(material)}"
        )
    return None


def _subject(material: Material) -> str:
    """Model, dtype, hardware, version and level, as the run's own files have them."""
    spec = material.spec
    models = sorted({d.model for c in material.plan.cells for d in c.slot.devices if d.model})
    version = material.folder.manifest.get("environment", {}).get("vllm") or "of unknown version"
    dtypes = ", ".join(sorted({v.dtype or spec.model.dtype for v in spec.variants}))
    levels = ", ".join(sorted({str(spec.level(v)) for v in spec.variants}))
    hardware = ", ".join(models) or "unnamed devices"
    return f"{spec.model.path} ({dtypes}) on {hardware}, vLLM {version}, level {levels}"


def _module(material: Material) -> str:
    for path in sorted((material.folder.path / "activations").glob("*/localization.json")):
        found: Mapping[str, Any] = read_json(path)
        if found.get("finding") == "found":
            return f"the first module that differs on equal input is {found['module']}."
    return f"'raytest localize {material.run_id}' names the first module."
