"""The workflow: zizmor, and what keeps a red run red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cluster.checks.outcome import Outcome, by_tool, documents, outcome

WORKFLOW = "github/nightly.yml"


def checks(folder: Path) -> list[Outcome]:
    """zizmor without a network, then the rules."""
    (workflow,) = documents(folder / WORKFLOW)
    options = ("--offline", "--no-config", "--quiet", "--persona", "pedantic")
    return [
        by_tool(WORKFLOW, "zizmor", *options, folder / WORKFLOW),
        outcome(WORKFLOW, "rules", _rules(workflow)),
    ]


def _rules(workflow: dict[str, Any]) -> Iterator[str]:
    if workflow.get("permissions") != {"contents": "read"}:
        yield "permissions: expected contents: read and nothing else"
    if workflow.get("concurrency", {}).get("cancel-in-progress") is not False:
        yield "concurrency: a run that has begun must not be cancelled for the next"
    if workflow.get("defaults", {}).get("run", {}).get("shell") != "bash":
        yield "defaults.run.shell: without bash by name, a failing part of a pipe goes unseen"
    for name, job in workflow["jobs"].items():
        yield from (f"{name}: {problem}" for problem in _job(job))


def _job(job: dict[str, Any]) -> Iterator[str]:
    if "timeout-minutes" not in job:
        yield "timeout-minutes is missing: a hang would hold the runner for 6 hours"
    if any("continue-on-error" in part for part in (job, *job["steps"])):
        yield "continue-on-error: a failure would be green"
    always = [step for step in job["steps"] if step.get("if") == "always()"]
    if not any("raytest verdict" in step.get("run", "") for step in always):
        yield "no step asks `raytest verdict` with if: always()"
    if not any(step.get("uses", "").startswith("actions/upload-artifact@") for step in always):
        yield "the run is not uploaded with if: always()"
