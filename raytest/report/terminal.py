"""A verdict as one screen of plain lines: is it the same everywhere, and if not, what next?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.report.table import printable, table_lines

MOST_REASONS = 8


def verdict_lines(document: Mapping[str, Any], where: str = "") -> list[str]:
    """Lines for a terminal or a pipe from a verdict document; ``where`` is the run's folder."""
    name = "+".join(map(str, document["run"]["run_ids"]))
    lines = [*table_lines(HEADER, [_row(a) for a in document["axes"]]), ""]
    lines += _worst(document["axes"])
    lines += [_suspect(s) for s in document["suspects"]]
    lines += [_failure(f) for f in document["failures"]]
    lines += _skipped(document["skipped_requests"])
    caught = sum(c["caught"] for c in document["controls"])
    trials = document["trials"]
    lines.append(
        f"trials {trials['ran']} of {trials['planned']}; "
        f"controls caught {caught} of {len(document['controls'])}"
    )
    lines += _reasons(document["reasons"])
    lines.append(f"{name}: {document['verdict'].upper()} (exit code {document['exit_code']})")
    if where:
        lines.append(f"run folder: {where}")
    lines += _next(document, name)
    return [printable(line) for line in lines]


HEADER = ("axis", "contract", "result", "requests", "bitwise", "tokens", "differ, 95% interval")


def _row(axis: Mapping[str, Any]) -> tuple[str, ...]:
    requests = axis["requests"]
    contract = axis["contract"] if axis["stated"] else f"({axis['contract']})"
    return (
        axis["axis"],
        contract,
        axis["result"],
        str(requests["compared"]),
        str(requests["bitwise"]),
        str(requests["tokens"]),
        _rate(axis),
    )


def _rate(axis: Mapping[str, Any]) -> str:
    """The rate of divergent requests; with none of n, the largest rate that n leaves open."""
    if not axis["requests"]["compared"]:
        return "nothing compared"
    if axis["upper_bound"] is not None:
        return f"0%, < {100 * axis['upper_bound']:.2g}%"
    rate = axis["divergence_rate"]
    return f"{100 * rate['value']:.3g}%, {100 * rate['low']:.2g}% to {100 * rate['high']:.2g}%"


def _worst(axes: list[Mapping[str, Any]]) -> list[str]:
    lines = []
    for axis in axes:
        worst = axis["worst"]
        if worst is None:
            continue
        lines.append(f"{axis['axis']}: request {worst['request_id']}: {worst['verdict']}")
        lines.append(f"    {worst['reference']} against {', '.join(worst['members'])}")
        if worst["reference_token"] is not None and worst["position"] is not None:
            margin = "" if worst["margin"] is None else f", margin {worst['margin']:.4g} nats"
            lines.append(
                f"    first different token at position {worst['position']}: "
                f"{worst['reference_token']} against {worst['token']}{margin}"
            )
        elif worst["max_logprob_difference"] is not None:
            lines.append(
                f"    tokens equal, logprobs differ by at most "
                f"{worst['max_logprob_difference']:.4g} nats"
            )
    return lines


def _suspect(suspect: Mapping[str, Any]) -> str:
    p = suspect["p_value"]
    chance = "" if p is None else f" (p = {p:.2g})"
    return f"suspect on {suspect['axis']}: {_words(suspect)}{chance}"


def _words(entry: Mapping[str, Any]) -> str:
    skip = ("axis", "p_value")
    return ", ".join(f"{k} {v}" for k, v in entry.items() if k not in skip and v not in (None, ()))


def _failure(failure: Mapping[str, Any]) -> str:
    return (
        f"failed: {failure['cell_id']} launch {failure['launch']} on {failure['slot']}, "
        f"{failure['phase']}: {failure['reason']}"
    )


def _skipped(skipped: list[Mapping[str, Any]]) -> list[str]:
    if not skipped:
        return []
    first = skipped[0]
    return [f"{len(skipped)} requests cannot run ({first['request_id']}: {first['error']})"]


def _reasons(reasons: list[str]) -> list[str]:
    lines = [f"because {reason}" for reason in reasons[:MOST_REASONS]]
    if len(reasons) > MOST_REASONS:
        lines.append(f"… and {len(reasons) - MOST_REASONS} more reasons (verdict.json has them all)")
    return lines


def _next(document: Mapping[str, Any], name: str) -> list[str]:
    code = document["exit_code"]
    if code == 1:
        return [f"next: raytest explain {name}"]
    if code == 3 and document["failures"]:
        return [f"next: raytest run SPEC --run-id {name} --resume"]
    return []
