"""Holds the GPUs of a plan for the length of a run, exactly those and no others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from raytest.errors import UnavailableError
from raytest.inventory import Device

# A placement group that is not there by then waits for a GPU that somebody else holds.
PATIENCE_S = 10.0


class Reservation:
    """Holds the GPUs of a plan for the length of a run: one placement group a GPU, and which UUID
    each group really got. CPU devices need none: the worker's own ``num_cpus`` holds them."""

    def __init__(self) -> None:
        self._groups: dict[str, Any] = {}

    def take(
        self, devices: Sequence[Device], node_ids: Mapping[str, str], timeout_s: float
    ) -> None:
        """Reserve the physical GPUs of ``devices``. Raises UnavailableError naming those that stay
        busy; what was reserved is released again."""
        wanted = {d.uuid: d for d in devices if d.kind == "gpu"}
        by_node: dict[str, list[Device]] = {}
        for device in wanted.values():
            by_node.setdefault(device.node, []).append(device)
        try:
            for node, members in by_node.items():
                self._take_node(node_ids[node], members, timeout_s)
        except BaseException:
            self.release()
            raise

    def _take_node(self, node_id: str, members: Sequence[Device], timeout_s: float) -> None:
        """Ray chooses the GPU, so ask for all that are free, keep those the plan names, drop the
        rest."""
        import ray
        from ray.util.placement_group import placement_group, remove_placement_group

        selector = [{"ray.io/node-id": node_id}]
        groups = [
            placement_group([{"GPU": 1}], strategy="STRICT_PACK", bundle_label_selector=selector)
            for _ in range(_gpu_count(node_id))
        ]
        wanted = {d.uuid for d in members}
        got: dict[str, Any] = {}
        try:
            refs = [group.ready() for group in groups]
            ready, _ = ray.wait(refs, num_returns=len(refs), timeout=min(PATIENCE_S, timeout_s))
            free = [g for g, ref in zip(groups, refs, strict=True) if ref in ready]
            probes = [(g, _probe(g)) for g in free]
            for group, ref in probes:
                got[_uuid_of(ray.get(ref, timeout=timeout_s), members)] = group
        except ray.exceptions.GetTimeoutError:
            raise UnavailableError(
                f"node {members[0].node}: its GPUs could not be reserved in {timeout_s:.0f} s"
            ) from None
        finally:
            kept = [got.get(uuid) for uuid in wanted]
            for group in groups:
                if group not in kept:
                    remove_placement_group(group)
        self._groups.update({u: g for u, g in got.items() if u in wanted})
        busy = [d for d in members if d.uuid not in got]
        if busy:
            raise UnavailableError(
                f"node {busy[0].node}: GPU {', '.join(str(d.index) for d in busy)} "
                "is held by another Ray job"
            )

    def release(self) -> None:
        """Give everything back; a placement group outlives the actors in it otherwise."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    def release_devices(self, devices: Sequence[Device]) -> None:
        """Give back the GPUs of one slot, for an executor that must reserve them itself."""
        from ray.util.placement_group import remove_placement_group

        for device in devices:
            group = self._groups.pop(device.uuid, None)
            if group is not None:
                remove_placement_group(group)


def _gpu_count(node_id: str) -> int:
    import ray

    return next(int(n["Resources"].get("GPU", 0)) for n in ray.nodes() if n["NodeID"] == node_id)


def _probe(group: Any) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    task = ray.remote(_assigned_gpu)
    return task.options(
        num_cpus=0,
        num_gpus=1,
        max_retries=0,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
    ).remote()


def _assigned_gpu() -> str:
    import ray

    return str(ray.get_runtime_context().get_accelerator_ids()["GPU"][0])


def _uuid_of(assigned: str, members: Sequence[Device]) -> str:
    """The planned UUID behind Ray's id, which is an index or a UUID itself."""
    for device in members:
        if assigned in (str(device.index), device.uuid):
            return device.uuid
    return f"unplanned:{assigned}"
