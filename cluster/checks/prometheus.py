"""Alerts: promtool where it is, and the names that it can't know."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.checks.outcome import Outcome, by_tool, documents, outcome

RULES, TESTS = "prometheus/alerts.yml", "prometheus/alerts_test.yml"
# What `raytest report --prometheus` writes, with its labels; job and instance come from the scrape.
METRICS = {
    "raytest_run_verdict": {"axis", "verdict"},
    "raytest_last_run_timestamp_seconds": set(),
    "raytest_last_success_timestamp_seconds": set(),
    "raytest_cells": {"state"},
    "raytest_gpu_suspect": {"gpu_uuid", "node"},
    "raytest_run_duration_seconds": set(),
    "raytest_info": set(),
    "raytest_control_caught": set(),
}
# One alert for each way in which a fleet goes unproven.
WANTED = {
    "RaytestMismatch",
    "RaytestInconclusiveTwoNights",
    "RaytestControlMissed",
    "RaytestNoRun",
}


def checks(folder: Path) -> list[Outcome]:
    """Rules and their tests by promtool; names, labels and duplicates by ourselves."""
    return [
        by_tool(RULES, "promtool", "check", "rules", folder / RULES),
        by_tool(TESTS, "promtool", "test", "rules", folder / TESTS),
        *rules(folder),
    ]


def rules(folder: Path) -> list[Outcome]:
    """What promtool doesn't know, or lets pass."""
    (alerting,) = documents(folder / RULES)
    (tests,) = documents(folder / TESTS)
    alerts = [rule for group in alerting["groups"] for rule in group["rules"]]
    return [
        outcome(RULES, "rules", _rules(alerts)),
        outcome(TESTS, "rules", _tests(tests, {alert["alert"] for alert in alerts})),
    ]


def _rules(alerts: list[dict[str, Any]]) -> Iterator[str]:
    names = Counter(alert["alert"] for alert in alerts)
    yield from (f"{name}: twice" for name, count in names.items() if count > 1)
    yield from (f"{name}: is missing" for name in sorted(WANTED - set(names)))
    for alert in alerts:
        texts = [alert["expr"], *alert.get("annotations", {}).values()]
        yield from (f"{alert['alert']}: {p}" for p in _unknown(alert["expr"]))
        if alert.get("labels", {}).get("severity") not in ("critical", "warning"):
            yield f"{alert['alert']}: severity is neither critical nor warning"
        named = set(re.findall(r"\braytest_[a-z_]+", alert["expr"]))
        labels = {"job", "instance"}.union(*(METRICS.get(name, set()) for name in named))
        for label in re.findall(r"\$labels\.(\w+)", " ".join(texts)):
            if label not in labels:
                yield f"{alert['alert']}: no label {label} on {', '.join(sorted(named))}"


def _unknown(expression: str) -> Iterator[str]:
    for name, matchers in re.findall(r"\b(raytest_[a-z_]+)(?:\{([^}]*)\})?", expression):
        if name not in METRICS:
            yield f"{name}: raytest writes no such metric"
            continue
        for label in re.findall(r"(\w+)\s*[=!]", matchers):
            if label not in METRICS[name] | {"job", "instance"}:
                yield f"{name}: has no label {label}"


def _tests(tests: dict[str, Any], alerts: set[str]) -> Iterator[str]:
    """Each alert is seen firing, and promtool lets a series stand twice."""
    fired = set()
    for test in tests["tests"]:
        series = Counter(entry["series"].replace(" ", "") for entry in test["input_series"])
        yield from (f"{test['name']}: {s}: twice" for s, count in series.items() if count > 1)
        yield from (f"{test['name']}: {p}" for s in series for p in _unknown(s))
        fired |= {t["alertname"] for t in test["alert_rule_test"] if t.get("exp_alerts")}
    yield from (f"{name}: no test sees it fire" for name in sorted(alerts - fired))
