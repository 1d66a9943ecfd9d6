"""Runs the suspects of a run again: on their own devices, on others of the node, with ranks
swapped.

A slot that stood outside the majority once may be a bad device, a bad node, or chance. What it
gives now is held against what the majority of the other slots gave in the run; the run's own
verdict stays as it was, and what was seen is kept beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from raytest import cluster
from raytest.compare.statistics import clopper_pearson
from raytest.configure import target_of
from raytest.errors import ExitCode, UsageError
from raytest.explain.ask_again import Asked, Bench, Digests, digests_of
from raytest.explain.interventions import Trialled
from raytest.explain.replay_pair import read_requests, require_same_cluster
from raytest.inventory import Inventory, Slot
from raytest.plan import Cell, Plan
from raytest.runner import find_model, vllm_version
from raytest.store import RunFolder, write_json

MOST_SUSPECTS = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a suspect again, and how often it stood outside the majority: ``outside`` of
    ``repeats``, with the exact 95% interval of its rate. ``error``: why there is no answer."""

    name: str
    slot: str
    repeats: int
    outside: int
    rate_low: float
    rate_high: float
    most_requests: int
    error: str


def retest_run(
    folder: RunFolder, address: str, tell: Callable[[str], None], *, times: int
) -> dict[str, Any]:
    """Run every suspect of the run's verdict again, ``times`` repeats an engine start (some more
    where they disagree).

    Returns the document, also written to ``retest/<n>.json``. Raises RaytestError.
    """
    verdict = folder.verdict()
    if verdict is None:
        raise UsageError(f"{folder.path}: has no verdict yet; finish it with --resume first")
    plan, spec = folder.plan(), folder.spec()
    suspects = list(_suspects(verdict, plan))
    results = []
    if suspects:
        model, requests = find_model(spec), read_requests(folder)
        with cluster.connect(address, spec.cluster):
            inventory = cluster.take_inventory(spec.placement.share)
            target = target_of(inventory, vllm_version())
            require_same_cluster(folder, [c for c, _ in suspects], inventory, target)
            for cell, entity in suspects:
                bench = Bench(
                    folder,
                    spec,
                    requests,
                    model,
                    inventory,
                    target,
                    majority(folder, plan, cell),
                    times,
                    "python",
                )
                results.append(_retest(bench, plan, cell, entity, inventory, tell))
    return _keep(folder, results)


def _suspects(verdict: Mapping[str, Any], plan: Plan) -> Iterator[tuple[Cell, str]]:
    """A cell for each suspect, the least likely by chance first; a node's only where none of its
    slots is a suspect itself."""
    listed = sorted(verdict["suspects"], key=lambda s: (s["axis"] != "gpu", s["p_value"] or 0.0))
    seen: set[str] = set()
    for suspect in listed[:MOST_SUSPECTS]:
        for cell in plan.cells:
            at = {cell.slot.name, *(cell.slot.nodes if suspect["axis"] == "node" else ())}
            if cell.variant == suspect["variant"] and suspect["entity"] in at:
                if seen.isdisjoint({cell.cell_id, *cell.slot.nodes}):
                    yield cell, suspect["entity"]
                seen.update({cell.cell_id, *(cell.slot.nodes if suspect["axis"] == "gpu" else ())})
                break


def majority(folder: RunFolder, plan: Plan, suspect: Cell) -> Digests:
    """What more than half of the other slots' trials gave, per request and sample, in the
    arrangement that is asked for again (the plan's first)."""
    votes: dict[tuple[str, int], Counter[tuple[bytes, bytes]]] = {}
    arrangement = plan.trials[0].arrangement
    kind = {t.trial for t in plan.trials if t.arrangement == arrangement}
    others = {
        c.cell_id
        for c in plan.cells
        if c.variant == suspect.variant and c.cell_id != suspect.cell_id
    }
    for cell_id, launch, trial in sorted(folder.finished_trials()):
        if cell_id in others and trial in kind:
            for key, digests in digests_of(folder, (cell_id, launch, trial)):
                votes.setdefault(key, Counter())[digests] += 1
    return {
        key: value
        for key, counted in votes.items()
        for value, n in counted.most_common(1)
        if 2 * n > sum(counted.values())
    }


