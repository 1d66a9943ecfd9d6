"""Std@Acc, Avg_Std@Output_Length, Div_Index and Avg_Std@top1_prob from run folder to report."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raytest.compare.evaluate import evaluate
from raytest.compare.spread import Spread
from raytest.compare.verdict_json import verdict_document
from raytest.engines.base import Completion
from raytest.observations import with_text
from raytest.report.spread import SPREAD_HEADER, spread_rows
from raytest.schema import Axis, requests_schema
from raytest.store import RunFolder, write_table
from tests.support.make_run import Change, RunMaker, inventory, plant, spec

SPEC = "[trials]\nrepeats = 1\n"


def run(tmp_path: Path, *changes: Change, references: list[str | None] | None = None) -> RunFolder:
    """Two GPUs, four requests of twelve tokens; ``references`` are added to the requests."""
    folder = RunMaker(spec(SPEC), inventory(1, 2), changes=changes).write(tmp_path, "run")
    if references:
        table = folder.requests()
        at = table.column_names.index("reference")
        kind = requests_schema().field("reference")
        table = table.set_column(at, kind, pa.array(references, pa.string()))
        write_table(folder.path / "requests.parquet", table, requests_schema())
    return folder


def spread(folder: RunFolder) -> Spread:
    (gpu,) = (a for a in evaluate(folder).axes if a.axis is Axis.GPU)
    assert gpu.spread is not None
    return gpu.spread


def shorter(c: Completion) -> Completion:
    n = len(c.token_ids) - 4
    return replace(
        c,
        token_ids=c.token_ids[:n],
        logprobs=c.logprobs[:n],
        top_token_ids=c.top_token_ids[: n * c.top_k],
        top_logprobs=c.top_logprobs[: n * c.top_k],
    )


def lower(c: Completion) -> Completion:
    return replace(c, logprobs=c.logprobs - np.float32(0.5))


def saying(text: str) -> Any:
    return lambda where, c: replace(c, text=text)


def test_equal_configurations_do_not_spread(tmp_path: Path) -> None:
    assert spread(run(tmp_path)) == Spread(2, None, 0.0, 0.0, 0, None, None)


def test_length_and_div_index(tmp_path: Path) -> None:
    found = spread(run(tmp_path, plant(shorter, slot="node-0:1", request=2)))
    assert found.div_index == 8
    # one request of four, two lengths 4 apart: a sample standard deviation of 4 / sqrt(2)
    assert found.avg_std_output_length == pytest.approx(4 / math.sqrt(2) / 4)


def test_top1_probability_of_the_greedy_token(tmp_path: Path) -> None:
    folder = run(tmp_path, plant(lower, slot="node-0:1", request=1))
    found = spread(folder)
    assert (found.n_top1_requests, found.div_index) == (1, None)
    healthy, changed = (
        next(iter(folder.payloads([row["payload_id"]]).values())).logprobs.astype(np.float64)
        for key in sorted(folder.finished_trials())
        for row in folder.read_trial(key).to_pylist()
        if row["request_index"] == 1
    )
    by_hand = np.std(np.exp([healthy, changed]), axis=0, ddof=1).mean() / 4
    assert found.avg_std_top1_prob == pytest.approx(by_hand, rel=1e-5)


def test_accuracy_spreads_where_one_configuration_answers_wrongly(tmp_path: Path) -> None:
    answers: list[Change] = [saying("The answer is  FORTY two.")]
    wrong = plant(lambda c: replace(c, text="41"), slot="node-0:1", request=1)
    other = plant(lower, slot="node-0:1", request=1)
    folder = run(tmp_path, *answers, wrong, other, references=["forty two", "Forty Two", "7", None])
    found = spread(folder)
    # right on one GPU: two of three, on the other one of three
    assert found.accuracy == pytest.approx((1 / 3, 1 / 2, 2 / 3))
    assert found.std_at_accuracy == pytest.approx(1 / 3 / math.sqrt(2))


@pytest.mark.parametrize("references", [None, ["x", "x", "x", "x"]])
def test_without_a_reference_or_without_text_accuracy_is_unknown(
    tmp_path: Path, references: list[str | None] | None
) -> None:
    found = spread(run(tmp_path, references=references))
    assert (found.std_at_accuracy, found.accuracy) == (None, None)


def test_the_document_and_the_table_have_them(tmp_path: Path) -> None:
    folder = run(tmp_path, plant(shorter, slot="node-0:1", request=2))
    document = verdict_document(evaluate(folder), folder.manifest)
    rows = {r[0]: r for r in spread_rows(document["axes"])}
    assert len(rows["gpu"]) == len(SPREAD_HEADER)
    assert rows["gpu"][1:4] == ("2", "8", "0.707")


def test_text_is_kept_where_there_is_something_to_hold_it_against(tmp_path: Path) -> None:
    (payloads,) = run(tmp_path).iter_payload_tables()
    assert with_text(payloads, None).column("text").null_count == 4
    texts = with_text(payloads, lambda ids: f"{len(ids)} tokens").column("text").to_pylist()
    assert texts == ["12 tokens"] * 4
