"""Judged run folders for the tests of reports, baselines and history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from raytest.compare.evaluate import evaluate
from raytest.compare.verdict_json import verdict_document
from raytest.engines.base import Completion
from raytest.report.material import Material, gather
from raytest.store import RunFolder
from tests.support.make_run import Change, RunMaker, inventory, noise, plant, spec, swap_token

# Of larger fleets only so many cells get a fingerprint: each is a file.
MOST_FACTS = 32
TWO_VARIANTS = """
[placement]
scope = "every-gpu"
[trials]
launches = 2
repeats = 2
[[variants]]
name = "tp1"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
"""
# What a prompt may hold: markup, escape sequences, text that turns the line around, a megabyte.
NASTY = (
    "<script>alert(1)</script><img src=x onerror=alert(2)>&amp;{{ 7*7 }}\n```\n</details>",
    "\x1b[31mred\x1b[0m\x07\x1b]0;title\x07",
    "שלום עולם \u202eevil\u202c مرحبا",
    "long " * 210_000,
)
OUTLIER = plant(swap_token(5), slot="node-1:2", variant="tp1", request=range(8))
ROUNDING = plant(noise(0.01), variant="tp2")


def write_judged(
    results: Path,
    run_id: str = "run",
    *,
    text: str = TWO_VARIANTS,
    nodes: int = 3,
    devices: int = 4,
    changes: Sequence[Change] = (),
    began: str = "2026-12-01T00:00:00+00:00",
    ended: str = "2026-12-01T00:02:05+00:00",
    facts: dict[str, str] | None = None,
    prompts: Callable[[pa.Table], pa.Table] | None = None,
    prompt_ids: Sequence[Sequence[int]] | None = None,
    **more: Any,
) -> RunFolder:
    """Write a run, judge it and write its verdict, as ``raytest run`` does."""
    maker = RunMaker(
        spec(text), inventory(nodes, devices), **{"n_requests": 12, "length": 40, **more}
    )
    folder = replace(maker, changes=changes, prompts=prompt_ids).write(results, run_id)
    if prompts is not None:
        folder.write_requests(prompts(folder.requests()))
    for cell in maker.plan.cells[:MOST_FACTS]:
        write_facts(folder, cell.cell_id, facts or {"driver": "595"})
    folder.write_manifest(
        created_at=began,
        ended_at=ended,
        raytest_version="1.0",
        environment={"platform": "cuda", "vllm": "0.32"},
        status="finished",
    )
    judge_again(folder)
    return folder


def judge_again(folder: RunFolder) -> dict[str, Any]:
    """Write verdicts.parquet and verdict.json."""
    evaluation = evaluate(folder)
    folder.write_verdicts(evaluation.verdicts)
    document = verdict_document(evaluation, folder.manifest)
    folder.write_verdict(document)
    return document


def write_facts(folder: RunFolder, cell_id: str, facts: dict[str, str]) -> None:
    """One process' fingerprint."""
    from raytest.schema import fingerprints_schema

    rows = [
        {
            "cell_id": cell_id,
            "launch": 0,
            "attempt": 0,
            "rank": -1,
            "stage": "loaded",
            "key": key,
            "value": value,
        }
        for key, value in facts.items()
    ]
    table = pa.Table.from_pylist(rows, schema=fingerprints_schema())
    folder.write_fingerprints((cell_id, 0), 0, table)


def planted(results: Path, **options: Any) -> Material:
    """One GPU of twelve is wrong in 8 of 12 requests; TP=2 rounds otherwise."""
    return gather(write_judged(results, "planted", changes=(OUTLIER, ROUNDING), **options))


def broken_value(c: Completion) -> Completion:
    """A NaN among the logprobs."""
    logprobs = c.logprobs.copy()
    logprobs[2] = float("nan")
    return replace(c, logprobs=logprobs)


def nasty_material(results: Path) -> Material:
    """A run with one wrong slot whose prompts are :data:`NASTY`."""

    def prompts(table: pa.Table) -> pa.Table:
        texts = [NASTY[i % len(NASTY)] for i in range(table.num_rows)]
        where = table.schema.get_field_index("prompt")
        return table.set_column(where, "prompt", pa.array(texts, pa.string()))

    return gather(write_judged(results, prompts=prompts, changes=(OUTLIER,)))
