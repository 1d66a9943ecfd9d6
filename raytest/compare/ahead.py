"""A little work ahead of its consumer, results in order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
MOST_THREADS = 4
# A thread that hands over every small file by itself spends its time on handing over.
FILES_AT_ONCE = 8


def threads() -> int:
    """Threads worth having: reading and numpy both let go of the interpreter's lock."""
    return min(MOST_THREADS, os.cpu_count() or 1)


def in_order(pool: ThreadPoolExecutor, tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Results of ``tasks`` in their order, with as many in flight as there are threads.

    What a task raises is raised when its turn comes; later ones are then given up.
    """
    waiting: deque[Future[T]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > threads():
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()
