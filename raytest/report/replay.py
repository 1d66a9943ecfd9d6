"""``raytest replay`` for a person: one line a cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raytest.report.table import printable, table_lines

HEADER = (
    "cell",
    "positions",
    "bitwise",
    "max |d|",
    "mean |d|",
    "k1",
    "k3",
    "ratio p1..p99",
    "top-1",
    "own argmax",
    "own ties",
    "own other",
)


def replay_lines(document: Mapping[str, Any]) -> list[str]:
    """The document as a table, what it was measured against, and what is missing."""
    reference = document["reference"]
    where = f"{printable(reference['cell_id'])} ({reference['launch']}-{reference['trial']})"
    lines = [
        f"Tokens of {where} scored in every cell; path: {document['path']}.",
        "d = logprob there - here, nats; k1 and k3 estimate KL(there || here).",
        "own: the cell's own greedy tokens against what its scores put on top.",
        "",
    ]
    if document["cells"]:
        lines += table_lines(HEADER, [_row(c) for c in document["cells"]])
    for cell in document["cells"]:
        name, errors = printable(cell["cell_id"]), cell["errors"]
        other = cell["consistency"]["first_other"]
        if other:
            lines.append(f"  {name}: first other argmax: request {other[0]}, position {other[1]}")
        if errors:
            request = min(errors)
            lines.append(
                f"  {name}: {len(errors)} requests not scored; {printable(request)}: "
                f"{printable(errors[request])}"
            )
    lines += [
        f"  {printable(c)}: not scored: {printable(why)}"
        for c, why in document["not_scored"].items()
    ]
    return lines


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    against, own = cell["against_reference"], cell["consistency"]
    counts = [f"{own[k]}" for k in ("n_same", "n_near_tie", "n_other")]
    counts[0] += f"/{own['n_positions']}"
    if against is None:
        return (cell["cell_id"], *["?"] * 8, *counts)
    ratio = against["importance_ratio"]
    return (
        cell["cell_id"],
        str(against["n_positions"]),
        _percent(against["share_bitwise"]),
        *(_short(against[k]) for k in ("max_abs", "mean_abs", "k1_kl", "k3_kl")),
        f"{_short(ratio['p1'])}..{_short(ratio['p99'])}",
        _percent(against["forced_top1_agree"]),
        *counts,
    )


def _short(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"


def _percent(share: float | None) -> str:
    """Never rounded up to all: 99.99% is not 100%."""
    if share is None:
        return "?"
    return "100%" if share == 1 else f"{min(100 * share, 99.9):.1f}%"
