"""Which devices are in use: engines wait for all of theirs, and hold none while they wait."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterable

from raytest.inventory import Inventory, Slot


class Devices:
    """All-or-nothing use of devices, and of the machine's cores where engines share them."""

    def __init__(self, cores: int | None) -> None:
        self._busy: set[str] = set()
        self._cores = cores
        self._used = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def hold(self, slot: Slot) -> AsyncIterator[None]:
        """Inside the block the slot's devices are the caller's alone."""
        wanted = {f"{d.node}/{d.uuid}/{d.share}" for d in slot.devices}
        weight = 0 if self._cores is None else min(len(wanted), self._cores)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free(wanted, weight))
            self._busy |= wanted
            self._used += weight
        try:
            yield
        finally:
            async with self._changed:
                self._busy -= wanted
                self._used -= weight
                self._changed.notify_all()

    def _free(self, wanted: set[str], weight: int) -> bool:
        return not wanted & self._busy and (
            self._cores is None or self._used + weight <= self._cores
        )


def shared_cores(inventory: Inventory) -> int | None:
    """Engines on CPU devices of one machine share its cores: more ranks at once than cores only
    makes all of them slower. GPUs are their own limit."""
    if inventory.device_kind == "gpu" or len({n.hostname for n in inventory.nodes}) > 1:
        return None
    return os.cpu_count()


async def all_of(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Wait for every task; the first exception, or a cancellation, ends the others first."""
    tasks = list(tasks)
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
