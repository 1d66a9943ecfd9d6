"""Columns of one value are taken from a file's statistics: the same facts, fewer pages."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from raytest.compare.constants import FEWEST_ROWS, read_observations
from raytest.compare.evaluate import evaluate
from raytest.compare.loading import CONSTANT
from raytest.compare.observed import COLUMNS
from raytest.schema import RunVerdict, observations_schema
from raytest.store import RunFolder, write_table
from tests.support.bulk_run import Bulk

KEY = ("tp1@node-0-1", 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return Bulk("equal", 2, FEWEST_ROWS, 2, per_node=2).write(tmp_path, "run")


def change(folder: RunFolder, column: str, row: int, value: object) -> None:
    """Write one value of the second worker's observations anew."""
    table = folder.read_trial(KEY)
    at = table.column_names.index(column)
    values = table.column(column).to_pylist()
    values[row] = value
    kind = observations_schema().field(column)
    table = table.set_column(at, kind, pa.array(values, kind.type))
    write_table(folder.observations_path(KEY), table, observations_schema())


def test_what_is_not_read_is_what_reading_would_give(folder: RunFolder) -> None:
    path = folder.observations_path(KEY)
    table, same = read_observations(path, COLUMNS, CONSTANT)
    whole, none = read_observations(path, COLUMNS, [])
    assert not none
    assert set(same) == set(CONSTANT)
    assert sorted([*table.column_names, *same]) == sorted(COLUMNS)
    for name, value in same.items():
        assert set(map(str, whole.column(name).to_pylist())) == {str(value)}, name


@pytest.mark.parametrize(
    ("column", "value"),
    [("n_nan", 1), ("error_kind", "refused"), ("batch_size", 7), ("cell_id", "tp1@node-0-0")],
)
def test_a_column_with_another_value_is_read(folder: RunFolder, column: str, value: object) -> None:
    change(folder, column, 3, value)
    table, same = read_observations(folder.observations_path(KEY), COLUMNS, CONSTANT)
    assert column not in same
    assert table.column(column)[3].as_py() == value


@pytest.mark.parametrize(
    ("column", "value", "verdict"),
    [
        ("n_nan", 1, RunVerdict.MISMATCH),
        ("error_kind", "refused", RunVerdict.INCONCLUSIVE),
        ("cell_id", "tp1@node-0-0", RunVerdict.NOT_COMPARABLE),
        ("launch", 5, RunVerdict.NOT_COMPARABLE),
    ],
)
def test_one_value_among_many_still_counts(
    folder: RunFolder, column: str, value: object, verdict: RunVerdict
) -> None:
    assert evaluate(folder).verdict is RunVerdict.PASS
    change(folder, column, FEWEST_ROWS - 1, value)
    assert evaluate(folder).verdict is verdict


def test_a_value_of_all_rows_that_is_not_the_plans_counts_too(folder: RunFolder) -> None:
    table = folder.read_trial(KEY)
    at = table.column_names.index("launch")
    other = pa.array([5] * table.num_rows, pa.int32())
    write_table(
        folder.observations_path(KEY), table.set_column(at, "launch", other), observations_schema()
    )
    assert evaluate(folder).verdict is RunVerdict.NOT_COMPARABLE
