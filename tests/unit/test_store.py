"""The run folder: whole files or none, bit-exact floats, one clear line for what is damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytest.errors import StoreError
from raytest.schema import observations_schema, payloads_schema
from raytest.store import RunFolder, find_run, read_table, write_json, write_table

ODD_FLOATS = np.array(
    [0x7F800001, 0x7FC00000, 0xFFC00001, 0x80000000, 0x00000001, 0x7F800000], np.uint32
).view(np.float32)


def folder(tmp_path: Path, run_id: str = "r1") -> RunFolder:
    return RunFolder.create(tmp_path, run_id, {"spec": {}, "plan": {}})


def payload_table(payload_id: bytes = b"p" * 16) -> pa.Table:
    offsets = pa.array([0, len(ODD_FLOATS)], pa.int32())
    ids = pa.array(np.arange(len(ODD_FLOATS)), pa.int32())
    empty = pa.array([[]], pa.list_(pa.int32()))
    return pa.table(
        [
            pa.array([payload_id], pa.binary(16)),
            pa.array([b"q" * 16], pa.binary(16)),
            pa.ListArray.from_arrays(offsets, ids),
            pa.ListArray.from_arrays(offsets, pa.array(ODD_FLOATS)),
            pa.array([0], pa.int32()),
            empty,
            pa.array([[]], pa.list_(pa.float32())),
            pa.array([None], pa.string()),
        ],
        schema=payloads_schema(),
    )


def test_floats_come_back_bit_for_bit(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write_trial(("c", 0, 0), observations_schema().empty_table(), payload_table())
    (found,) = run.payloads([b"p" * 16]).values()
    assert (found.logprobs.view(np.uint32) == ODD_FLOATS.view(np.uint32)).all()


def test_a_trial_is_finished_once_its_observations_are_there(tmp_path: Path) -> None:
    run = folder(tmp_path)
    assert run.finished_trials() == set()
    run.write_trial(("tp1@n0-0", 1, 2), observations_schema().empty_table(), None)
    assert run.finished_trials() == {("tp1@n0-0", 1, 2)}


def test_a_payload_that_is_missing_is_told_and_not_passed_over(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.write_trial(("c", 0, 0), observations_schema().empty_table(), payload_table())
    with pytest.raises(StoreError, match="1 payloads that observations refer to are missing"):
        run.payloads([b"p" * 16, b"x" * 16])


def test_a_run_id_in_use_is_refused_and_nothing_is_overwritten(tmp_path: Path) -> None:
    first = folder(tmp_path)
    before = (first.path / "manifest.json").read_bytes()
    with pytest.raises(StoreError, match="run id in use; --resume takes it up"):
        folder(tmp_path)
    assert (first.path / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("run_id", ["", "../x", "a/b", ".hidden", "x" * 101, "a b"])
def test_a_run_id_that_is_no_folder_name_is_refused(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(StoreError, match="run id"):
        folder(tmp_path, run_id)


def test_a_run_of_another_schema_version_is_one_line(tmp_path: Path) -> None:
    run = folder(tmp_path)
    write_json(run.path / "manifest.json", {"schema_version": 99, "run_id": "r1"})
    with pytest.raises(StoreError, match="schema version 99; this raytest reads 1"):
        RunFolder.open(run.path)


def test_a_folder_that_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no such run"):
        RunFolder.open(tmp_path / "absent")
    with pytest.raises(StoreError, match="not a run of raytest"):
        RunFolder.open(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="cannot be read as JSON"):
        RunFolder.open(tmp_path)


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_foreign(path: Path) -> None:
    path.write_text("a,b\n1,2\n")


def damage_column(path: Path) -> None:
    pq.write_table(payload_table().drop_columns(["logprobs"]), path)


def damage_type(path: Path) -> None:
    table = payload_table()
    wide = table.column("logprobs").cast(pa.list_(pa.float64()))
    pq.write_table(table.set_column(3, "logprobs", wide), path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_truncate, "damaged or not Parquet"),
        (damage_empty, "damaged or not Parquet"),
        (damage_foreign, "damaged or not Parquet"),
        (damage_column, "column 'logprobs' is missing"),
        (damage_type, "column 'logprobs' is list<.*double>, expected list<.*float>"),
    ],
)
def test_a_damaged_file_names_itself_and_is_not_cast(
    tmp_path: Path, damage: object, said: str
) -> None:
    path = tmp_path / "p.parquet"
    write_table(path, payload_table(), payloads_schema())
    damage(path)  # type: ignore[operator]
    with pytest.raises(StoreError, match=said) as caught:
        read_table(path, payloads_schema())
    assert str(path) in str(caught.value)


def test_a_write_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"a": 1})
    with pytest.raises(RecursionError):
        write_json(path, _deep())
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def _deep() -> list[object]:
    value: list[object] = []
    for _ in range(100_000):
        value = [value]
    return value


def test_only_failures_that_were_not_mended_count(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.event("launch failed", cell_id="a", launch=0, reason="x")
    run.event("launch failed", cell_id="b", launch=0, reason="y")
    run.event("launch done", cell_id="a", launch=0)
    assert [f["cell_id"] for f in run.failures()] == ["b"]


def test_a_half_written_event_is_passed_over(tmp_path: Path) -> None:
    run = folder(tmp_path)
    run.event("planned")
    with (run.path / "events.jsonl").open("a") as file:
        file.write('{"event": "tri')
    assert [e["event"] for e in run.events()] == ["planned"]


def test_latest_is_the_run_made_last(tmp_path: Path) -> None:
    for run_id, made in (("a", "2026-01-02"), ("b", "2026-01-03"), ("c", "2026-01-01")):
        RunFolder.create(tmp_path, run_id, {"spec": {}, "plan": {}, "created_at": made})
    assert find_run(tmp_path, "latest").name == "b"
    assert find_run(tmp_path, "a").name == "a"
    with pytest.raises(StoreError, match="no such run"):
        find_run(tmp_path, "nope")
