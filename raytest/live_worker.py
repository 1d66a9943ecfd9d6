"""One worker process on its slot: started, asked within time limits, ended with all it started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping
from typing import Any, TypeVar

from raytest import cluster
from raytest.errors import RaytestError
from raytest.inventory import Slot
from raytest.worker import Job

T = TypeVar("T")


class LiveWorker:
    """Drives the actor of one launch from inside an event loop. ``end`` must follow, whatever
    happened."""

    def __init__(self, job: Job, slot: Slot, runtime_env: Mapping[str, Any]) -> None:
        self._job, self._slot, self._runtime_env = job, slot, runtime_env
        self._actor: Any = None
        self._pid: int | None = None

    async def place(self, timeout_s: float) -> dict[str, Any]:
        """Start the process; where it proves to be. Raises what :meth:`answer` raises."""
        self._actor = cluster.start_worker(
            self._job,
            self._slot,
            node_id=self._job.node_id,
            env=self._job.env,
            runtime_env=self._runtime_env,
        )
        pin: dict[str, Any] = await self.answer("prove_pin", timeout_s)
        self._pid = pin["pid"]
        return {**pin, "clock_skew_s": await self._clock_skew()}

    async def _clock_skew(self) -> float:
        """How far the worker's clock is ahead of the driver's, in seconds; within half of the
        answer's round trip. The best of three, as NTP does it (RFC 5905, section 8)."""
        skews = []
        for _ in range(3):
            sent = time.time()
            there = await self.answer("clock", 60.0)
            received = time.time()
            skews.append((received - sent, there - (sent + received) / 2))
        skew: float = min(skews)[1]
        return round(skew, 4)

    async def answer(self, method: str, timeout_s: float, *args: Any) -> Any:
        """A worker method's result within its time limit; TimeoutError names method and limit."""
        ref = getattr(self._actor, method).remote(*args)
        try:
            return await asyncio.wait_for(_await(ref), timeout_s)
        except TimeoutError:
            raise TimeoutError(f"no answer to {method} within {timeout_s:g} s") from None

    def end(self) -> str:
        """End the worker and everything it started; what its processes printed."""
        if self._actor is None:
            return ""
        cluster.end_worker(self._actor, self._job.node_id, self._pid)
        return cluster.fetch_log(self._job.node_id, self._job.log_path)


async def _await(ref: Awaitable[T]) -> T:
    return await ref


def cause_of(error: BaseException) -> str:
    """What went wrong, in one line: Ray wraps the worker's own error in its traceback."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, RaytestError):
        return str(cause)
    lines = [line for line in str(cause or error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
