"""Times of day: schemas take a wrong cron line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cluster.checks.outcome import Outcome, by_tool, documents, outcome

# Alerts take more than this between two runs for a night without one.
LONGEST = timedelta(hours=26)


def checks(folder: Path) -> list[Outcome]:
    """Cron lines by cronsim, time zones by the tz database, the timer by systemd itself."""
    found = []
    for file in ("kuberay/nightly-cronjob.yaml", "kuberay/raycronjob.yaml"):
        (spec,) = (d["spec"] for d in documents(folder / file) if "schedule" in d.get("spec", {}))
        found.append(
            outcome(file, "schedule", _nightly(spec["schedule"], spec.get("timeZone", "")))
        )
    (workflow,) = documents(folder / "github/nightly.yml")
    lines = [entry["cron"] for entry in workflow["on"]["schedule"]]
    found.append(
        outcome(
            "github/nightly.yml", "schedule", (p for c in lines for p in _nightly(c, "Etc/UTC"))
        )
    )
    timer = "systemd/raytest-nightly.timer"
    whens = re.findall(r"^OnCalendar=(.*)$", (folder / timer).read_text(), re.M)
    found.extend(by_tool(timer, "systemd-analyze", "calendar", when) for when in whens)
    return found


def _nightly(line: str, zone: str) -> Iterator[str]:
    from cronsim import CronSim, CronSimError

    try:
        tz = ZoneInfo(zone)
    except (ZoneInfoNotFoundError, ValueError):
        yield f"time zone {zone!r}: not one of the tz database"
        tz = ZoneInfo("UTC")
    try:
        ticks = CronSim(line, datetime(2026, 1, 1, tzinfo=UTC).astimezone(tz))
        # A year, so that a summer time that swallows a tick shows.
        last = next(ticks)
        for _ in range(400):
            tick = next(ticks)
            if tick - last > LONGEST:
                yield f"{line!r}: no run between {last} and {tick}"
                return
            last = tick
    except (CronSimError, StopIteration) as error:
        yield f"{line!r}: {str(error) or 'never'}"
