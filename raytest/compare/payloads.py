"""Payloads read once, by row group: what is odd in each, and the pairs that must be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from raytest.compare.ahead import FILES_AT_ONCE, in_order, threads
from raytest.compare.flat import (
    COLUMNS,
    Flat,
    flat_of,
    longest_runs,
    unsorted_candidates,
)
from raytest.compare.pairs import Histogram, PairMetrics, compare_pairs
from raytest.compare.verdicts import DEGENERATE_RUN
from raytest.errors import StoreError
from raytest.schema import payloads_schema
from raytest.store import ROW_GROUP_BYTES, Payload, open_table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of payloads (indices into the payload ids) and which histogram each is counted in."""

    reference: Ints
    payload: Ints
    kind: Ints


@dataclass(slots=True)
class PayloadFacts:
    """Per payload [q]: longest run of one token (0: shorter than DEGENERATE_RUN), length, whether
    candidates are out of order."""

    longest_run: Ints
    length: Ints
    unsorted: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Compared:
    """Everything that the payloads say."""

    facts: PayloadFacts
    pairs: PairMetrics
    histograms: dict[int, Histogram]
    kept: dict[int, Payload]


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Where payloads lie: ``index`` [rows] into the payload ids, -1 where not needed here."""

    path: Path
    number: int
    index: Ints
    table: pa.Table | None = None


# Where a row group lies, with what has been read of it.
_Place = tuple[Path, int, "pa.Table"]
# A payload file up to this size is read whole when its ids are: opening it again would cost more.
SMALL_FILE = 1 << 18


def compare_payloads(
    paths: Sequence[Path], payload_ids: pa.Array, pairs: Pairs, keep: Ints
) -> Compared:
    """Read every payload of ``payload_ids``, compare ``pairs``, and keep those at ``keep``.

    Row groups are read once, in order, a few ahead. A pair is compared when the later of its two
    payloads arrives; the earlier is held until its last pair is done, so memory follows the spread
    of the pairs and not the number of workers. Raises StoreError for a damaged file, or where a
    payload is in none of them.
    """
    import numpy as np

    n = len(payload_ids)
    facts = PayloadFacts(np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(n, np.bool_))
    metrics = PairMetrics.empty(len(pairs.payload))
    histograms = {int(k): Histogram.empty() for k in np.unique(pairs.kind)}
    kept: dict[int, Payload] = {}
    with ThreadPoolExecutor(threads()) as pool:
        groups = _locate(pool, paths, payload_ids)
        schedule = _Schedule.of(groups, n, pairs)
        few = sum(g.table is None for g in groups) <= threads()
        readers = (_reader(group, few) for group in groups)
        done = in_order(pool, schedule.works(in_order(pool, readers)))
        for work, results in done:
            work.note(facts)
            for number in np.intersect1d(work.index, keep):
                kept[int(number)] = _payload(work, int(number), payload_ids)
            for which, found, counted in results:
                metrics.put(which, found)
                for kind, histogram in counted.items():
                    histograms[kind].counts += histogram.counts
    return Compared(facts, metrics, histograms, kept)


def _payload(work: _Work, number: int, payload_ids: pa.Array) -> Payload:
    """One payload of a row group, as arrays of its own."""
    row, flat = int((work.index == number).argmax()), work.flat
    n, k = int(flat.length[row]), int(flat.top_k[row])
    tokens, top = int(flat.token_start[row]), int(flat.top_start[row])
    logprobs = int(flat.logprob_start[row])
    return Payload(
        payload_id=payload_ids[number].as_py(),
        token_ids=flat.tokens[tokens : tokens + n].copy(),
        logprobs=flat.logprobs[logprobs : logprobs + int(flat.n_logprobs[row])].copy(),
        top_k=k,
        top_token_ids=flat.top_ids[top : top + n * k].copy(),
        top_logprobs=flat.top_logprobs[top : top + n * k].copy(),
        text=None,
    )


def _reader(group: _RowGroup, few: bool) -> Callable[[], pa.Table]:
    """Reads a row group, its columns at the same time where there are ``few`` groups to read."""

    def read() -> pa.Table:
        if group.table is not None:
            return group.table
        with open_table(group.path, payloads_schema(), COLUMNS) as file:
            columns = _columns(file, group.number)[1:]
            return file.read_row_group(group.number, columns=columns, use_threads=few)

    return read


@dataclass(frozen=True, slots=True)
class _Held:
    """Payloads of one row group; ``row`` [rows of the group] is where each lies in ``flat``."""

    flat: Flat
    row: Ints


Result = tuple["Ints", PairMetrics, dict[int, Histogram]]


@dataclass(frozen=True, slots=True)
class _Part:
    """Pairs (indices ``which``) between payloads of two row groups that are both in memory."""

    which: Ints
    reference: _Held
    reference_row: Ints
    payload: _Held
    payload_row: Ints
    kind: Ints

    def run(self) -> Result:
        import numpy as np

        histograms = {int(k): Histogram.empty() for k in np.unique(self.kind)}
        found = compare_pairs(
            self.reference.flat,
            self.reference.row[self.reference_row],
            self.payload.flat,
            self.payload.row[self.payload_row],
            self.kind,
            histograms,
        )
        return self.which, found, histograms


@dataclass(slots=True)
class _Work:
    """What is to be done once a row group is there."""

    index: Ints
    flat: Flat
    parts: list[_Part]
    longest: Ints | None = None
    unsorted: npt.NDArray[np.bool_] | None = None

    def __call__(self) -> tuple[_Work, list[Result]]:
        self.longest = longest_runs(self.flat, DEGENERATE_RUN)
        self.unsorted = unsorted_candidates(self.flat)
        return self, [part.run() for part in self.parts]

    def note(self, facts: PayloadFacts) -> None:
        """Enter the facts of this row group's payloads."""
        import numpy as np

        assert self.longest is not None
        assert self.unsorted is not None
        rows = np.flatnonzero(self.index >= 0)
        at = self.index[rows]
        facts.longest_run[at] = self.longest[rows]
        facts.length[at] = self.flat.length[rows]
        facts.unsorted[at] = self.unsorted[rows]


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Pairs sorted by the row group that completes them, then by the one that came before."""

    groups: Sequence[_RowGroup]
    pairs: Pairs
    order: Ints
    later: Ints
    earlier: Ints
    place: Ints
    row: Ints

    @classmethod
    def of(cls, groups: Sequence[_RowGroup], n: int, pairs: Pairs) -> _Schedule:
        import numpy as np

        place, row = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        for g, group in enumerate(groups):
            rows = np.flatnonzero(group.index >= 0)
            place[group.index[rows]] = g
            row[group.index[rows]] = rows
        a, b = place[pairs.reference], place[pairs.payload]
        later, earlier = np.maximum(a, b), np.minimum(a, b)
        order = np.lexsort((row[pairs.payload], a < b, earlier, later))
        return cls(groups, pairs, order, later[order], earlier[order], place, row)

    def works(self, tables: Iterator[pa.Table]) -> Iterator[_Work]:
        """One piece of work per row group, in order, as its table arrives."""
        import numpy as np

        held: dict[int, _Held] = {}
        last = np.full(len(self.groups), -1, dtype=np.int64)
        np.maximum.at(last, self.earlier, self.later)
        bounds = np.searchsorted(self.later, np.arange(len(self.groups) + 1))
        for g, table in enumerate(tables):
            group = self.groups[g]
            flat = flat_of(table)
            held[g] = _Held(flat, np.arange(len(group.index)))
            yield _Work(group.index, flat, self._parts(held, slice(bounds[g], bounds[g + 1])))
            if last[g] > g:
                held[g] = self._needed_later(g, table, held[g])
            for done in [e for e in held if last[e] <= g]:
                del held[done]

    def _parts(self, held: dict[int, _Held], within: slice) -> list[_Part]:
        import numpy as np

        order, earlier = self.order[within], self.earlier[within]
        reference, payload = self.pairs.reference[order], self.pairs.payload[order]
        forward = self.place[reference] <= self.place[payload]
        cuts = np.flatnonzero((np.diff(earlier) != 0) | (np.diff(forward) != 0)) + 1
        return [
            _Part(
                order[part],
                held[int(self.place[reference[part[0]]])],
                self.row[reference[part]],
                held[int(self.place[payload[part[0]]])],
                self.row[payload[part]],
                self.pairs.kind[order[part]],
            )
            for part in np.split(np.arange(len(order)), cuts)
            if len(part)
        ]

    def _needed_later(self, g: int, table: pa.Table, whole: _Held) -> _Held:
        """Only the payloads that later row groups are compared with, unless those are most."""
        import numpy as np
        import pyarrow as pa

        waiting = self.order[(self.earlier == g) & (self.later > g)]
        both = np.concatenate([self.pairs.reference[waiting], self.pairs.payload[waiting]])
        rows = np.unique(self.row[both[self.place[both] == g]])
        if 2 * len(rows) > table.num_rows:
            return whole
        row = np.full(table.num_rows, -1, dtype=np.int64)
        row[rows] = np.arange(len(rows))
        return _Held(flat_of(table.take(pa.array(rows))), row)


def _locate(
    pool: ThreadPoolExecutor, paths: Sequence[Path], payload_ids: pa.Array
) -> list[_RowGroup]:
    """Row groups that hold wanted payloads. One that lies in several files (workers that finished
    at the same time each wrote it) is taken from the first."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    several = (paths[i : i + FILES_AT_ONCE] for i in range(0, len(paths), FILES_AT_ONCE))
    places = _merged(place for found in pool.map(_ids, several) for place in found)
    columns = [chunk for _, _, table in places for chunk in table.column("payload_id").chunks]
    ids = pa.concat_arrays([pa.array([], pa.binary(16)), *columns])
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
    ends = np.cumsum([table.num_rows for _, _, table in places])
    parts = np.split(chosen, ends[:-1]) if places else []
    return [
        _RowGroup(path, number, part, table if table.num_columns > 1 else None)
        for (path, number, table), part in zip(places, parts, strict=True)
        if (part >= 0).any()
    ]


