"""Units: systemd's own verdict, and what it takes without a word."""

from __future__ import annotations

import configparser
from collections.abc import Iterator
from pathlib import Path

from cluster.checks.outcome import Outcome, by_tool, outcome

SERVICE = "systemd/raytest-nightly.service"
TIMER = "systemd/raytest-nightly.timer"
ALERT = "systemd/raytest-alert@.service"


def checks(folder: Path) -> list[Outcome]:
    """``systemd-analyze verify`` with empty stderr: for unknown keys it returns 0."""
    return [*(verify(folder, file) for file in (SERVICE, TIMER, ALERT)), *rules(folder)]


def verify(folder: Path, file: str) -> Outcome:
    """systemd's own word on a unit; of a template, on an instance."""
    unit = folder / file.replace("@.", "@raytest-nightly.service.")
    return by_tool(file, "systemd-analyze", "verify", "--man=no", unit, quiet=True)


def rules(folder: Path) -> list[Outcome]:
    """What systemd takes, and what a night needs."""
    service, timer, alert = (_unit(folder / file) for file in (SERVICE, TIMER, ALERT))
    return [
        outcome(SERVICE, "rules", _service_rules(service)),
        outcome(TIMER, "rules", _timer_rules(timer)),
        outcome(ALERT, "rules", _alert_rules(alert)),
    ]


def _unit(path: Path) -> configparser.ConfigParser:
    # Not strict: Environment= may stand twice.
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    return unit


def _service_rules(unit: configparser.ConfigParser) -> Iterator[str]:
    service = unit["Service"]
    if service.get("Type") != "oneshot":
        yield "Type is not oneshot: a run ended by TERM would count as clean"
    # systemd refuses RestartForceExitStatus= and most of Restart= here; a retry hides a mismatch.
    yield from (
        f"{key}: a run is not started again, and no failure is called success"
        for key in service
        if key.startswith("Restart") or key == "SuccessExitStatus"
    )
    if service.get("TimeoutStartSec", "infinity") in ("infinity", "0"):
        yield "TimeoutStartSec: no limit; a oneshot unit has none of its own"
    if unit["Unit"].get("OnFailure") != "raytest-alert@%n.service":
        yield "OnFailure is not raytest-alert@%n.service"
    start = service.get("ExecStart", "")
    if "/opt/raytest/cluster/run.sh" not in start or start.startswith(("-", "+", "!")):
        yield "ExecStart: not run.sh, which ends with the verdict, or its failure is ignored"
    if service.get("User", "root") == "root":
        yield "User: the test needs no root"


def _timer_rules(unit: configparser.ConfigParser) -> Iterator[str]:
    timer = unit["Timer"]
    if "OnCalendar" not in timer:
        yield "OnCalendar is missing"
    if timer.get("Persistent") != "true":
        yield "Persistent is not true: a node that was off at night is not tested"
    if "RandomizedDelaySec" not in timer:
        yield "RandomizedDelaySec is missing: the whole fleet would start at once"
    if unit["Install"].get("WantedBy") != "timers.target":
        yield "WantedBy is not timers.target"


def _alert_rules(unit: configparser.ConfigParser) -> Iterator[str]:
    service = unit["Service"]
    if not service.get("ExecStart", "").endswith("/opt/raytest/cluster/systemd/alert.sh %i"):
        yield "ExecStart: not alert.sh with the unit that failed"
    if "OnFailure" in unit["Unit"]:
        yield "OnFailure: an alert that fails would start another"
