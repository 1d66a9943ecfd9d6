"""Ends a coroutine in good order when the process is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator

from raytest.errors import ExitCode, RaytestError

SIGNALS = ((signal.SIGINT, ExitCode.INTERRUPTED), (signal.SIGTERM, ExitCode.TERMINATED))


class StoppedError(RaytestError):
    """The run was ended from outside; what is finished is on disk and ``--resume`` goes on."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.exit_code = ExitCode.INTERRUPTED


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside the block SIGINT and SIGTERM cancel the current task, once, so that it can end its
    workers; the block then raises StoppedError with the signal's exit code."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    reason: list[StoppedError] = []

    def stop(number: int, code: ExitCode) -> None:
        if not reason:
            reason.append(StoppedError(f"stopped by {signal.Signals(number).name}"))
            reason[0].exit_code = code
            task.cancel()

    # outside the main thread, or where the platform has none, there is nothing to catch
    with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
        for number, code in SIGNALS:
            loop.add_signal_handler(number, stop, number, code)
    try:
        yield
    except asyncio.CancelledError:
        if not reason:
            raise
        raise reason[0] from None
