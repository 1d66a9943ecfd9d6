"""The judgement as one JSON document: verdict.json.

Everything but ``run`` (ids and times) is a function of the results alone, so the judgement of a
resumed run equals that of an uninterrupted one byte for byte; ``judgement_digest`` covers exactly
that part.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from raytest.compare.axis_result import Divergence
from raytest.compare.evaluate import AxisResult, Evaluation
from raytest.compare.findings import Finding
from raytest.compare.statistics import Interval, plain, upper_bound_of_none
from raytest.digest import json_digest
from raytest.spec import Thresholds

SCHEMA_ID = "raytest.verdict/1"
RUN_KEYS = ("created_at", "ended_at", "raytest_version", "status")


def verdict_document(evaluation: Evaluation, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """verdict.json as plain data (schema: :func:`verdict_schema`)."""
    judgement = _judgement(evaluation)
    run = {k: manifest[k] for k in RUN_KEYS if k in manifest}
    return {
        "schema": SCHEMA_ID,
        **judgement,
        "judgement_digest": json_digest("judgement", judgement),
        "run": {"run_ids": list(evaluation.run_ids), **run},
    }


@cache
def verdict_schema() -> dict[str, Any]:
    """The JSON Schema of verdict.json."""
    text = (files("raytest") / "schemas" / "verdict-1.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema


def _judgement(e: Evaluation) -> dict[str, Any]:
    integrity = e.integrity
    coverage = asdict(e.coverage)
    complete = not (integrity.incomplete or integrity.problems)
    return {
        "verdict": e.verdict.value,
        "exit_code": int(e.exit_code),
        "complete": complete,
        "reasons": list(e.reasons),
        "trials": {
            "planned": e.coverage.n_trials_planned,
            "ran": e.coverage.n_trials_found,
            "missing": list(integrity.missing_trials),
            "not_needed": e.coverage.n_trials_not_needed,
        },
        "controls": [asdict(c) for c in e.controls],
        "coverage": coverage,
        "power": _power(e),
        "axes": [_axis(a) for a in e.axes],
        "findings": [_finding(f) for f in e.findings],
        "suspects": [
            {**asdict(s), "axis": s.axis.value, "p_value": plain(s.p_value)}
            for a in e.attributions
            for s in a.suspects
        ],
        "unattributable": {a.axis.value: a.unattributable for a in e.attributions},
        "problems": list(integrity.problems),
        "incomplete": list(integrity.incomplete),
        "errors": [dict(x) for x in integrity.errors],
        "failures": [dict(x) for x in integrity.failures],
        "skipped_requests": [dict(x) for x in integrity.skipped],
    }


def _power(e: Evaluation) -> dict[str, Any]:
    """What equal results still allow: the rate of divergent requests that zero in n leaves open."""
    smallest = min((a.numbers.n_requests for a in e.axes), default=0)
    axes = {}
    for a in e.axes:
        n = a.numbers
        if n.upper_bound is not None:
            axes[a.axis.value] = (
                f"0 of {n.n_requests} requests differ; true rate < {100 * n.upper_bound:.2g}% (95%)"
            )
        else:
            r = n.divergence_rate
            differ = n.n_requests - n.n_requests_bitwise
            axes[a.axis.value] = (
                f"{differ} of {n.n_requests} requests differ; "
                f"true rate {100 * r.low:.2g}% to {100 * r.high:.2g}% (95%)"
            )
    return {
        "confidence": 0.95,
        "n_requests": smallest,
        "undetected_rate": plain(upper_bound_of_none(smallest)),
        "axes": axes,
    }


def _axis(a: AxisResult) -> dict[str, Any]:
    n = a.numbers
    gate = a.contract.gate
    bounds = gate.model_dump(exclude_none=True) if isinstance(gate, Thresholds) else None
    return {
        "axis": a.axis.value,
        "contract": "thresholds" if isinstance(gate, Thresholds) else gate,
        "thresholds": bounds,
        "stated": a.contract.stated,
        "contract_reason": a.contract.why,
        "result": a.outcome.result.value,
        "reason": a.outcome.reason,
        "requests_needed": a.outcome.requests_needed,
        "decided_after_trials": a.decided_after,
        "trials_not_needed": a.not_needed,
        "bounds": a.outcome.bounds,
        "groups": {
            "formed": n.n_groups,
            "compared": n.n_groups_compared,
            "divergent": n.n_groups_divergent,
        },
        "requests": {
            "compared": n.n_requests,
            "bitwise": n.n_requests_bitwise,
            "tokens": n.n_requests_tokens,
        },
        "comparisons": {
            "made": n.n_comparisons,
            "bitwise": n.n_bitwise,
            "tokens": n.n_tokens,
            "divergent": n.n_divergent,
            "tokens_only": n.n_tokens_only,
            "not_made": n.n_not_made,
        },
        "classes": {str(i + 1): c for i, c in enumerate(n.classes) if c},
        "verdicts": dict(n.verdicts),
        "divergence_rate": _interval(n.divergence_rate),
        "token_divergence_rate": _interval(n.token_divergence_rate),
        "upper_bound": n.upper_bound,
        "flip_hazard": _interval(n.flip_hazard),
        "metrics": _plain(n.metrics),
        "spread": None if a.spread is None else _plain(asdict(a.spread)),
        "worst": _divergence(n.worst),
        "incomparable": [{"reason": r, "trials": c} for r, c in a.left_out.items()],
    }


def _finding(f: Finding) -> dict[str, Any]:
    return {
        "code": f.code,
        "category": f.category,
        "severity": f.severity,
        "axis": f.axis,
        "entities": list(f.entities),
        "detail": f.detail,
        "suggested_action": f.action,
        "p_value": plain(f.p_value),
        "first_divergence": _divergence(f.first_divergence),
    }


def _divergence(d: Divergence | None) -> dict[str, Any] | None:
    if d is None:
        return None
    values: dict[str, Any] = _plain(asdict(d))
    values["members"] = list(d.members)
    return values


def _interval(i: Interval) -> dict[str, Any]:
    values: dict[str, Any] = _plain(asdict(i))
    return values


def _plain(value: Any) -> Any:
    """NaN and infinities as None, at any depth."""
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return plain(value)
