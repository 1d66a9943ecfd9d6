"""Which process drives a run, so that a run whose driver died is not taken for one going on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A run writes an event at least once a trial; nothing for so long from another host is its end.
SILENT_S = 7 * 86400.0


def this_driver() -> dict[str, Any]:
    """Host, process id and start of this process (seconds since the epoch), for the manifest: an
    id alone is given again to another process."""
    import psutil

    return {
        "hostname": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
    }


def is_abandoned(folder: Path, manifest: Mapping[str, Any]) -> bool:
    """Whether a run that says it is running has no driver any more: gone from this host, or, on
    another, silent for a week."""
    if manifest.get("status") != "running":
        return False
    driver = manifest.get("driver") or {}
    if driver.get("hostname") == socket.gethostname():
        return not _is_alive(int(driver["pid"]), float(driver["started"]))
    written = [p for p in (folder / "events.jsonl", folder / "manifest.json") if p.exists()]
    newest = max((p.stat().st_mtime for p in written), default=0.0)
    return time.time() - newest > SILENT_S


def _is_alive(pid: int, started: float) -> bool:
    import psutil

    try:
        return bool(abs(psutil.Process(pid).create_time() - started) < 1.0)
    except psutil.Error:
        return False
