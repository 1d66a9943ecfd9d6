"""Payloads read once, by row group: what is odd in each, and the pairs that must be compared.

Memory holds the reference payloads and one row group, whatever the number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytest.compare.flat import (
    COLUMNS,
    Flat,
    flat_of,
    longest_runs,
    ragged,
    unsorted_candidates,
)
from raytest.compare.pairs import Histogram, PairMetrics, compare_pairs
from raytest.errors import StoreError
from raytest.schema import payloads_schema
from raytest.store import open_table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of payloads (indices into the payload ids) and which histogram each is counted in."""

    reference: Ints
    payload: Ints
    kind: Ints


@dataclass(slots=True)
class PayloadFacts:
    """Per payload [q]: longest run of one token, length, whether candidates are out of order."""

    longest_run: Ints
    length: Ints
    unsorted: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Compared:
    """Everything that the payloads say."""

    facts: PayloadFacts
    pairs: PairMetrics
    histograms: dict[int, Histogram]


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Where payloads lie: ``index`` [rows] into the payload ids, -1 where not needed here."""

    path: Path
    number: int
    index: Ints


def compare_payloads(paths: Sequence[Path], payload_ids: pa.Array, pairs: Pairs) -> Compared:
    """Read every payload of ``payload_ids`` and compare ``pairs``.

    Raises StoreError for a damaged file, or where a payload is in none of them.
    """
    import numpy as np

    n = len(payload_ids)
    groups = _locate(paths, payload_ids)
    facts = PayloadFacts(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_))
    metrics = PairMetrics.empty(len(pairs.payload))
    histograms = {int(k): Histogram.empty() for k in np.unique(pairs.kind)}
    order = np.argsort(pairs.payload, kind="stable")
    work = _Work(pairs, order, pairs.payload[order], metrics, histograms, facts)
    is_reference = np.zeros(n, dtype=np.bool_)
    is_reference[pairs.reference] = True
    first = [g for g in groups if is_reference[g.index[g.index >= 0]].any()]
    kept = work.read_references(first, is_reference, n)
    for index, table in kept:
        work.compare(index, flat_of(table))
    held = {id(g) for g in first}
    for group in groups:
        if id(group) not in held:
            table = _read(group)
            work.note(group.index, table)
            work.compare(group.index, flat_of(table))
    return Compared(facts, metrics, histograms)


@dataclass(slots=True)
class _Work:
    pairs: Pairs
    order: Ints
    sorted_payload: Ints
    metrics: PairMetrics
    histograms: dict[int, Histogram]
    facts: PayloadFacts
    references: Flat | None = None
    reference_row: Ints | None = None

    def read_references(
        self, groups: Sequence[_RowGroup], is_reference: npt.NDArray[np.bool_], n: int
    ) -> list[tuple[Ints, pa.Table]]:
        """Load the reference payloads; what else those row groups hold for comparing is
        returned."""
        import numpy as np
        import pyarrow as pa

        taken: list[pa.Table] = []
        kept: list[tuple[Ints, pa.Table]] = []
        self.reference_row = np.full(n, -1, dtype=np.int64)
        rows = 0
        wanted = np.zeros(n, dtype=np.bool_)
        wanted[self.pairs.payload] = True
        for group in groups:
            table = _read(group)
            self.note(group.index, table)
            there = group.index >= 0
            here = np.flatnonzero(there)
            of_reference = here[is_reference[group.index[here]]]
            self.reference_row[group.index[of_reference]] = rows + np.arange(len(of_reference))
            rows += len(of_reference)
            whole = len(of_reference) == table.num_rows
            taken.append(table if whole else table.take(pa.array(of_reference)))
            others = here[wanted[group.index[here]]]
            if len(others):
                kept.append((group.index[others], table.take(pa.array(others))))
        if taken:
            self.references = flat_of(pa.concat_tables(taken))
        return kept

    def note(self, index: Ints, table: pa.Table) -> None:
        """Facts of the payloads of one row group."""
        import numpy as np

        flat = flat_of(table)
        rows = np.flatnonzero(index >= 0)
        at = index[rows]
        self.facts.longest_run[at] = longest_runs(flat)[rows]
        self.facts.length[at] = flat.length[rows]
        self.facts.unsorted[at] = unsorted_candidates(flat)[rows]

    def compare(self, index: Ints, flat: Flat) -> None:
        """Compare the pairs whose other payload is in this row group."""
        import numpy as np

        if self.references is None or self.reference_row is None:
            return
        rows = np.flatnonzero(index >= 0)
        low = np.searchsorted(self.sorted_payload, index[rows], side="left")
        high = np.searchsorted(self.sorted_payload, index[rows], side="right")
        which = self.order[ragged(low, high - low)]
        if not len(which):
            return
        found = compare_pairs(
            self.references,
            self.reference_row[self.pairs.reference[which]],
            flat,
            np.repeat(rows, high - low),
            self.pairs.kind[which],
            self.histograms,
        )
        self.metrics.put(which, found)


def _read(group: _RowGroup) -> pa.Table:
    with open_table(group.path, payloads_schema(), COLUMNS) as file:
        return file.read_row_group(group.number, columns=COLUMNS[1:])


def _locate(paths: Sequence[Path], payload_ids: pa.Array) -> list[_RowGroup]:
    """Row groups that hold wanted payloads. One that lies in several files (workers that finished
    at the same time each wrote it) is taken from the first."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    places = list(_ids(paths))
    ids = pa.concat_arrays([pa.array([], pa.binary(16)), *(column for _, _, column in places)])
    found = pc.index_in(ids, value_set=payload_ids).fill_null(-1).to_numpy(zero_copy_only=False)
    index = found.astype(np.int64)
    wanted = np.flatnonzero(index >= 0)
    present, first = np.unique(index[wanted], return_index=True)
    if len(present) < len(payload_ids):
        gone = np.ones(len(payload_ids), dtype=np.bool_)
        gone[present] = False
        absent = payload_ids[int(gone.argmax())].as_py().hex()
        raise StoreError(
            f"{paths[0].parent if paths else 'payloads'}: {int(gone.sum())} payloads that "
            f"observations refer to are missing (first: {absent})"
        )
    chosen = np.full(len(index), -1, dtype=np.int64)
    chosen[wanted[first]] = present
    ends = np.cumsum([len(column) for _, _, column in places])
    parts = np.split(chosen, ends[:-1]) if places else []
    return [
        _RowGroup(path, number, part)
        for (path, number, _), part in zip(places, parts, strict=True)
        if (part >= 0).any()
    ]


def _ids(paths: Sequence[Path]) -> Iterator[tuple[Path, int, pa.Array]]:
    for path in paths:
        with open_table(path, payloads_schema(), COLUMNS) as file:
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=["payload_id"])
                yield path, number, table.column(0).combine_chunks()
