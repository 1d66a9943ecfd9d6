"""verdict.json: valid against its schema, and a pure function of the results."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytest.compare.evaluate import evaluate
from raytest.compare.runs import compare_runs
from raytest.compare.verdict_json import verdict_document, verdict_schema
from raytest.errors import NotComparableError, UsageError
from raytest.inventory import Inventory
from raytest.schema import fingerprints_schema
from raytest.store import RunFolder
from tests.support.make_run import RunMaker, flip_bit, inventory, noise, plant, spec, swap_token

TEXT = """
[trials]
repeats = 2
arrangements = ["batch", "solo"]
[gates]
tp = { tokens = 0.9, k3_kl = 0.1, confidence = 0.95 }
[[variants]]
name = "tp1"
[[variants]]
name = "tp2"
tensor_parallel_size = 2
"""
MAKERS = {
    "healthy": RunMaker(spec(), inventory(2, 4)),
    "one gpu": RunMaker(spec(), inventory(2, 4), 8, changes=[plant(flip_bit(), slot="node-0:1")]),
    "everything": RunMaker(
        spec(TEXT),
        inventory(1, 4),
        changes=[plant(swap_token(), variant="tp2"), plant(noise(0.5), repeat=1)],
    ),
    "holes": RunMaker(
        spec(), inventory(1, 2), skip=[("tp1@node-0-0", 0, 1)], request_errors={1: "x"}
    ),
    "nothing": RunMaker(spec(), inventory(1, 1), skip=[("tp1@node-0-0", 0, i) for i in range(2)]),
    "no logprobs": RunMaker(
        spec("[workload]\nsampling = { temperature = 0, logprobs = 0 }\n"), inventory(1, 3)
    ),
}


def document(folder: RunFolder) -> dict[str, Any]:
    made = verdict_document(evaluate(folder), folder.manifest)
    # what a file holds is what JSON can say: no NaN, no infinities, no numpy
    return json.loads(json.dumps(made, allow_nan=False))


def without_run(made: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in made.items() if k != "run"}, sort_keys=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_every_document_is_valid(tmp_path: Path, kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(verdict_schema())
    jsonschema.validate(document(MAKERS[kind].write(tmp_path)), verdict_schema())


def test_the_schema_is_not_one_that_accepts_anything(tmp_path: Path) -> None:
    made = document(MAKERS["healthy"].write(tmp_path))
    for broken in (
        {**made, "verdict": "fine"},
        {**made, "exit_code": 2},
        {**made, "extra": 1},
        {k: v for k, v in made.items() if k != "controls"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, verdict_schema())


@pytest.mark.parametrize("kind", MAKERS)
def test_another_run_id_and_other_times_leave_the_judgement_as_it_is(
    tmp_path: Path, kind: str
) -> None:
    first = document(MAKERS[kind].write(tmp_path, "a"))
    folder = MAKERS[kind].write(tmp_path, "b")
    folder.write_manifest(ended_at="2027-01-01T00:00:00+00:00")
    second = document(folder)
    assert first["run"] != second["run"]
    assert without_run(first) == without_run(second)
    assert first["judgement_digest"] == second["judgement_digest"]


def test_a_resumed_run_is_judged_like_an_uninterrupted_one(tmp_path: Path) -> None:
    whole = MAKERS["one gpu"].write(tmp_path, "whole")
    key = ("tp1@node-0-1", 0, 1)
    resumed = replace(MAKERS["one gpu"], skip=[key]).write(tmp_path, "resumed")
    resumed.event("launch failed", cell_id=key[0], launch=0, kind="error", reason="died")
    before = document(resumed)
    name = "observations/tp1@node-0-1/0-1.parquet"
    shutil.copy(whole.path / name, resumed.path / name)
    resumed.event("launch done", cell_id=key[0], launch=0)
    assert before["verdict"] == "mismatch"
    assert before["complete"] is False
    assert without_run(document(resumed)) == without_run(document(whole))


def test_shuffled_rows_and_payload_files_change_no_byte(tmp_path: Path) -> None:
    folder = MAKERS["everything"].write(tmp_path)
    before = document(folder)
    table = evaluate(folder).verdicts
    for i, path in enumerate(sorted(folder.path.glob("observations/*/*.parquet"))):
        rows = pq.ParquetFile(path).read()
        order = [(r + i) % rows.num_rows for r in range(rows.num_rows)][::-1]
        pq.write_table(rows.take(order), path)
    tables = [pq.ParquetFile(p).read() for p in folder.payload_paths()]
    for path in folder.payload_paths():
        path.unlink()
    whole = pa.concat_tables(tables[::-1])
    pq.write_table(whole.slice(5), folder.path / "payloads" / "z.parquet")
    pq.write_table(whole.slice(0, 7), folder.path / "payloads" / "a.parquet")
    assert without_run(document(folder)) == without_run(before)
    assert evaluate(folder).verdicts.equals(table)


def test_a_pass_says_what_it_could_not_have_seen(tmp_path: Path) -> None:
    power = document(MAKERS["healthy"].write(tmp_path))["power"]
    assert power["undetected_rate"] == pytest.approx(1 - 0.05 ** (1 / 4))
    assert power["axes"]["gpu"] == "0 of 4 requests differ; true rate < 53% (95%)"


# runs against runs -------------------------------------------------------------------------------


def test_two_equal_runs_pass(tmp_path: Path) -> None:
    made = compare_runs([MAKERS["healthy"].write(tmp_path, n) for n in "ab"])
    assert made.verdict == "pass"
    assert made.axes[0].numbers.n_comparisons == 8 * 2 * 4
    jsonschema.validate(
        json.loads(json.dumps(verdict_document(made, {}), allow_nan=False)), verdict_schema()
    )


def test_a_run_that_differs_is_a_mismatch_and_names_the_trial(tmp_path: Path) -> None:
    planted = replace(MAKERS["healthy"], changes=[plant(flip_bit(), slot="node-0:1")])
    runs = [MAKERS["healthy"].write(tmp_path, "good"), planted.write(tmp_path, "bad")]
    made = compare_runs(runs)
    assert made.verdict == "mismatch"
    worst = made.axes[0].numbers.worst
    assert worst is not None
    assert worst.reference.startswith("good:tp1@node-0-1")
    assert worst.members[0].startswith("bad:tp1@node-0-1")


PROMPTS = ((1, 2, 3), (4, 5, 6), (7, 8, 9))
THREE = RunMaker(spec(), inventory(1, 1), prompts=PROMPTS, seeds=(1, 1, 1))


def test_requests_are_matched_by_prompt_whatever_their_order(tmp_path: Path) -> None:
    backwards = replace(THREE, prompts=PROMPTS[::-1])
    made = compare_runs([THREE.write(tmp_path, "a"), backwards.write(tmp_path, "b")])
    assert made.verdict == "pass"
    assert made.axes[0].numbers.n_requests == 3


def test_equal_prompts_are_matched_in_their_order(tmp_path: Path) -> None:
    twins = replace(THREE, prompts=(PROMPTS[0], PROMPTS[0], PROMPTS[1]))
    made = compare_runs([twins.write(tmp_path, n) for n in "ab"])
    assert (made.verdict, made.axes[0].numbers.n_requests) == ("pass", 3)


def test_prompts_that_only_one_run_has_are_counted(tmp_path: Path) -> None:
    more = replace(THREE, prompts=(*PROMPTS, (10, 11)), seeds=(1, 1, 1, 1))
    made = compare_runs([THREE.write(tmp_path, "a"), more.write(tmp_path, "b")])
    assert made.verdict == "not comparable"
    assert made.reasons == ("1 requests are in a later run only",)
    back = compare_runs([RunFolder.open(tmp_path / n) for n in "ba"])
    assert back.reasons[0] == "1 requests are in the first run only"


def test_the_same_prompt_with_other_sampling_is_not_the_same_request(tmp_path: Path) -> None:
    other = replace(THREE, seeds=(1, 1, 2))
    made = compare_runs([THREE.write(tmp_path, "a"), other.write(tmp_path, "b")])
    assert made.reasons[0] == "1 requests have the same prompt but other sampling"
    assert made.axes[0].numbers.n_requests == 2


def test_runs_without_a_common_request_are_refused(tmp_path: Path) -> None:
    other = replace(THREE, prompts=[(70, 71), (80, 81)])
    with pytest.raises(NotComparableError, match="no request in common"):
        compare_runs([THREE.write(tmp_path, "a"), other.write(tmp_path, "b")])


def test_runs_of_different_models_are_refused(tmp_path: Path) -> None:
    model = '[model]\npath = "synthetic:small"\n'
    other = replace(THREE, spec=spec(model))
    with pytest.raises(NotComparableError, match=r"model\.path is 'synthetic:tiny' and"):
        compare_runs([THREE.write(tmp_path, "a"), other.write(tmp_path, "b")])


@pytest.mark.parametrize(("digest", "fine"), [("aa", True), ("bb", False)])
def test_a_model_is_known_by_its_digest_where_both_runs_have_it(
    tmp_path: Path, digest: str, fine: bool
) -> None:
    folders = [THREE.write(tmp_path, n) for n in "ab"]
    for folder, value in zip(folders, ("aa", digest), strict=True):
        row = {"cell_id": "c", "launch": 0, "attempt": 0, "rank": 0, "stage": "loaded"}
        fact = {**row, "key": "model.digest", "value": value}
        folder.write_fingerprints(
            ("c", 0), 0, pa.Table.from_pylist([fact], schema=fingerprints_schema())
        )
    if fine:
        assert compare_runs(folders).verdict == "pass"
    else:
        with pytest.raises(NotComparableError, match=r"model\.digest differs \(aa and bb\)"):
            compare_runs(folders)


def test_other_slots_are_matched_by_variant(tmp_path: Path) -> None:
    elsewhere = replace(THREE, inventory=replace_names(inventory(1, 1), "box"))
    made = compare_runs([THREE.write(tmp_path, "a"), elsewhere.write(tmp_path, "b")])
    assert (made.verdict, made.axes[0].numbers.n_requests) == ("pass", 3)


def replace_names(where: Inventory, name: str) -> Inventory:
    return Inventory(
        tuple(
            replace(n, name=name, devices=tuple(replace(d, node=name) for d in n.devices))
            for n in where.nodes
        )
    )


def test_one_run_alone_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two or more"):
        compare_runs([THREE.write(tmp_path)])
