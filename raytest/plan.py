"""spec x inventory -> cells, launches, trials, and which comparisons they allow. Pure; no Ray."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raytest.digest import json_digest
from raytest.errors import UnavailableError, UsageError
from raytest.inventory import Device, Inventory, Node, Slot
from raytest.schema import Arrangement, Axis
from raytest.spec import Spec, Variant

# What is held equal when observations are compared along an axis; what is not held and not in
# VARIED is free to follow from the varied value (a TP=2 slot has more devices than a TP=1 slot).
HELD: Mapping[Axis, tuple[str, ...]] = {
    Axis.REPEAT: ("cell_id", "launch", "arrangement"),
    Axis.LAUNCH: ("cell_id", "arrangement", "repeat"),
    Axis.ARRANGEMENT: ("cell_id", "launch", "repeat"),
    Axis.GPU: ("variant", "node", "launch", "arrangement", "repeat"),
    Axis.NODE: ("variant", "local", "launch", "arrangement", "repeat"),
    Axis.TP: ("family", "pipeline_parallel_size", "lead", "launch", "arrangement", "repeat"),
    Axis.PP: ("family", "tensor_parallel_size", "lead", "launch", "arrangement", "repeat"),
    Axis.VARIANT: (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "lead",
        "launch",
        "arrangement",
        "repeat",
    ),
}
VARIED: Mapping[Axis, str] = {
    Axis.REPEAT: "repeat",
    Axis.LAUNCH: "launch",
    Axis.ARRANGEMENT: "arrangement",
    Axis.GPU: "slot",
    Axis.NODE: "node",
    Axis.TP: "tensor_parallel_size",
    Axis.PP: "pipeline_parallel_size",
    Axis.VARIANT: "variant",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One variant on one slot, with the keys that comparisons group by.

    ``family`` is equal for variants that differ in nothing but name, TP, PP and what follows from
    them.
    """

    cell_id: str
    variant: str
    slot: Slot
    launches: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    family: str

    def keys(self) -> dict[str, str | int]:
        """The columns of :data:`HELD` and :data:`VARIED` that belong to the cell."""
        return {
            "cell_id": self.cell_id,
            "variant": self.variant,
            "slot": self.slot.name,
            "node": self.slot.node,
            "local": self.slot.local,
            "lead": self.slot.lead,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "family": self.family,
        }


@dataclass(frozen=True, slots=True)
class Trial:
    """One pass over the workload; the same list of trials runs in every launch."""

    trial: int
    arrangement: Arrangement
    repeat: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One start of a cell's engine, a fresh process."""

    cell: Cell
    launch: int


@dataclass(frozen=True, slots=True)
class Impossible:
    """A variant that no slot can hold, and why."""

    variant: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that will run. ``varied`` lists the axes along which comparisons exist."""

    cells: tuple[Cell, ...]
    trials: tuple[Trial, ...]
    impossible: tuple[Impossible, ...]
    varied: tuple[Axis, ...]

    def launches(self) -> Iterator[Launch]:
        """Launches in running order: every cell's first, then every cell's second, …"""
        for launch in range(max((c.launches for c in self.cells), default=0)):
            yield from (Launch(c, launch) for c in self.cells if launch < c.launches)

    @property
    def n_trials(self) -> int:
        """Trials over all launches."""
        return sum(c.launches for c in self.cells) * len(self.trials)

    def require_possible(self) -> None:
        """Raise UnavailableError naming each variant that fits nowhere."""
        if self.impossible:
            raise UnavailableError(
                "\n".join(f"variant {i.variant}: {i.reason}" for i in self.impossible)
            )


def make_plan(spec: Spec, inventory: Inventory, source: str = "spec") -> Plan:
    """Place every variant. Raises UsageError for a gate on an axis that the plan never varies."""
    nodes = _eligible(spec, inventory)
    cells: list[Cell] = []
    impossible: list[Impossible] = []
    for variant in spec.variants:
        slots, reason = _slots(spec, variant, nodes, inventory)
        if not slots:
            impossible.append(Impossible(variant.name, reason))
        cells += [_cell(spec, variant, slot) for slot in slots]
    trials = tuple(
        Trial(i, arrangement, repeat)
        for i, (arrangement, repeat) in enumerate(
            (a, r) for a in spec.trials.arrangements for r in range(spec.trials.repeats)
        )
    )
    plan = Plan(tuple(cells), trials, tuple(impossible), tuple(varied_axes(cells, trials)))
    if not impossible:
        _check_gates(spec, plan, source)
    return plan


def family(spec: Spec, variant: Variant) -> str:
    """Digest of what makes two variants the same but for name, TP, PP and executor."""
    return json_digest("family", family_settings(spec, variant))


def family_settings(spec: Spec, variant: Variant) -> dict[str, Any]:
    """The settings that :func:`family` digests, resolved against the spec's own sections."""
    return {
        "model": variant.model or spec.model.path,
        "dtype": variant.dtype or spec.model.dtype,
        "level": spec.level(variant),
        "profile": spec.profile(variant),
        "logprobs": spec.logprobs(variant),
        "engine": variant.engine,
        "env": variant.env,
        "runtime_env": variant.runtime_env,
        "fault": variant.fault,
    }


