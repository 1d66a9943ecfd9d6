"""node-problem-detector: what it checks when it starts, checked before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from cluster.checks.outcome import Outcome, outcome

CONFIG = "npd/raytest.json"
INSTALLED = "/opt/raytest/cluster/"
UNITS = {"h": 3600, "m": 60, "s": 1}


def checks(folder: Path) -> list[Outcome]:
    """The rules of its config.go; keys are the schema's matter."""
    return [outcome(CONFIG, "rules", _rules(folder))]


def _rules(folder: Path) -> Iterator[str]:
    config = json.loads((folder / CONFIG).read_text())
    own = config["pluginConfig"]
    conditions = {condition["type"] for condition in config["conditions"]}
    if _seconds(own["timeout"]) >= _seconds(own["invoke_interval"]):
        yield "timeout: not below invoke_interval"
    for rule in config["rules"]:
        if _seconds(rule["timeout"]) > _seconds(own["timeout"]):
            yield f"{rule['reason']}: timeout above the global one"
        if rule["type"] == "permanent" and rule.get("condition") not in conditions:
            yield f"{rule['reason']}: condition {rule.get('condition')} is not among conditions"
        script = folder / rule["path"].removeprefix(INSTALLED)
        if not (rule["path"].startswith(INSTALLED) and script.is_file()):
            yield f"{rule['reason']}: {rule['path']}: no such script is shipped"
        elif not script.stat().st_mode & 0o111:
            yield f"{rule['reason']}: {rule['path']}: not executable"


def _seconds(text: str) -> int:
    return sum(int(n) * UNITS[unit] for n, unit in re.findall(r"(\d+)([hms])", text))
