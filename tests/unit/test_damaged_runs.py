"""What is wrong with a run folder, through the command line: one line, the right exit code, and
nothing on disk is touched."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytest.cli import main
from raytest.compare.evaluate import evaluate
from raytest.errors import StoreError
from raytest.runner import judge
from raytest.schema import observations_schema
from raytest.store import RunFolder, write_table
from tests.support.make_run import RunMaker, inventory, spec

FIRST = ("tp1@node-0-0", 0, 0)
Ran = tuple[int, str, str]
Command = Callable[..., Ran]


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that passed: two GPUs, two repeats."""
    made = RunMaker(spec("[trials]\nrepeats = 2\n"), inventory(1, 2), n_requests=6)
    folder = made.write(tmp_path / "results", "one")
    judge(folder, evaluate(folder))
    return folder


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["raytest", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        assert isinstance(end.value.code, int)
        return end.value.code, said.out, said.err

    return run


def contents(folder: RunFolder) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in sorted(folder.path.rglob("*")) if p.is_file()}


def flip(path: Path, column: str) -> None:
    """Flip a bit of the last data byte of one column."""
    found = pq.read_metadata(path)
    group = found.row_group(0)
    chunks = [group.column(i) for i in range(found.num_columns)]
    (chunk,) = (c for c in chunks if c.path_in_schema.split(".")[0] == column)
    starts = [chunk.data_page_offset, chunk.dictionary_page_offset]
    at = min(s for s in starts if s) + chunk.total_compressed_size - 1
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])


def damage(path: Path, kind: str) -> None:
    data = path.read_bytes()
    if kind == "foreign":
        pq.write_table(pa.table({"x": [1]}), path)
    elif kind == "flipped":
        flip(path, "prompt_token_ids" if path.name == "requests.parquet" else "payload_id")
    else:
        path.write_bytes({"truncated": data[: len(data) // 2], "empty": b""}[kind])


@pytest.mark.parametrize("kind", ["truncated", "empty", "foreign", "flipped"])
@pytest.mark.parametrize("which", ["observations", "payloads", "requests.parquet"])
def test_a_damaged_file_is_one_line_with_exit_code_2(
    folder: RunFolder, command: Command, which: str, kind: str
) -> None:
    path = folder.path / which
    path = path if path.is_file() else sorted(path.rglob("*.parquet"))[0]
    damage(path, kind)
    before = contents(folder)
    for what in ("compare", "explain") if which != "payloads" else ("compare",):
        code, out, err = command(what, "one")
        assert (code, out) == (2, ""), err
        (line,) = err.splitlines()
        assert line.startswith(f"raytest: {path.relative_to(Path.cwd())}: ")
    assert contents(folder) == before


@pytest.mark.parametrize("column", observations_schema().names)
def test_a_bit_that_flipped_is_found_in_any_column(folder: RunFolder, column: str) -> None:
    flip(folder.observations_path(FIRST), column)
    with pytest.raises(StoreError, match=r"0-0\.parquet: damaged"):
        evaluate(folder)


def test_a_manifest_of_another_version_is_refused(folder: RunFolder, command: Command) -> None:
    path = folder.path / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": 99}))
    before = contents(folder)
    for what in ("compare", "report", "explain", "replay"):
        code, out, err = command(what, "one")
        (line,) = err.splitlines()
        assert (code, out) == (2, ""), what
        assert "schema version 99" in line
    assert contents(folder) == before


def rows(folder: RunFolder, change: Callable[[pa.Table], pa.Table]) -> None:
    table = change(folder.read_trial(FIRST))
    write_table(folder.observations_path(FIRST), table, observations_schema())


def verdict(command: Command) -> tuple[int, dict[str, object]]:
    code, out, err = command("compare", "one", "--format", "json")
    assert err == ""
    document: dict[str, object] = json.loads(out)
    assert document["exit_code"] == code
    return code, document


def test_a_missing_trial_is_inconclusive_and_named(folder: RunFolder, command: Command) -> None:
    folder.observations_path(FIRST).unlink()
    code, document = verdict(command)
    assert code == 3
    assert document["trials"] == {
        "planned": 4,
        "ran": 3,
        "missing": ["tp1@node-0-0/0-0"],
        "not_needed": 0,
    }


def test_a_row_that_is_there_twice_is_not_comparable(folder: RunFolder, command: Command) -> None:
    rows(folder, lambda t: pa.concat_tables([t, t.slice(2, 1)]))
    code, document = verdict(command)
    assert code == 4
    assert document["problems"] == ["1 observations occur more than once (first: tp1@node-0-0/0-0)"]


def test_a_row_that_is_gone_is_inconclusive(folder: RunFolder, command: Command) -> None:
    rows(folder, lambda t: t.slice(1))
    code, document = verdict(command)
    assert code == 3
    assert document["incomplete"] == ["1 observations are missing in trials that ran"]


def test_rows_in_another_order_change_nothing(folder: RunFolder, command: Command) -> None:
    before = folder.verdict()
    rows(folder, lambda t: t.take([3, 1, 5, 0, 2, 4]))
    code, document = verdict(command)
    assert code == 0
    assert before is not None
    assert document["judgement_digest"] == before["judgement_digest"]


def test_a_folder_that_is_no_run_and_one_that_is_not_there(
    tmp_path: Path, command: Command
) -> None:
    (tmp_path / "empty").mkdir()
    for name, said in (("empty", "not a run of raytest"), ("absent", "no such run")):
        code, out, err = command("compare", name)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
