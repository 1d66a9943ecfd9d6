"""Nodes and devices as plain values: what a plan places engines on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU, or one CPU share of a node. ``uuid`` is the GPU's own, or ``cpu:<node>:<index>``.

    ``share`` numbers the engines that the spec lets share one GPU (0 where none do). ``serial`` is
    the board's, '' where it has none to tell.
    """

    node: str
    index: int
    uuid: str
    kind: str
    model: str = ""
    share: int = 0
    busy: str = ""
    serial: str = ""


@dataclass(frozen=True, slots=True)
class Node:
    """``name`` is stable between runs (a label or the hostname); ``node_id`` is Ray's and is
    not."""

    name: str
    node_id: str
    hostname: str
    devices: tuple[Device, ...]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Inventory:
    """All nodes of a cluster, sorted by name."""

    nodes: tuple[Node, ...]

    def node(self, name: str) -> Node:
        """The node called ``name``; KeyError if there is none."""
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    @property
    def devices(self) -> tuple[Device, ...]:
        """Every device of every node, in order."""
        return tuple(d for n in self.nodes for d in n.devices)

    @property
    def device_kind(self) -> str:
        """``gpu`` where any node has one, else ``cpu``."""
        return "gpu" if any(d.kind == "gpu" for d in self.devices) else "cpu"


@dataclass(frozen=True, slots=True)
class Slot:
    """The exact devices one engine occupies, in rank order (rank = pipeline stage * TP + TP
    rank)."""

    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes it touches, in rank order, each once."""
        return tuple(dict.fromkeys(d.node for d in self.devices))

    @property
    def node(self) -> str:
        """One word for where it is: the node, or the nodes joined by ``+``."""
        return "+".join(self.nodes)

    @property
    def local(self) -> str:
        """Device indices in rank order, without the node: ``0,1``."""
        return ",".join(_index(d) for d in self.devices)

    @property
    def name(self) -> str:
        """``node-0:0,1``, or ``node-0:0+node-1:0`` for a slot that spans nodes."""
        if len(self.nodes) == 1:
            return f"{self.node}:{self.local}"
        return "+".join(f"{d.node}:{_index(d)}" for d in self.devices)

    @property
    def lead(self) -> str:
        """The device of rank 0, which a TP=1 engine on the same spot would use."""
        return f"{self.devices[0].node}:{_index(self.devices[0])}"


def _index(device: Device) -> str:
    return f"{device.index}.{device.share}" if device.share else str(device.index)


def inventory_to_json(inventory: Inventory) -> dict[str, Any]:
    """Plain data for the manifest."""
    return asdict(inventory)


def inventory_from_json(data: Mapping[str, Any]) -> Inventory:
    """The inverse of :func:`inventory_to_json`."""
    return Inventory(
        tuple(
            Node(**{**n, "devices": tuple(Device(**d) for d in n["devices"])})
            for n in data["nodes"]
        )
    )