def varied_axes(cells: Sequence[Cell], trials: Sequence[Trial]) -> list[Axis]:
    """Axes along which at least two observations differ with everything in HELD equal."""
    rows: list[dict[str, Any]] = [
        {**c.keys(), "launch": launch, "arrangement": t.arrangement, "repeat": t.repeat}
        for c in cells
        for launch in range(c.launches)
        for t in trials
    ]
    return [axis for axis in HELD if _varies(rows, axis)]


def _varies(rows: Iterable[Mapping[str, Any]], axis: Axis) -> bool:
    seen: dict[tuple[Any, ...], Any] = {}
    for row in rows:
        value = row[VARIED[axis]]
        if seen.setdefault(tuple(row[k] for k in HELD[axis]), value) != value:
            return True
    return False


def _check_gates(spec: Spec, plan: Plan, source: str) -> None:
    lines = []
    for axis in spec.gates.stated():
        if axis in plan.varied or axis is Axis.RUN:
            continue
        lines.append(f"{source}: gates.{axis}: the plan never varies {axis}; {_advice(spec, axis)}")
    if lines:
        raise UsageError("\n".join(lines))


def _advice(spec: Spec, axis: Axis) -> str:
    if axis in (Axis.TP, Axis.PP):
        field = VARIED[axis]
        sizes = {getattr(v, field) for v in spec.variants}
        if len(sizes) > 1:
            differences = _differences(spec)
            return f"variants of other {field} differ in {differences} too: gate 'variant' instead"
        return f"add a variant with another {field}, or remove the gate"
    return {
        Axis.REPEAT: "set trials.repeats to at least 2, or remove the gate",
        Axis.LAUNCH: "set trials.launches to at least 2, or remove the gate",
        Axis.ARRANGEMENT: "name two or more trials.arrangements, or remove the gate",
        Axis.GPU: "it needs two slots of one variant on one node (placement.scope = 'every-gpu')",
        Axis.NODE: "it needs the same slot on two nodes (placement.scope = 'every-node')",
        Axis.VARIANT: "add a variant of the same TP and PP size, or remove the gate",
    }[axis]


def _differences(spec: Spec) -> str:
    settings = [family_settings(spec, v) for v in spec.variants]
    differing = [k for k in settings[0] if any(s[k] != settings[0][k] for s in settings)]
    return ", ".join(differing) or "their slots"


def _eligible(spec: Spec, inventory: Inventory) -> list[Node]:
    """Nodes that pass the placement's filters, each with the devices that may be used."""
    where = spec.placement
    kind = inventory.device_kind if where.devices == "auto" else where.devices
    nodes = []
    for node in inventory.nodes:
        if where.hosts and node.hostname not in where.hosts and node.name not in where.hosts:
            continue
        if any(node.labels.get(k) != v for k, v in where.labels.items()):
            continue
        devices = tuple(
            d
            for d in node.devices
            if d.kind == kind
            and (where.gpu_model is None or where.gpu_model.lower() in d.model.lower())
        )
        if devices:
            nodes.append(Node(node.name, node.node_id, node.hostname, devices, node.labels))
    return nodes


def _slots(
    spec: Spec, variant: Variant, nodes: Sequence[Node], inventory: Inventory
) -> tuple[list[Slot], str]:
    """The slots of one variant, or none and the reason."""
    explicit = [s for s in spec.placement.slots if not s.variants or variant.name in s.variants]
    if spec.placement.slots:
        return _explicit_slots(spec, variant, explicit, inventory)
    if not nodes:
        return [], f"no node passes the placement's filters ({len(inventory.nodes)} in the cluster)"
    world = variant.world_size
    scope = variant.scope or spec.placement.scope
    if spec.placement.spread and world > 1:
        return _spread_slots(variant, nodes, scope)
    slots = [s for node in nodes for s in _node_slots(node, world, scope, spec.placement.rotations)]
    if not slots:
        most = max(nodes, key=lambda n: len(n.devices))
        return [], (
            f"needs {world} devices on one node, but the largest ({most.name}) has "
            f"{len(most.devices)}; placement.spread = true lets an engine span nodes"
        )
    return (slots[:1] if scope == "one" else slots), ""


