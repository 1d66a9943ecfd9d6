"""Whole runs on disk, with planted differences: what is seen, who is blamed, how it ends."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from raytest.compare.evaluate import AxisResult, Evaluation, evaluate
from raytest.compare.gates import GateResult
from raytest.compare.runs import compare_runs
from raytest.engines.base import Completion
from raytest.errors import ExitCode, StoreError
from raytest.schema import Axis, RunVerdict
from tests.support.make_run import (
    RunMaker,
    Where,
    flip_bit,
    inventory,
    noise,
    plant,
    spec,
    swap_token,
)

LEVEL3 = "[determinism]\nlevel = 3\n"
TWO = '[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n'
TP = '[[variants]]\nname = "tp1"\n[[variants]]\nname = "tp2"\ntensor_parallel_size = 2\n'


def fleet(nodes: int = 1, devices: int = 4, text: str = "", **fields: Any) -> RunMaker:
    return RunMaker(
        spec(text or "[trials]\nrepeats = 2\n", level=LEVEL3), inventory(nodes, devices), **fields
    )


def axis(evaluation: Evaluation, name: Axis) -> AxisResult:
    return next(a for a in evaluation.axes if a.axis is name)


def codes(evaluation: Evaluation) -> list[str]:
    return [f.code for f in evaluation.findings]


def test_a_healthy_fleet_passes_with_every_control_caught(tmp_path: Path) -> None:
    found = evaluate(fleet(2, 4).write(tmp_path))
    assert (found.verdict, found.exit_code, found.reasons) == (RunVerdict.PASS, ExitCode.PASS, ())
    assert [a.axis for a in found.axes] == [Axis.REPEAT, Axis.GPU, Axis.NODE]
    assert all(a.outcome.result is GateResult.HOLDS for a in found.axes)
    assert [c.name for c in found.controls] == [
        "analysis: token",
        "analysis: logprob bit",
        "engine",
    ]
    assert all(c.caught for c in found.controls)
    assert found.verdicts.num_rows == 0


def test_a_flipped_bit_on_one_gpu_is_blamed_on_that_gpu(tmp_path: Path) -> None:
    maker = fleet(1, 4, n_requests=8, changes=[plant(flip_bit(3), slot="node-0:2")])
    found = evaluate(maker.write(tmp_path))
    assert found.verdict is RunVerdict.MISMATCH
    finding = found.findings[0]
    assert (finding.code, finding.severity, finding.entities) == (
        "outlier-gpu",
        "isolate",
        ("node-0:2",),
    )
    assert finding.p_value == pytest.approx(4 * 0.25**8)
    gpu = axis(found, Axis.GPU)
    assert gpu.numbers.verdicts == {"tokens": 16}
    worst = gpu.numbers.worst
    assert worst is not None
    assert (worst.position, worst.verdict) == (3, "tokens")
    assert worst.members == ("tp1@node-0-2/0-0",)
    assert axis(found, Axis.REPEAT).outcome.result is GateResult.HOLDS
    assert found.attributions[0].suspects[0].persistence == "persistent"


def test_a_gpu_that_errs_in_one_repeat_is_transient_and_only_monitored(tmp_path: Path) -> None:
    planted = plant(flip_bit(), slot="node-0:1", repeat=1)
    found = evaluate(fleet(1, 4, n_requests=8, changes=[planted]).write(tmp_path))
    outlier = next(f for f in found.findings if f.code == "outlier-gpu")
    assert (outlier.severity, outlier.entities) == ("monitor", ("node-0:1",))
    assert "unstable-repeat" in codes(found)


def test_a_whole_node_is_blamed_as_a_node(tmp_path: Path) -> None:
    maker = fleet(4, 2, n_requests=8, changes=[plant(swap_token(), node="node-3")])
    found = evaluate(maker.write(tmp_path))
    assert [f.entities for f in found.findings if f.code == "outlier-node"] == [("node-3",)]
    assert axis(found, Axis.GPU).outcome.result is GateResult.HOLDS


def test_one_bad_gpu_does_not_get_its_node_blamed(tmp_path: Path) -> None:
    maker = fleet(4, 4, n_requests=8, changes=[plant(swap_token(), slot="node-3:1")])
    assert codes(evaluate(maker.write(tmp_path))) == ["outlier-gpu"]


def test_two_slots_that_differ_blame_nobody(tmp_path: Path) -> None:
    maker = fleet(1, 2, n_requests=8, changes=[plant(flip_bit(), slot="node-0:1")])
    assert codes(evaluate(maker.write(tmp_path))) == ["unattributable-gpu"]


def test_one_request_is_too_little_to_blame_anyone(tmp_path: Path) -> None:
    maker = fleet(1, 4, n_requests=8, changes=[plant(flip_bit(), slot="node-0:1", request=2)])
    found = evaluate(maker.write(tmp_path))
    assert found.verdict is RunVerdict.MISMATCH
    assert codes(found) == ["unattributable-gpu"]


def test_more_suspects_than_one_fault_explains_are_systemic_and_unnamed(tmp_path: Path) -> None:
    def change(where: Where, c: Completion) -> Completion:
        slot = int(where.slot.split(":")[1])
        return flip_bit(slot)(c) if slot in (1, 2, 3) else c

    found = evaluate(fleet(1, 8, n_requests=12, changes=[change]).write(tmp_path))
    assert [(f.code, f.entities) for f in found.findings] == [("systemic-gpu", ())]


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (flip_bit(), "tokens"),
        (swap_token(), "near-tie"),
        (noise(1.0), "drift"),
    ],
)
def test_each_kind_of_difference_has_its_verdict(tmp_path: Path, change: Any, verdict: str) -> None:
    maker = fleet(1, 4, changes=[plant(change, slot="node-0:1", request=0)])
    found = evaluate(maker.write(tmp_path))
    assert set(axis(found, Axis.GPU).numbers.verdicts) == {verdict}


def test_a_flip_at_a_wide_margin_is_drift_and_a_finding(tmp_path: Path) -> None:
    def change(c: Completion) -> Completion:
        flipped = swap_token(3)(c)
        top = flipped.top_logprobs.copy().reshape(-1, c.top_k)
        top[3, 1:] -= 5.0
        return replace(flipped, top_logprobs=top.reshape(-1))

    found = evaluate(fleet(1, 4, changes=[plant(change, slot="node-0:1")]).write(tmp_path))
    assert set(axis(found, Axis.GPU).numbers.verdicts) == {"drift"}
    assert "confident-flip" in codes(found)


def test_nan_that_all_agree_on_is_still_a_mismatch(tmp_path: Path) -> None:
    def change(_: Where, c: Completion) -> Completion:
        logprobs = c.logprobs.copy()
        logprobs[0] = np.nan
        return replace(c, logprobs=logprobs)

    found = evaluate(fleet(changes=[change]).write(tmp_path))
    assert found.verdict is RunVerdict.MISMATCH
    assert [(f.code, f.severity) for f in found.findings] == [("nan", "config")]


@pytest.mark.parametrize(
    ("value", "code"), [(np.inf, "inf"), (-np.inf, "inf"), (0.5, "positive-logprob")]
)
def test_impossible_logprobs_are_corrupt(tmp_path: Path, value: float, code: str) -> None:
    def change(c: Completion) -> Completion:
        logprobs = c.logprobs.copy()
        logprobs[2] = value
        return replace(c, logprobs=logprobs)

    found = evaluate(fleet(changes=[plant(change, slot="node-0:1")]).write(tmp_path))
    assert set(axis(found, Axis.GPU).numbers.verdicts) == {"corrupt"}
    assert code in codes(found)


def test_a_negative_zero_is_another_result_but_no_difference_in_nats(tmp_path: Path) -> None:
    def zero(sign: float) -> Any:
        def change(c: Completion) -> Completion:
            logprobs = c.logprobs.copy()
            logprobs[0] = sign
            return replace(c, logprobs=logprobs)

        return change

    changes = [plant(zero(0.0)), plant(zero(-0.0), slot="node-0:1")]
    gpu = axis(evaluate(fleet(changes=changes).write(tmp_path)), Axis.GPU)
    assert gpu.numbers.verdicts == {"tokens": 8}
    assert gpu.numbers.metrics["max_logprob_difference"] == 0.0
    assert gpu.numbers.metrics["max_ulp_float32"] == 1


@pytest.mark.parametrize("length", [0, 1])
def test_empty_and_one_token_completions_are_results(tmp_path: Path, length: int) -> None:
    found = evaluate(fleet(length=length).write(tmp_path))
    assert axis(found, Axis.GPU).outcome.result is GateResult.HOLDS
    # nothing to plant a difference in: an empty run proves nothing
    assert found.verdict is (RunVerdict.PASS if length else RunVerdict.INCONCLUSIVE)


def test_a_completion_that_ends_early_diverges_where_it_ends(tmp_path: Path) -> None:
    def change(c: Completion) -> Completion:
        return replace(
            c,
            token_ids=c.token_ids[:5],
            logprobs=c.logprobs[:5],
            top_token_ids=c.top_token_ids[:25],
            top_logprobs=c.top_logprobs[:25],
            finish_reason="stop",
        )

    found = evaluate(fleet(changes=[plant(change, slot="node-0:1", request=0)]).write(tmp_path))
    worst = axis(found, Axis.GPU).numbers.worst
    assert worst is not None
    assert (worst.position, worst.token, worst.verdict) == (5, None, "drift")


def test_another_finish_reason_is_not_equal_even_with_equal_tokens(tmp_path: Path) -> None:
    planted = plant(lambda c: replace(c, finish_reason="stop"), slot="node-0:1", request=0)
    gpu = axis(evaluate(fleet(changes=[planted]).write(tmp_path)), Axis.GPU)
    assert gpu.numbers.n_comparisons - gpu.numbers.n_tokens == 2
    assert gpu.numbers.worst is not None
    assert "finish reason" in gpu.numbers.worst.reason


def test_samples_are_matched_by_their_index(tmp_path: Path) -> None:
    sampled = "[workload]\nsampling = { temperature = 1.0, n = 3, max_tokens = 8 }\n"
    maker = fleet(1, 3, f"{sampled}[trials]\nrepeats = 1\n")
    assert evaluate(maker.write(tmp_path)).verdict is RunVerdict.PASS
    planted = replace(maker, changes=[plant(swap_token(), slot="node-0:1", request=1)])
    gpu = axis(evaluate(planted.write(tmp_path, "b")), Axis.GPU)
    assert gpu.numbers.verdicts == {"sampled-flip": 3}
    assert (gpu.numbers.n_requests, gpu.numbers.n_requests_tokens) == (4, 3)


# completeness and preconditions ------------------------------------------------------------------


def test_a_missing_trial_is_inconclusive_never_equal(tmp_path: Path) -> None:
    found = evaluate(fleet(skip=[("tp1@node-0-1", 0, 1)]).write(tmp_path))
    assert (found.verdict, found.exit_code) == (RunVerdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE)
    assert found.integrity.missing_trials == ("tp1@node-0-1/0-1",)
    gpu = axis(found, Axis.GPU)
    assert gpu.outcome.result is GateResult.UNDECIDED
    assert gpu.numbers.n_not_made == 4


def test_a_mismatch_outranks_a_missing_trial(tmp_path: Path) -> None:
    maker = fleet(changes=[plant(flip_bit(), slot="node-0:0")], skip=[("tp1@node-0-1", 0, 1)])
    assert evaluate(maker.write(tmp_path)).exit_code is ExitCode.MISMATCH


def test_no_trial_at_all_is_inconclusive(tmp_path: Path) -> None:
    maker = fleet(1, 2, skip=[(f"tp1@node-0-{i}", 0, t) for i in range(2) for t in range(2)])
    found = evaluate(maker.write(tmp_path))
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert "no observation was made" in found.reasons


def test_a_dropped_completion_is_an_error_row_and_inconclusive(tmp_path: Path) -> None:
    def drop(where: Where, c: Completion) -> Completion | None:
        return None if where.slot == "node-0:1" and where.request.request_index == 0 else c

    found = evaluate(fleet(changes=[drop]).write(tmp_path))
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert {e["kind"] for e in found.integrity.errors} == {"missing"}


def _rows(change: Any) -> Any:
    def edit(key: tuple[str, int, int], table: pa.Table) -> pa.Table:
        return change(table) if key == ("tp1@node-0-1", 0, 0) else table

    return edit


def test_a_row_that_is_simply_gone_is_missing(tmp_path: Path) -> None:
    found = evaluate(fleet(edit=_rows(lambda t: t.slice(1))).write(tmp_path))
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert "1 observations are missing in trials that ran" in found.reasons


def test_duplicate_rows_are_an_error_even_when_they_agree(tmp_path: Path) -> None:
    double = _rows(lambda t: pa.concat_tables([t, t.slice(0, 1)]))
    found = evaluate(fleet(edit=double).write(tmp_path))
    assert (found.verdict, found.exit_code) == (RunVerdict.NOT_COMPARABLE, ExitCode.NOT_COMPARABLE)
    assert any("occur more than once" in r for r in found.reasons)


def test_rows_in_another_order_change_nothing(tmp_path: Path) -> None:
    plain = evaluate(fleet(changes=[plant(flip_bit(), slot="node-0:1")]).write(tmp_path, "a"))

    def backwards(_: Any, table: pa.Table) -> pa.Table:
        return table.take(list(range(table.num_rows))[::-1])

    maker = fleet(changes=[plant(flip_bit(), slot="node-0:1")], edit=backwards)
    other = evaluate(maker.write(tmp_path, "b"))
    assert other.verdicts.equals(plain.verdicts)
    assert repr(other.axes) == repr(plain.axes)


def _with(column: str, values: Any) -> Any:
    def change(table: pa.Table) -> pa.Table:
        at = table.column_names.index(column)
        made = pa.array(values(table.column(column).to_pylist()), table.schema.field(column).type)
        return table.set_column(at, table.schema.field(column), made)

    return change


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("prompt_digest", lambda v: [bytes(16), *v[1:]], "another prompt than in requests.parquet"),
        ("request_id", lambda v: ["x", *v[1:]], "another request id"),
        ("request_index", lambda v: [99, *v[1:]], "request_index 99 is not in requests.parquet"),
        ("cell_id", lambda v: ["other", *v[1:]], "rows with another cell_id"),
    ],
)
def test_rows_that_contradict_the_run_are_not_comparable(
    tmp_path: Path, column: str, values: Any, told: str
) -> None:
    found = evaluate(fleet(edit=_rows(_with(column, values))).write(tmp_path))
    assert found.verdict is RunVerdict.NOT_COMPARABLE
    assert any(told in r for r in found.reasons)


def test_one_payload_id_for_two_results_is_told(tmp_path: Path) -> None:
    same = _with("logprob_digest", lambda v: [bytes(16), *v[1:]])
    found = evaluate(fleet(edit=_rows(same)).write(tmp_path))
    assert "observations: one payload_id with different logprob_digest" in found.reasons


def test_slots_that_are_one_device_twice_are_not_compared(tmp_path: Path) -> None:
    found = evaluate(fleet(1, 2, uuids=lambda launch: ["GPU-0-0"]).write(tmp_path))
    assert found.verdict is RunVerdict.NOT_COMPARABLE
    assert axis(found, Axis.GPU).numbers.n_comparisons == 0
    assert any("report the same devices" in r for r in found.reasons)
    assert any("planned on GPU-0-1" in r for r in found.reasons)


def test_a_prompt_that_is_unusable_everywhere_is_skipped_not_missing(tmp_path: Path) -> None:
    found = evaluate(fleet(request_errors={1: "too long"}).write(tmp_path))
    assert found.verdict is RunVerdict.PASS
    assert found.integrity.skipped == ({"request_id": "r1", "error": "too long"},)
    assert axis(found, Axis.GPU).numbers.n_requests == 3


def test_without_an_engine_control_a_run_says_nothing(tmp_path: Path) -> None:
    found = evaluate(fleet(control=False).write(tmp_path))
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert found.reasons == ("control missed: engine: did not run",)


def test_a_failed_launch_leaves_the_run_inconclusive(tmp_path: Path) -> None:
    folder = fleet().write(tmp_path)
    folder.event("launch failed", cell_id="tp1@node-0-1", launch=0, kind="error", reason="died")
    found = evaluate(folder)
    assert found.verdict is RunVerdict.INCONCLUSIVE
    assert found.integrity.failures[0]["reason"] == "died"


# axes --------------------------------------------------------------------------------------------


def test_gpu_models_never_vote_together(tmp_path: Path) -> None:
    maker = replace(fleet(), inventory=inventory(2, 1, models=("H200", "A100")))
    found = evaluate(maker.write(tmp_path))
    node = axis(found, Axis.NODE)
    assert node.numbers.n_comparisons == 0
    assert "GPU models differ (A100, H200)" in next(iter(node.left_out))
    assert found.verdict is RunVerdict.INCONCLUSIVE


def test_tp_may_differ_unless_a_gate_says_otherwise(tmp_path: Path) -> None:
    planted = [plant(swap_token(), variant="tp2")]
    found = evaluate(fleet(text=TP, changes=planted).write(tmp_path, "a"))
    assert axis(found, Axis.TP).outcome.result is GateResult.RECORDED
    assert found.verdict is RunVerdict.PASS
    gated = evaluate(
        fleet(text=f'[gates]\ntp = "bitwise"\n{TP}', changes=planted).write(tmp_path, "b")
    )
    assert gated.verdict is RunVerdict.MISMATCH
    assert "tp-dependent" in codes(gated)


def test_an_arm_without_logprobs_is_compared_by_tokens_only(tmp_path: Path) -> None:
    arms = '[[variants]]\nname = "a"\n[[variants]]\nname = "b"\nlogprobs = 2\n'
    gate = '[gates]\nvariant = "{}"\n'
    by_tokens = evaluate(fleet(text=gate.format("tokens") + arms).write(tmp_path, "a"))
    assert axis(by_tokens, Axis.VARIANT).outcome.result is GateResult.HOLDS
    by_bits = evaluate(fleet(text=gate.format("bitwise") + arms).write(tmp_path, "b"))
    outcome = axis(by_bits, Axis.VARIANT).outcome
    assert outcome.result is GateResult.UNDECIDED
    assert "tokens only" in outcome.reason
    assert by_bits.verdict is RunVerdict.INCONCLUSIVE


MODES = """
[[variants]]
name = "a"
[[variants]]
name = "b"
engine = { logprobs_mode = "raw_logits" }
"""
OBSERVED = """
[gates]
variant = "tokens"
[[variants]]
name = "observed"
[[variants]]
name = "unobserved"
logprobs = false
"""


def test_other_logprobs_modes_are_compared_by_tokens_only(tmp_path: Path) -> None:
    found = axis(evaluate(fleet(text=MODES).write(tmp_path)), Axis.VARIANT).numbers
    assert found.n_comparisons == found.n_tokens_only > 0


def test_runs_that_kept_other_logprobs_are_compared_by_tokens_only(tmp_path: Path) -> None:
    sampling = "[workload]\nsampling = {{ logprobs = {} }}\n"
    folders = [
        fleet(text=sampling.format(k)).write(tmp_path, f"k{k}".lower()) for k in (5, 3, "false")
    ]
    for other in folders[1:]:
        numbers = axis(compare_runs([folders[0], other]), Axis.RUN).numbers
        assert numbers.n_comparisons == numbers.n_tokens_only > 0


def test_an_arm_that_is_not_looked_at_and_answers_differently_is_an_observer_effect(
    tmp_path: Path,
) -> None:
    same = evaluate(fleet(text=OBSERVED).write(tmp_path, "same"))
    assert axis(same, Axis.VARIANT).outcome.result is GateResult.HOLDS
    swap = plant(swap_token(), variant="observed", request=1)
    found = evaluate(fleet(text=OBSERVED, changes=[swap]).write(tmp_path, "other"))
    assert found.verdict is RunVerdict.MISMATCH
    assert "observer-effect" in codes(found)


def test_a_batch_that_did_not_form_proves_nothing(tmp_path: Path) -> None:
    text = '[trials]\narrangements = ["batch", "solo"]\n[gates]\narrangement = "bitwise"\n'
    maker = fleet(text=text, batch_size=lambda launch, trial: 1)
    found = evaluate(maker.write(tmp_path))
    assert found.verdict is RunVerdict.NOT_COMPARABLE
    assert axis(found, Axis.ARRANGEMENT).left_out == {
        "batch: no batch formed: never more than one request ran at a time": 8
    }


def test_a_prefix_cache_that_was_never_hit_proves_nothing(tmp_path: Path) -> None:
    text = '[trials]\nrepeats = 1\narrangements = ["batch", "prefix"]\n'
    cold = evaluate(fleet(text=text).write(tmp_path, "a"))
    assert axis(cold, Axis.ARRANGEMENT).numbers.n_comparisons == 0
    warm = evaluate(fleet(text=text, n_cached=16).write(tmp_path, "b"))
    assert axis(warm, Axis.ARRANGEMENT).numbers.n_comparisons == 16


def test_the_first_repeat_against_the_rest_is_called_a_cold_start(tmp_path: Path) -> None:
    maker = fleet(1, 2, "[trials]\nrepeats = 3\n", changes=[plant(flip_bit(), repeat=0)])
    assert codes(evaluate(maker.write(tmp_path))) == ["cold-start"]


def test_degenerate_repetition_is_told_even_where_all_agree(tmp_path: Path) -> None:
    def stuck(_: Where, c: Completion) -> Completion:
        return replace(c, token_ids=np.full_like(c.token_ids, 7))

    found = evaluate(fleet(length=40, changes=[stuck]).write(tmp_path))
    assert (found.verdict, codes(found)) == (RunVerdict.PASS, ["degenerate-repetition"])


def test_a_loop_after_a_near_tie_is_a_near_tie_and_no_corruption(tmp_path: Path) -> None:
    """Seen on an H200: eager against CUDA graphs of a random model flips at a tie, then loops."""

    def loops(c: Completion) -> Completion:
        flipped = swap_token()(c)
        tokens = flipped.token_ids.copy()
        tokens[4:] = 7
        return replace(flipped, token_ids=tokens)

    maker = fleet(1, 3, length=40, changes=[plant(loops, slot="node-0:1")])
    verdicts = axis(evaluate(maker.write(tmp_path)), Axis.GPU).numbers.verdicts
    assert set(verdicts) == {"near-tie"}


def test_must_differ_fails_where_nothing_does(tmp_path: Path) -> None:
    text = '[gates]\nvariant = "must-differ"\n' + TWO
    assert evaluate(fleet(text=text).write(tmp_path, "a")).verdict is RunVerdict.MISMATCH
    differing = fleet(text=text, changes=[plant(flip_bit(), variant="b")])
    assert evaluate(differing.write(tmp_path, "b")).verdict is RunVerdict.PASS


# damaged folders ---------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["truncated", "empty", "foreign", "flipped"])
@pytest.mark.parametrize("which", ["observations", "payloads"])
def test_a_damaged_file_is_one_line_that_names_it(tmp_path: Path, damage: str, which: str) -> None:
    import pyarrow.parquet as pq

    folder = fleet().write(tmp_path)
    path = sorted((folder.path / which).rglob("*.parquet"))[0]
    data = path.read_bytes()
    if damage == "foreign":
        pq.write_table(pa.table({"x": [1]}), path)
    else:
        path.write_bytes(
            {
                "truncated": data[: len(data) // 2],
                "empty": b"",
                "flipped": data[:100] + bytes([data[100] ^ 1]) + data[101:],
            }[damage]
        )
    with pytest.raises(StoreError) as error:
        evaluate(folder)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_payload_that_is_nowhere_is_told(tmp_path: Path) -> None:
    folder = fleet().write(tmp_path)
    for path in (folder.path / "payloads").glob("*.parquet"):
        path.unlink()
    with pytest.raises(StoreError, match="4 payloads that observations refer to are missing"):
        evaluate(folder)
