"""Reads runs into :class:`raytest.compare.observed.Observed`, and proves on the way that every row
is where the plan wants it: known trial, known request, same prompt, once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.compare.ahead import FILES_AT_ONCE, in_order, threads
from raytest.compare.constants import read_observations
from raytest.compare.observed import (
    COLUMNS,
    COUNTERS,
    Member,
    Observed,
    State,
    Workload,
    members_of,
    unit_map,
    workload_of,
)
from raytest.compare.trial_facts import with_facts
from raytest.needs import not_needed
from raytest.schema import observations_schema
from raytest.store import RunFolder, TrialKey

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    from raytest.spec import Spec


@dataclass(slots=True)
class _Run:
    """One run while it is read. ``position`` maps a request_index to the first run's position."""

    run: int
    spec: Spec
    workload: Workload
    position: npt.NDArray[np.int64]
    own_position: npt.NDArray[np.int64]
    requests: pa.Table
    members: dict[TrialKey, int]


@dataclass(slots=True)
class _Reading:
    """Everything gathered from the files of all runs."""

    members: list[Member] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    member: list[npt.NDArray[np.int64]] = field(default_factory=list)
    position: list[npt.NDArray[np.int64]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unmatched: dict[str, int] = field(default_factory=dict)


def observe(folders: Sequence[RunFolder]) -> Observed:
    """All observations of the runs, matched to the first run's requests.

    Raises StoreError for a file that is damaged or of another schema. Rows that contradict the plan
    or the workload become ``problems``.
    """
    reading = _Reading()
    runs: list[_Run] = []
    for number, folder in enumerate(folders):
        first = runs[0].workload if runs else None
        runs.append(_open(folder, number, first, len(folders) > 1, reading))
        _read_files(folder, runs[-1], reading)
    return _assemble(runs, reading)


def _open(
    folder: RunFolder, number: int, first: Workload | None, several: bool, reading: _Reading
) -> _Run:
    import numpy as np

    spec, requests = folder.spec(), folder.requests()
    workload = workload_of(requests, spec.workload.sampling.n)
    own = list(range(len(workload.request_id)))
    mapped = own
    if first is not None:
        mapped, unmatched = unit_map(first, workload)
        for what, n in unmatched.items():
            reading.unmatched[what] = reading.unmatched.get(what, 0) + n
    size = max(workload.request_index, default=-1) + 1
    position = np.full(size, -1, dtype=np.int64)
    own_position = np.full(size, -1, dtype=np.int64)
    position[list(workload.request_index)] = mapped
    own_position[list(workload.request_index)] = own
    members = members_of(spec, folder.plan(), number, folder.run_id)
    left_out = not_needed(folder) if spec.trials.until == "decided" else set()
    members = [replace(m, needed=m.key not in left_out) for m in members]
    if several:
        members = [replace(m, name=f"{folder.run_id}:{m.name}") for m in members]
    keys = {m.key: len(reading.members) + i for i, m in enumerate(members)}
    reading.members += members
    return _Run(number, spec, workload, position, own_position, requests, keys)


def _read_files(folder: RunFolder, run: _Run, reading: _Reading) -> None:
    import numpy as np

    keys = sorted(folder.finished_trials())
    n_requests = sum(e is None for e in run.workload.error)
    with ThreadPoolExecutor(threads()) as pool:
        paths = [folder.observations_path(k) for k in keys]
        parts = (paths[i : i + FILES_AT_ONCE] for i in range(0, len(paths), FILES_AT_ONCE))
        read = in_order(pool, (partial(_read, part) for part in parts))
        for key, (table, same) in zip(keys, chain.from_iterable(read), strict=True):
            name = f"observations/{key[0]}/{key[1]}-{key[2]}.parquet"
            index = run.members.get(key)
            if index is None:
                reading.problems.append(f"{name}: the plan has no such trial")
                continue
            problem = _foreign_rows(table, same, key) or _wrong_requests(table, run)
            if problem:
                reading.problems.append(f"{name}: {problem}")
                continue
            reading.members[index] = with_facts(
                reading.members[index], table, same, run.spec, n_requests
            )
            where = table.column("request_index").to_numpy()
            reading.tables.append(_kept(table, same))
            reading.member.append(np.full(table.num_rows, index, dtype=np.int64))
            reading.position.append(run.position[where])


def _read(paths: Sequence[Path]) -> list[tuple[pa.Table, Mapping[str, Any]]]:
    return [read_observations(path, COLUMNS, CONSTANT) for path in paths]


_KEPT = [
    "sample_index", "token_digest", "logprob_digest", "top_digest", "payload_id", "n_tokens",
    "finish_reason", *COUNTERS, "error_kind", "error",
]  # fmt: skip
# What is mostly one value a file, or none.
CONSTANT = [
    "cell_id", "launch", "trial", "gpu_uuids", "batch_size", "n_cached_tokens", *COUNTERS,
    "error_kind", "error",
]  # fmt: skip


def _kept(table: pa.Table, same: Mapping[str, Any]) -> pa.Table:
    """The columns that go into the matrices; a counter that is 0 and an error that is null
    throughout stay away, and are null afterwards."""
    import pyarrow as pa

    for name in _KEPT:
        if same.get(name):
            value = pa.scalar(same[name], observations_schema().field(name).type)
            table = table.append_column(name, pa.repeat(value, table.num_rows))
    return table.select([n for n in _KEPT if n in table.column_names])


def _foreign_rows(table: pa.Table, same: Mapping[str, Any], key: TrialKey) -> str:
    """What is wrong where rows carry other keys than their file's name."""
    import pyarrow.compute as pc

    for column, value in zip(("cell_id", "launch", "trial"), key, strict=True):
        if column in same:
            right = same[column] == value
        else:
            right = pc.min_max(table.column(column)).as_py() in (
                {"min": value, "max": value},
                {"min": None, "max": None},
            )
        if not right:
            return f"rows with another {column} than {value!r}"
    return ""


def _wrong_requests(table: pa.Table, run: _Run) -> str:
    """What is wrong where a row's request is unknown, or its prompt not the workload's."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    index = table.column("request_index").to_numpy()
    if len(index) and (index.min() < 0 or index.max() >= len(run.own_position)):
        return f"request_index {int(index.max())} is not in requests.parquet"
    own = run.own_position[index]
    if len(own) and own.min() < 0:
        return f"request_index {int(index[np.argmin(own)])} is not in requests.parquet"
    ordered = np.array_equal(own, np.arange(run.requests.num_rows))
    for column, what in (("prompt_digest", "prompt"), ("request_id", "request id")):
        expected = run.requests.column(column)
        if ordered and table.column(column).equals(expected):
            continue
        same = pc.equal(table.column(column), expected.take(pa.array(own)))
        if not pc.all(same, min_count=0).as_py():
            row = same.to_pylist().index(False)
            return f"request_index {int(index[row])}: another {what} than in requests.parquet"
    if len(index) and table.column("sample_index").to_numpy().min() < 0:
        return "a negative sample_index"
    return ""


def _concatenated(tables: Sequence[pa.Table]) -> pa.Table:
    """One table of all of _KEPT; what a table does not have is null in its rows."""
    import pyarrow as pa

    schema = observations_schema()
    found = [n for n in _KEPT if any(n in t.column_names for t in tables)]

    def filled(table: pa.Table, names: Sequence[str]) -> pa.Table:
        for name in names:
            if name not in table.column_names:
                nulls = pa.nulls(table.num_rows, schema.field(name).type)
                table = table.append_column(schema.field(name), nulls)
        return table if table.column_names == names else table.select(names)

    empty = schema.empty_table().select(found)
    return filled(pa.concat_tables([empty, *(filled(t, found) for t in tables)]), _KEPT)


def _assemble(runs: Sequence[_Run], reading: _Reading) -> Observed:
    import numpy as np
    import pyarrow as pa

    table = _concatenated(reading.tables)
    none = np.empty(0, dtype=np.int64)
    member = np.concatenate([none, *reading.member])
    position = np.concatenate([none, *reading.position])
    sample = table.column("sample_index").to_numpy().astype(np.int64)
    n_samples = max([r.workload.n_samples for r in runs] + [int(sample.max(initial=-1)) + 1])
    workload = replace(runs[0].workload, n_samples=n_samples)
    matched = position >= 0
    if not matched.all():
        table = table.filter(pa.array(matched))
        member, position, sample = member[matched], position[matched], sample[matched]
    unit = position * n_samples + sample
    return _Matrices(reading, workload, table, member, unit).observed(
        max(r.workload.n_samples for r in runs)
    )


@dataclass(slots=True)
class _Matrices:
    """Scatters rows into the matrices."""

    reading: _Reading
    workload: Workload
    table: pa.Table
    member: npt.NDArray[np.int64]
    unit: npt.NDArray[np.int64]

    def observed(self, expected_samples: int) -> Observed:
        import numpy as np
        import pyarrow as pa

        shape = (len(self.reading.members), len(self.workload.request_id) * self.workload.n_samples)
        flat = self.member * shape[1] + self.unit
        state = self._states(flat, shape, expected_samples)
        payload_codes, payload_ids = _codes(self.table.column("payload_id"))
        token_codes, _ = _codes(self.table.column("token_digest"))
        finish, reasons = _codes(self.table.column("finish_reason"))
        tokens = token_codes * (len(reasons) + 1) + finish + 1
        self._check_payloads(payload_codes, len(payload_ids), tokens)
        usable = (payload_codes >= 0) & (state.reshape(-1)[flat] == State.OK)

        whole = bool(usable.all())
        places = flat if whole else flat[usable]

        def matrix(values: npt.NDArray[Any], fill: int) -> npt.NDArray[np.int64]:
            out = np.full(shape[0] * shape[1], fill, dtype=np.int64)
            out[places] = values if whole else values[usable]
            return out.reshape(shape)

        payloads = matrix(payload_codes, -1)
        n_tokens = _ints(self.table.column("n_tokens"))
        return Observed(
            members=tuple(self.reading.members),
            workload=self.workload,
            state=state,
            bitwise=payloads,
            tokens=matrix(tokens, -1),
            payload=payloads,
            n_tokens=matrix(n_tokens, 0),
            finish=matrix(finish, -1),
            finish_reasons=reasons.to_pylist(),
            payload_ids=payload_ids.cast(pa.binary(16)),
            counters=self._counters(),
            problems=tuple(self.reading.problems),
            errors=self._errors(),
            unmatched=self.reading.unmatched,
        )

    def _states(
        self, flat: npt.NDArray[np.int64], shape: tuple[int, int], expected_samples: int
    ) -> npt.NDArray[np.int8]:
        import numpy as np

        state = np.full(shape[0] * shape[1], State.MISSING, dtype=np.int8)
        times = np.bincount(flat, minlength=len(state))
        state[times == 1] = State.OK
        failed = self.table.column("error_kind").is_valid().to_numpy()
        state[flat[failed]] = State.ERROR
        no_digest = self.table.column("token_digest").is_null().to_numpy()
        no_payload = self.table.column("payload_id").is_null().to_numpy()
        state[flat[(no_digest | no_payload) & ~failed]] = State.INVALID
        state[times > 1] = State.DUPLICATE
        out = state.reshape(shape)
        beyond = np.arange(shape[1]) % self.workload.n_samples >= expected_samples
        absent = beyond & (out == State.MISSING).all(axis=0)
        unusable = np.array([e is not None for e in self.workload.error], dtype=np.bool_)
        out[:, absent | np.repeat(unusable, self.workload.n_samples)] = State.SKIPPED
        return out

    def _check_payloads(
        self, payload: npt.NDArray[np.int64], n: int, tokens: npt.NDArray[np.int64]
    ) -> None:
        """One payload id must stand for one set of digests: classes are formed by it."""
        import numpy as np

        rows = np.flatnonzero(payload >= 0)
        first = np.zeros(n, dtype=np.int64)
        first[payload[rows][::-1]] = rows[::-1]
        example = first[payload[rows]]
        columns = [("tokens and finish reason", tokens)]
        columns += [(n, _codes(self.table.column(n))[0]) for n in ("logprob_digest", "top_digest")]
        for name, codes in columns:
            if not np.array_equal(codes[rows], codes[example]):
                self.reading.problems.append(f"observations: one payload_id with different {name}")

    def _counters(self) -> dict[str, tuple[Any, Any, Any]]:
        """Per counter the members, units and counts where it is not zero."""
        import numpy as np

        found = {}
        for name in COUNTERS:
            values = _ints(self.table.column(name))
            rows = np.flatnonzero(values > 0)
            order = rows[np.lexsort((self.unit[rows], self.member[rows]))]
            found[name] = (self.member[order], self.unit[order], values[order])
        return found

    def _errors(self) -> tuple[dict[str, Any], ...]:
        """Failed observations, grouped by trial, kind and text."""
        import numpy as np

        rows = np.flatnonzero(self.table.column("error_kind").is_valid().to_numpy())
        failed = self.table.select(["error_kind", "error"]).take(rows).to_pylist()
        groups: dict[tuple[int, str, str], int] = {}
        for row, values in zip(rows, failed, strict=True):
            key = (int(self.member[row]), str(values["error_kind"]), str(values["error"] or ""))
            groups[key] = groups.get(key, 0) + 1
        return tuple(
            {"trial": self.reading.members[m].name, "kind": kind, "error": text, "n": n}
            for (m, kind, text), n in sorted(groups.items())
        )


def _codes(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.int64], pa.Array]:
    """Integer codes (-1 where null) and the distinct values, in order of appearance."""
    import numpy as np
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = array.dictionary_encode()
    indices = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return indices.astype(np.int64), encoded.dictionary


def _ints(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    import numpy as np

    values: npt.NDArray[np.int64] = column.fill_null(0).to_numpy().astype(np.int64)
    return values
