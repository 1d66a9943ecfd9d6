"""A plan for people and for programs."""

from __future__ import annotations

from typing import Any

from raytest.plan import Plan, plan_to_json
from raytest.report.table import table_lines
from raytest.schema import Axis
from raytest.spec import Spec

MOST_CELLS = 40


def plan_document(spec: Spec, plan: Plan) -> dict[str, Any]:
    """``raytest plan --format json``."""
    return {
        "schema": "raytest.plan/1",
        "name": spec.name,
        "possible": not plan.impossible,
        "n_launches": sum(c.launches for c in plan.cells),
        "n_trials": plan.n_trials,
        **plan_to_json(plan),
    }


def plan_lines(spec: Spec, plan: Plan) -> list[str]:
    """Cells and slots (the first 40), trials, what will be compared, and what is impossible."""
    rows = [
        (
            c.variant,
            str(c.tensor_parallel_size),
            str(c.pipeline_parallel_size),
            c.slot.name,
            str(c.launches),
        )
        for c in plan.cells[:MOST_CELLS]
    ]
    lines = table_lines(("variant", "TP", "PP", "slot", "launches"), rows)
    if len(plan.cells) > MOST_CELLS:
        lines.append(f"… and {len(plan.cells) - MOST_CELLS} more cells")
    launches = sum(c.launches for c in plan.cells)
    arrangements = ", ".join(spec.trials.arrangements)
    lines += [
        "",
        (
            f"{len(plan.cells)} cells, {launches} launches, {plan.n_trials} trials "
            f"({spec.trials.repeats} repeats of {arrangements} in each launch)"
        ),
        f"compared along: {', '.join(plan.varied) or 'nothing'}",
    ]
    single = [a.value for a in Axis if a not in plan.varied and a is not Axis.RUN]
    if single:
        lines.append(f"not varied: {', '.join(single)}")
    lines += [f"impossible: variant {i.variant}: {i.reason}" for i in plan.impossible]
    return lines
