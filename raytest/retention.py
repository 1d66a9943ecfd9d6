"""Which runs are kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from raytest.errors import ExitCode, StoreError
from raytest.history import RunPoint, read_history


def superfluous(points: Sequence[RunPoint], keep: int, keep_failed: bool) -> list[RunPoint]:
    """Runs beyond the ``keep`` newest of each spec. A run that is still going on is no candidate
    and takes no place (one whose driver died is as any other); ``keep_failed`` spares those that
    ended with a mismatch."""
    by_name: dict[str, list[RunPoint]] = {}
    for point in points:
        if point.status != "running":
            by_name.setdefault(point.name, []).append(point)
    old = [p for own in by_name.values() for p in own[: max(0, len(own) - keep)]]
    return [p for p in old if not (keep_failed and p.exit_code == ExitCode.MISMATCH)]


def collect(results: str, keep: int, *, keep_failed: bool, dry_run: bool) -> list[Path]:
    """Remove what is superfluous; saved baselines have their own files and stay. What was removed,
    or would be. Raises StoreError where a folder cannot be removed."""
    points, _ = read_history(results)
    paths = [p.path for p in superfluous(points, keep, keep_failed)]
    for path in () if dry_run else paths:
        try:
            # the manifest goes first: a folder that is half removed is no run any more
            (path / "manifest.json").unlink()
            shutil.rmtree(path)
        except OSError as error:
            raise StoreError(f"{path}: cannot be removed: {error.strerror}") from None
    return paths
