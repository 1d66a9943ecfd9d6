"""Which request is replayed, what is concluded of a replay, and what a person is told."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raytest.compare.evaluate import evaluate
from raytest.engines.trace import Layout, Part, Trace
from raytest.errors import ExitCode, StoreError, UsageError
from raytest.explain.divergence import Divergence, find_divergence
from raytest.explain.growth_plot import growth_svg
from raytest.explain.localize import localize
from raytest.explain.localize_run import (
    conclude,
    document_of,
    lines_of,
    trace_schema,
    trace_table,
)
from raytest.explain.replay_pair import Replay, read_requests
from raytest.explain.traces import compare_traces
from raytest.runner import judge
from raytest.store import RunFolder
from tests.support.make_run import RunMaker, flip_bit, inventory, plant, spec, swap_token

TRIALS = """
[trials]
repeats = 2
arrangements = ["batch", "solo"]
[[variants]]
name = "tp1"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
"""


def run(tmp_path: Path, *changes: Any, judged: bool = True, gates: str = "") -> RunFolder:
    folder = RunMaker(spec(TRIALS + gates), inventory(1, 2), changes=changes).write(tmp_path)
    if judged:
        judge(folder, evaluate(folder))
    return folder


LATE = plant(swap_token(7), variant="tp2", request=1)
EARLY = plant(swap_token(2), variant="tp2", request=3)
SOLO = plant(swap_token(1), variant="tp1", slot="node-0:0", arrangement="solo", request=0)


def test_the_earliest_divergence_of_the_run_is_replayed(tmp_path: Path) -> None:
    found = find_divergence(run(tmp_path, LATE, EARLY), None)
    assert found is not None
    assert (found.request_id, found.first) == ("r3", 2)
    assert {found.a.cell.variant, found.b.cell.variant} == {"tp1", "tp2"}
    assert len(found.common_tokens()) == 2


def test_an_axis_whose_gate_failed_comes_before_an_earlier_divergence(tmp_path: Path) -> None:
    gates = '[gates]\narrangement = "may-differ"\ntp = "bitwise"\ngpu = "may-differ"\n'
    # this GPU is not the one that tp2 is compared with
    aside = plant(swap_token(1), variant="tp1", slot="node-0:1", arrangement="solo", request=0)
    found = find_divergence(run(tmp_path, LATE, aside, gates=gates), None)
    assert found is not None
    assert (found.request_id, found.first) == ("r1", 7)


def test_a_run_without_any_difference_has_nothing_to_replay(tmp_path: Path) -> None:
    assert find_divergence(run(tmp_path), None) is None


def test_an_unjudged_run_is_sent_to_compare(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="raytest compare run"):
        find_divergence(run(tmp_path, judged=False), None)


def test_a_pair_needs_no_verdicts_and_takes_its_own_earliest(tmp_path: Path) -> None:
    folder = run(tmp_path, LATE, EARLY, SOLO, judged=False)
    found = find_divergence(folder, ("tp1@node-0-0", "tp2"))
    assert found is not None
    # the solo divergence of tp1 shows against tp2 too, and lies earlier
    assert (found.request_id, found.first) == ("r0", 1)
    assert found.a.trial.arrangement == found.b.trial.arrangement == "solo"


def test_two_arrangements_of_one_cell_make_a_pair(tmp_path: Path) -> None:
    folder = run(tmp_path, SOLO, judged=False)
    found = find_divergence(folder, ("tp1@node-0-0/batch", "tp1@node-0-0/solo"))
    assert found is not None
    assert found.a.engine == found.b.engine
    assert (found.request_id, found.first) == ("r0", 1)


def test_a_difference_in_bits_alone_is_replayed_over_the_whole_completion(tmp_path: Path) -> None:
    change = plant(flip_bit(3), variant="tp2", request=2)
    found = find_divergence(run(tmp_path, change, judged=False), ("tp1@node-0-0", "tp2"))
    assert found is not None
    assert (found.request_id, found.first, found.bitwise) == ("r2", None, False)
    assert len(found.common_tokens()) == 12


def test_an_equal_pair_gives_a_request_to_prove_it_on(tmp_path: Path) -> None:
    found = find_divergence(run(tmp_path), ("tp1@node-0-0", "tp2"))
    assert found is not None
    assert found.bitwise


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (("tp3", "tp2"), "--pair tp3: no such cell or variant; the run has tp1@node-0-0"),
        (("tp1", "tp2"), "--pair tp1: 2 cells of that variant"),
        (("tp2", "tp2"), "both are the same; with an arrangement"),
        (("tp2/sideways", "tp2"), r"expected an arrangement of the run \(batch, solo\)"),
    ],
)
def test_a_pair_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, pair: tuple[str, str], said: str
) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        find_divergence(run(tmp_path), pair)
    assert "\n" not in str(refused.value)


def test_requests_come_back_from_the_folder_as_they_were(tmp_path: Path) -> None:
    maker = RunMaker(spec(TRIALS), inventory(1, 2), request_errors={1: "too long"})
    wanted = [r for r in maker.requests() if r.request_index != 1]
    assert read_requests(maker.write(tmp_path)) == wanted


def trace(*digests: Sequence[int], values: bool = False) -> Trace:
    parts = []
    for order, rows in enumerate(digests):
        bits = np.array([[d, 1] for d in rows], dtype=np.uint32)
        parts.append(
            Part(
                module=f"layers.{order}.mlp", kind="SiluAndMul", part="output", rank=0,
                tensor_parallel_rank=0, tensor_parallel_size=1, stage=0, order=order,
                layout=Layout.WHOLE, dtype="float32", columns=2,
                positions=np.arange(len(rows), dtype=np.int32),
                steps=np.zeros(len(rows), dtype=np.int32),
                digests=np.array([(d, d) for d in rows], dtype=np.uint64),
                value_positions=np.arange(len(rows), dtype=np.int32) if values else None,
                values=bits if values else None,
            )
        )  # fmt: skip
    return Trace(parts)


@pytest.fixture
def divergence(tmp_path: Path) -> Divergence:
    found = find_divergence(run(tmp_path, EARLY, judged=False), ("tp1@node-0-0", "tp2"))
    assert found is not None
    return found


def replay(
    first: tuple[Trace, Trace], second: tuple[Trace, Trace] | None = None, **changed: Any
) -> Replay:
    made = Replay(
        first=compare_traces(*first),
        second=None if second is None else compare_traces(*second),
        traces=second or first,
        reproduced=(True, True),
        diverged=True,
        engine_starts=2,
    )
    return replace(made, **changed)


EQUAL = trace([1, 2], [3, 4])
OTHER = trace([1, 2], [3, 9])


def concluded(divergence: Divergence, made: Replay) -> tuple[str, ExitCode]:
    found = conclude(divergence, made, localize(made.second or made.first))
    return str(found.finding), found.exit_code


def test_a_difference_that_both_passes_show_is_found(divergence: Divergence) -> None:
    made = replay((EQUAL, OTHER), (EQUAL, OTHER))
    assert concluded(divergence, made) == ("found", ExitCode.PASS)


def test_a_difference_that_the_second_pass_does_not_show_is_called_unstable(
    divergence: Divergence,
) -> None:
    made = replay((EQUAL, OTHER), (EQUAL, EQUAL))
    assert concluded(divergence, made) == ("not stable", ExitCode.INCONCLUSIVE)
    moved = replay((EQUAL, OTHER), (EQUAL, trace([1, 7], [3, 9])))
    assert concluded(divergence, moved) == ("not stable", ExitCode.INCONCLUSIVE)


def test_equal_modules_under_other_tokens_point_behind_the_model(divergence: Divergence) -> None:
    assert concluded(divergence, replay((EQUAL, EQUAL))) == ("after the model", ExitCode.PASS)


def test_a_divergence_that_does_not_come_again_is_no_equality(divergence: Divergence) -> None:
    made = replay((EQUAL, EQUAL), diverged=False)
    assert concluded(divergence, made) == ("not reproduced", ExitCode.INCONCLUSIVE)


def test_equal_cells_that_stay_equal_pass(tmp_path: Path) -> None:
    found = find_divergence(run(tmp_path, judged=False), ("tp1@node-0-0", "tp2"))
    assert found is not None
    made = replay((EQUAL, EQUAL), diverged=False)
    assert concluded(found, made) == ("no difference found", ExitCode.PASS)


def test_nothing_in_common_is_inconclusive(divergence: Divergence) -> None:
    made = replay((EQUAL, Trace([])))
    assert concluded(divergence, made) == ("nothing to compare", ExitCode.INCONCLUSIVE)


def test_the_document_is_json_and_the_lines_say_module_growth_and_doubts(
    tmp_path: Path, divergence: Divergence
) -> None:
    nan = 0x7FC00000
    kept = trace([1, 2], [3, 4], values=True), trace([1, 2], [3, nan], values=True)
    made = replay(kept, kept, reproduced=(True, False), notes=["side a: something"])
    localization = localize(compare_traces(*kept))
    document = document_of(RunFolder.open(tmp_path / "run"), divergence, made, localization)
    document["folder"] = "here"
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text)["module"] == "layers.1.mlp"
    lines = "\n".join(lines_of(document))
    assert lines.startswith("layers.1.mlp is the first module whose output differs")
    assert "layers.1: 1 of 2 elements" in lines or "layers.1.mlp: 1 of 2 elements" in lines
    assert "did not give what the run had recorded" in lines
    assert "side a: something" in lines


def test_traces_are_kept_one_row_a_position_with_16_bytes_each() -> None:
    table = trace_table(OTHER)
    assert table.schema == trace_schema()
    assert table.num_rows == 4
    assert table.column("digest")[3].as_py() == np.array([9, 9], dtype="<u8").tobytes()
    assert trace_table(Trace([])).schema == trace_schema()


def test_the_plot_names_both_sides_and_marks_the_first_module(divergence: Divergence) -> None:
    kept = trace([1, 2], [3, 4], values=True), trace([1, 2], [3, 9], values=True)
    svg = growth_svg(localize(compare_traces(*kept)), ("tp1@$a$", "b"))
    assert "first: layers.1.mlp" in svg
    assert "tp1@$a$" in svg
    assert "layer 1" in svg
