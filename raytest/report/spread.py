"""How far the configurations of each axis spread (arXiv 2506.09501), as a table of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPREAD_HEADER = (
    "axis", "configurations", "Div_Index (mean)", "Avg_Std@Output_Length", "Avg_Std@top1_prob",
    "Std@Acc", "accuracy (lowest to highest)",
)  # fmt: skip


def spread_rows(axes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """One row an axis along which something was compared; '-' for what cannot be known."""
    rows = []
    for axis in axes:
        spread = axis.get("spread")
        if not spread:
            continue
        accuracy = spread["accuracy"]
        rows.append(
            (
                str(axis["axis"]),
                str(spread["n_configurations"]),
                *(
                    _number(spread[k])
                    for k in (
                        "div_index",
                        "avg_std_output_length",
                        "avg_std_top1_prob",
                        "std_at_accuracy",
                    )
                ),
                "-" if accuracy is None else f"{accuracy[0]:.1%} to {accuracy[2]:.1%}",
            )
        )
    return rows


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