def _ids(paths: Sequence[Path]) -> list[_Place]:
    """The payload ids of each row group of the files, with the rest where a file is small."""
    found: list[_Place] = []
    for path in paths:
        with open_table(path, payloads_schema(), COLUMNS) as file:
            small = path.stat().st_size <= SMALL_FILE
            for g in range(file.num_row_groups):
                columns = _columns(file, g) if small else COLUMNS[:1]
                found.append((path, g, file.read_row_group(g, columns, use_threads=False)))
    return found


def _columns(file: pq.ParquetFile, number: int) -> list[str]:
    """The columns of a row group that hold anything: its statistics say whether there are any
    candidates."""
    group = file.metadata.row_group(number)
    place = file.schema_arrow.names.index("top_k")
    chunk = group.column(place) if place < group.num_columns else None
    if chunk is not None and chunk.path_in_schema == "top_k":
        facts = chunk.statistics
        if facts is not None and facts.has_min_max and facts.min == facts.max == 0:
            return COLUMNS[:3]
    return COLUMNS


def _merged(places: Iterable[_Place]) -> list[_Place]:
    """Small files that were read whole as one, as far as a row group goes: many small comparisons
    cost more than one large."""
    import pyarrow as pa

    large: list[_Place] = []
    small: list[tuple[Path, int, list[pa.Table]]] = []
    size = 0
    for place in places:
        if place[2].num_columns == 1:
            large.append(place)
            continue
        alike = small and small[-1][2][0].column_names == place[2].column_names
        if size + place[2].nbytes > ROW_GROUP_BYTES or not alike:
            small.append((*place[:2], [place[2]]))
            size = 0
        else:
            small[-1][2].append(place[2])
        size += place[2].nbytes
    return [*large, *((p, n, pa.concat_tables(tables)) for p, n, tables in small)]
