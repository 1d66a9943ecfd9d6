"""``raytest verdict``: one line and an exit code from verdict.json alone."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

from raytest.errors import ExitCode, StoreError, UsageError
from raytest.report.table import printable
from raytest.store import find_run, read_json

AGE_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NAGIOS = {0: ("OK", 0), 1: ("CRITICAL", 2), 3: ("WARNING", 1)}
NPD_LIMIT = 80


def verdict_line(results: str, run: str, form: str, max_age: str | None) -> tuple[str, int]:
    """The line and the exit code in the given form.

    No finished verdict, one that cannot be read, and one that is too old are inconclusive (3),
    never a pass. Raises UsageError for a malformed ``max_age``.
    """
    limit = None if max_age is None else _seconds(max_age)
    try:
        path = find_run(results, run)
        document = read_json(path / "verdict.json")
        code, text = _judged(document, limit)
    except StoreError as error:
        document, code = {}, int(ExitCode.INCONCLUSIVE)
        text = f"no finished verdict: {error}"
    return _form(form, printable(text), code, document)


def _judged(document: dict[str, Any], limit: float | None) -> tuple[int, str]:
    """Exit code and sentence of a verdict document. Raises StoreError if it is none."""
    run = document.get("run", {})
    code = document.get("exit_code")
    if document.get("schema") != "raytest.verdict/1" or not isinstance(code, int):
        raise StoreError("verdict.json is not a verdict that this raytest reads")
    name = "+".join(map(str, run.get("run_ids", ())))
    age = _age(str(run.get("ended_at", "")))
    if limit is not None and (age is None or age > limit):
        shown = "of unknown age" if age is None else f"{age / 3600:.1f} h old"
        return int(ExitCode.INCONCLUSIVE), f"{name}: verdict is {shown}, too old"
    reasons = "; ".join(map(str, document.get("reasons", ())))
    return code, f"{name}: {document.get('verdict')}" + (f": {reasons}" if reasons else "")


def _form(form: str, text: str, code: int, document: dict[str, Any]) -> tuple[str, int]:
    if form == "json":
        value = {
            "schema": "raytest.verdict-line/1",
            "exit_code": code,
            "line": text,
            "verdict": document.get("verdict"),
        }
        return json.dumps(value, sort_keys=True), code
    if form == "nagios":
        word, status = NAGIOS.get(code, ("UNKNOWN", 3))
        return f"RAYTEST {word} - {text}", status
    if form == "npd":
        # node-problem-detector: 0 healthy, 1 problem, 2 unknown; at most 80 bytes
        status = code if code in (0, 1) else 2
        return text.encode()[:NPD_LIMIT].decode("utf-8", "ignore"), status
    if form == "prolog":
        # a Slurm prolog drains the node on any non-zero exit: only a proven mismatch may do that
        return (f"print raytest {text}", 1) if code == ExitCode.MISMATCH else (f"# {text}", 0)
    return text, code


def _age(finished_at: str) -> float | None:
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(finished_at)).total_seconds()
    except (ValueError, TypeError):
        return None


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if match is None:
        raise UsageError(f"--max-age {text!r}: expected a number and s, m, h or d, such as 26h")
    return float(match[1]) * AGE_UNITS[match[2]]