def _node_slots(node: Node, world: int, scope: str, rotations: bool) -> list[Slot]:
    """Disjoint groups of consecutive devices (only the first group unless every-gpu), and their
    rotations where each device is to take each rank. Devices that share a GPU never form a
    group."""
    groups: list[tuple[Device, ...]] = []
    for share in sorted({d.share for d in node.devices}):
        layer = [d for d in node.devices if d.share == share]
        groups += [tuple(layer[i : i + world]) for i in range(0, len(layer) - world + 1, world)]
    if scope != "every-gpu":
        groups = groups[:1]
    if rotations:
        groups = [g[i:] + g[:i] for g in groups for i in range(len(g))]
    return [Slot(g) for g in groups]


def _spread_slots(variant: Variant, nodes: Sequence[Node], scope: str) -> tuple[list[Slot], str]:
    """Ranks over several nodes: one pipeline stage a node where PP > 1, else one TP rank a node."""
    n_nodes = (
        variant.pipeline_parallel_size if variant.pipeline_parallel_size > 1 else variant.world_size
    )
    per_node = variant.world_size // n_nodes
    able = [n for n in nodes if len(n.devices) >= per_node]
    if len(able) < n_nodes:
        return (
            [],
            f"needs {n_nodes} nodes with {per_node} devices each, the cluster has {len(able)}",
        )
    slots = []
    for first in range(0, len(able) - n_nodes + 1, n_nodes):
        members = able[first : first + n_nodes]
        rounds = min(len(n.devices) for n in members) // per_node
        slots += [
            Slot(tuple(d for n in members for d in n.devices[r * per_node : (r + 1) * per_node]))
            for r in range(rounds if scope == "every-gpu" else 1)
        ]
    return (slots[:1] if scope == "one" else slots), ""


def _explicit_slots(
    spec: Spec, variant: Variant, wanted: Sequence[Any], inventory: Inventory
) -> tuple[list[Slot], str]:
    kind = inventory.device_kind if spec.placement.devices == "auto" else spec.placement.devices
    slots = []
    for slot in wanted:
        try:
            node = inventory.node(slot.node)
        except KeyError:
            names = ", ".join(n.name for n in inventory.nodes)
            return [], f"placement.slots names node {slot.node!r}; the cluster has {names}"
        by_index = {d.index: d for d in node.devices if d.kind == kind and d.share == 0}
        absent = [i for i in slot.devices if i not in by_index]
        if absent:
            return [], (
                f"placement.slots asks for {kind.upper()} {absent[0]} of {node.name}, "
                f"which has {len(by_index)} ({', '.join(map(str, sorted(by_index))) or 'none'})"
            )
        if len(slot.devices) != variant.world_size:
            return [], (
                f"placement.slots gives {len(slot.devices)} devices on {node.name}, "
                f"TP x PP needs {variant.world_size}"
            )
        slots.append(Slot(tuple(by_index[i] for i in slot.devices)))
    return slots, "" if slots else "placement.slots has no slot for it"


def _cell(spec: Spec, variant: Variant, slot: Slot) -> Cell:
    return Cell(
        cell_id=_cell_id(variant.name, slot),
        variant=variant.name,
        slot=slot,
        launches=variant.launches or spec.trials.launches,
        tensor_parallel_size=variant.tensor_parallel_size,
        pipeline_parallel_size=variant.pipeline_parallel_size,
        family=family(spec, variant),
    )


def _cell_id(variant: str, slot: Slot) -> str:
    """A folder name: readable, unique (a digest is added where characters had to go), not too
    long."""
    text = f"{variant}@{slot.name}"
    safe = re.sub(r"[^A-Za-z0-9@._=-]+", "-", text)
    if len(safe) > 120 or safe.count("-") != text.count("-") + sum(text.count(c) for c in ":,+"):
        safe = f"{safe[:100]}-{json_digest('cell', text)[:8]}"
    return safe


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Plain data for the manifest."""
    return asdict(plan)


def plan_from_json(data: Mapping[str, Any]) -> Plan:
    """The inverse of :func:`plan_to_json`."""
    cells = tuple(
        Cell(**{**c, "slot": Slot(tuple(Device(**d) for d in c["slot"]["devices"]))})
        for c in data["cells"]
    )
    trials = tuple(
        Trial(t["trial"], Arrangement(t["arrangement"]), t["repeat"]) for t in data["trials"]
    )
    impossible = tuple(Impossible(**i) for i in data["impossible"])
    return Plan(cells, trials, impossible, tuple(Axis(a) for a in data["varied"]))