def _retest(
    bench: Bench,
    plan: Plan,
    cell: Cell,
    entity: str,
    inventory: Inventory,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    variant = next(v for v in bench.spec.variants if v.name == cell.variant)
    arms: list[Arm] = []
    for name, slot in ways(cell.slot, plan, inventory):
        tell(f"{entity} ({cell.variant}): {name}: {slot.name}")
        wanted = Trialled(variant, slot, plan.trials[0], ())
        (asked,) = bench.ask(wanted, [plan.trials[0]], f"retest-{cell.cell_id}-{len(arms)}")
        arms.append(_arm(name, slot, asked))
        tell(f"    {_said(arms[-1])}")
    return {
        "entity": entity,
        "variant": cell.variant,
        "slot": cell.slot.name,
        "requests": len(bench.expected),
        "arms": [asdict(a) for a in arms],
        "conclusion": conclude(arms),
    }


def ways(own: Slot, plan: Plan, inventory: Inventory) -> list[tuple[str, Slot]]:
    """The suspect's own devices; as many others of its node; its own with ranks swapped."""
    found = [("same devices", own)]
    used = {d.uuid for d in own.devices}
    node = inventory.node(own.nodes[0])
    free = [d for d in node.devices if d.uuid not in used and d.share == own.devices[0].share]
    if len(own.nodes) == 1 and len(free) >= len(own.devices):
        found.append(("other devices of the node", Slot(tuple(free[: len(own.devices)]))))
    else:
        away = next((c.slot for c in plan.cells if _is_elsewhere(c.slot, own)), None)
        if away is not None:
            found.append(("devices of another node", away))
    if len(own.devices) > 1:
        found.append(("same devices, ranks swapped", Slot(own.devices[::-1])))
    return found


def _is_elsewhere(slot: Slot, own: Slot) -> bool:
    return len(slot.devices) == len(own.devices) and set(slot.nodes).isdisjoint(own.nodes)


def _arm(name: str, slot: Slot, asked: Asked) -> Arm:
    outside = asked.repeats - asked.equal
    bounds = clopper_pearson(outside, asked.repeats)
    return Arm(
        name,
        slot.name,
        asked.repeats,
        outside,
        bounds.low,
        bounds.high,
        asked.differed,
        asked.error,
    )


def conclude(arms: Sequence[Arm]) -> str:
    """Where the fault goes, in one sentence."""
    own, others = arms[0], [a for a in arms[1:] if "ranks" not in a.name and not a.error]
    if own.error:
        return f"not told: {own.error}"
    if not own.outside:
        return (
            f"not reproduced in {own.repeats} repeats: the true rate is below "
            f"{100 * own.rate_high:.2g}% (95%)"
        )
    rate = f"reproduced in {own.outside} of {own.repeats} repeats"
    if not others:
        return f"{rate}; no other devices to tell device and node apart"
    if any(a.outside for a in others):
        return f"{rate}, and on {others[0].name} too: it does not follow the device"
    return f"{rate}, and on {others[0].name} in none of {others[0].repeats}: it follows the device"


def _keep(folder: RunFolder, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Write the document under the next number: what earlier calls saw stays."""
    failed = any(a["error"] for r in results for a in r["arms"])
    number = len(list((folder.path / "retest").glob("*.json"))) + 1
    document = {
        "schema": "raytest.retest/1",
        "run_id": folder.run_id,
        "made_at": datetime.now(UTC).isoformat(),
        "suspects": list(results),
        "exit_code": int(ExitCode.INCONCLUSIVE if failed else ExitCode.PASS),
    }
    if results:
        write_json(folder.path / "retest" / f"{number}.json", document)
    return document


def _said(arm: Arm) -> str:
    if arm.error:
        return f"no answer: {arm.error}"
    return (
        f"outside the majority in {arm.outside} of {arm.repeats} repeats "
        f"({100 * arm.rate_low:.2g}% to {100 * arm.rate_high:.2g}%, 95%), "
        f"at most {arm.most_requests} requests at once"
    )


def lines_of(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    if not document["suspects"]:
        return [f"{document['run_id']}: no suspects; nothing to run again"]
    lines = []
    for suspect in document["suspects"]:
        lines.append(f"{suspect['entity']} ({suspect['variant']}): {suspect['conclusion']}")
        lines += [f"    {a['name']} ({a['slot']}): {_said(Arm(**a))}" for a in suspect["arms"]]
    return lines
