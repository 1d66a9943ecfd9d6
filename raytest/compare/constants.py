"""Reads a trial's observations without the columns that hold one value alone: a file's own
statistics say so, and a column costs as much to decode as its value is short."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.schema import observations_schema
from raytest.store import open_table

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


# A smaller file is read whole, columns that nobody asks for included: so all its pages' checksums
# are proved, and it costs little.
FEWEST_ROWS = 512


def read_observations(
    path: Path, columns: Sequence[str], constant: Sequence[str]
) -> tuple[pa.Table, Mapping[str, Any]]:
    """The rows without those of ``constant`` that have one value, and these values by name (None:
    null in every row; a list has its one element).

    Raises StoreError for a damaged or foreign file.
    """
    with open_table(path, observations_schema(), list(columns)) as file:
        values = dict(_constants(file, constant))
        names = [c for c in columns if c not in values]
        small = file.metadata.num_rows < FEWEST_ROWS
        table = file.read(columns=None if small else names, use_threads=False)
    return table.select(names).replace_schema_metadata(None), values


def _constants(file: pq.ParquetFile, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    found = file.metadata
    order = file.schema_arrow.names
    if found.num_columns != len(order) or found.num_row_groups != 1:
        return
    if found.num_rows < FEWEST_ROWS:
        return
    group = found.row_group(0)
    for name in names:
        chunk = group.column(order.index(name))
        facts = chunk.statistics
        if facts is None or not facts.has_null_count:
            continue
        # a list may have more or fewer elements than there are rows
        if facts.num_values + facts.null_count != found.num_rows:
            continue
        if facts.null_count == found.num_rows:
            if chunk.path_in_schema == name:
                yield name, None
        elif facts.has_min_max and not facts.null_count and facts.min == facts.max:
            yield name, facts.min if chunk.path_in_schema == name else [facts.min]
