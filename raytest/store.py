"""The run folder: what a run leaves, and the one place that knows its paths.

Parquet files appear by atomic rename and are checked against their schema on reading; a trial
counts as finished when its observations file is there, which is written after the payloads it
refers to.
"""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest.errors import DiskError, StoreError
from raytest.schema import (
    READABLE_SCHEMA_VERSIONS,
    SCHEMA_VERSION,
    fingerprints_schema,
    observations_schema,
    payloads_schema,
    requests_schema,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq

    from raytest.plan import Plan
    from raytest.spec import Spec

RUN_ID_PATTERN = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
TrialKey = tuple[str, int, int]
# The analysis streams by row group, so its memory follows this and not the number of workers.
ROW_GROUP_BYTES = 8 * 1024 * 1024
# A file up to this size is read at once: a read for each column takes longer.
READ_AT_ONCE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Payload:
    """One distinct completion; arrays as in :class:`raytest.engines.base.Completion`."""

    payload_id: bytes
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top_k: int
    top_token_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    text: str | None


class RunFolder:
    """One run on disk. ``create`` for a new one, ``open`` for one that exists."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest

    @classmethod
    def create(cls, results: str | Path, run_id: str, manifest: Mapping[str, Any]) -> RunFolder:
        """Make the folder and its manifest. Raises StoreError if the run id is in use or
        unusable."""
        cls.refuse_in_use(results, run_id)
        path = Path(results) / run_id
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            cls.refuse_in_use(results, run_id)
        except OSError as error:
            raise StoreError(f"{path}: cannot be made: {error.strerror}") from None
        folder = cls(path, {"schema_version": SCHEMA_VERSION, "run_id": run_id, **manifest})
        folder.write_manifest()
        return folder

    @staticmethod
    def refuse_in_use(results: str | Path, run_id: str) -> None:
        """Raise StoreError for a run id that is taken, or that is no folder name."""
        if not RUN_ID_PATTERN.match(run_id):
            raise StoreError(
                f"run id {run_id!r}: use letters, digits, '.', '_' and '-', at most 100"
            )
        path = Path(results) / run_id
        if path.exists():
            raise StoreError(
                f"{path}: run id in use; --resume takes it up, another --run-id starts afresh"
            )

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Read the manifest. Raises StoreError for a folder that is no run or of another
        version."""
        folder = Path(path)
        file = folder / "manifest.json"
        if not folder.is_dir():
            raise StoreError(f"{folder}: no such run")
        manifest = read_json(file)
        version = manifest.get("schema_version")
        if version not in READABLE_SCHEMA_VERSIONS:
            raise StoreError(
                f"{file}: schema version {version!r}; this raytest reads "
                f"{', '.join(map(str, READABLE_SCHEMA_VERSIONS))}"
            )
        for key in ("run_id", "spec", "plan"):
            if key not in manifest:
                raise StoreError(f"{file}: {key!r} is missing; not a manifest of raytest")
        return cls(folder, manifest)

    @property
    def run_id(self) -> str:
        """The run's id, which is the folder's name when it was made."""
        return str(self.manifest["run_id"])

    def spec(self) -> Spec:
        """The resolved spec that ran."""
        from raytest.spec_file import validate_spec

        return validate_spec(self.manifest["spec"], f"{self.path}/manifest.json")

    def plan(self) -> Plan:
        """The plan that ran."""
        from raytest.plan import plan_from_json

        try:
            return plan_from_json(self.manifest["plan"])
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"{self.path}/manifest.json: plan: {error}") from None

    def write_manifest(self, **changes: Any) -> None:
        """Write the manifest with ``changes`` applied, atomically."""
        self.manifest.update(changes)
        write_json(self.path / "manifest.json", self.manifest)

    # trials ---------------------------------------------------------------------------------------

    def observations_path(self, key: TrialKey) -> Path:
        """Where one trial's observations are."""
        cell_id, launch, trial = key
        return self.path / "observations" / cell_id / f"{launch}-{trial}.parquet"

    def write_trial(self, key: TrialKey, observations: pa.Table, payloads: pa.Table | None) -> None:
        """Make a finished trial safe: payloads first, then the observations that refer to them."""
        cell_id, launch, trial = key
        if payloads is not None and payloads.num_rows:
            name = f"{cell_id}-{launch}-{trial}.parquet"
            write_table(self.path / "payloads" / name, payloads, payloads_schema())
        write_table(self.observations_path(key), observations, observations_schema())

    def finished_trials(self) -> set[TrialKey]:
        """Keys of the trials whose observations are on disk."""
        found = set()
        for path in (self.path / "observations").glob("*/*.parquet"):
            launch, _, trial = path.stem.partition("-")
            if launch.isdigit() and trial.isdigit():
                found.add((path.parent.name, int(launch), int(trial)))
        return found

    def read_trial(self, key: TrialKey, columns: list[str] | None = None) -> pa.Table:
        """Observations of one trial. Raises StoreError for a damaged or foreign file."""
        return read_table(self.observations_path(key), observations_schema(), columns)

    def iter_observations(
        self, columns: list[str] | None = None
    ) -> Iterator[tuple[TrialKey, pa.Table]]:
        """Every finished trial's observations, one file at a time, in key order."""
        for key in sorted(self.finished_trials()):
            yield key, self.read_trial(key, columns)

    def payload_paths(self) -> list[Path]:
        """The payload files, in name order."""
        return sorted((self.path / "payloads").glob("*.parquet"))

    def iter_payload_tables(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Every payload file as a table."""
        for path in self.payload_paths():
            yield read_table(path, payloads_schema(), columns)

    def known_payload_ids(self) -> set[bytes]:
        """Ids of the payloads on disk."""
        known: set[bytes] = set()
        for table in self.iter_payload_tables(["payload_id"]):
            known.update(table.column("payload_id").to_pylist())
        return known

    def payloads(self, ids: Iterable[bytes]) -> dict[bytes, Payload]:
        """The payloads of ``ids``. Raises StoreError if one is not there."""
        import pyarrow as pa
        import pyarrow.compute as pc

        wanted = set(ids)
        found: dict[bytes, Payload] = {}
        for table in self.iter_payload_tables() if wanted else ():
            mask = pc.is_in(table.column("payload_id"), pa.array(sorted(wanted), pa.binary(16)))
            for row in payload_rows(table.filter(mask)):
                found.setdefault(row.payload_id, row)
            if len(found) == len(wanted):
                break
        missing = wanted - found.keys()
        if missing:
            raise StoreError(
                f"{self.path}/payloads: {len(missing)} payloads that observations refer to "
                f"are missing (first: {min(missing).hex()})"
            )
        return found

    # other tables ---------------------------------------------------------------------------------

    def write_requests(self, table: pa.Table) -> None:
        """Write requests.parquet."""
        write_table(self.path / "requests.parquet", table, requests_schema())

    def requests(self) -> pa.Table:
        """The workload. Raises StoreError."""
        return read_table(self.path / "requests.parquet", requests_schema())

    def write_fingerprints(self, key: tuple[str, int], attempt: int, table: pa.Table) -> None:
        """Add one attempt's fingerprints (a file of its own, so nothing is rewritten)."""
        cell_id, launch = key
        path = self.path / "fingerprints" / f"{cell_id}-{launch}-{attempt}.parquet"
        write_table(path, table, fingerprints_schema())

    def fingerprints(self) -> pa.Table:
        """Every process' fingerprint in long form."""
        import pyarrow as pa

        tables = [
            read_table(p, fingerprints_schema())
            for p in sorted((self.path / "fingerprints").glob("*.parquet"))
        ]
        return pa.concat_tables(tables) if tables else fingerprints_schema().empty_table()

    def write_control(self, tables: list[pa.Table]) -> None:
        """Keep the engine control's two observations, apart from the run's own."""
        import pyarrow as pa

        write_table(self.path / "control.parquet", pa.concat_tables(tables), observations_schema())

    def control(self) -> pa.Table | None:
        """The engine control's observations, or None where it has not run."""
        path = self.path / "control.parquet"
        return read_table(path, observations_schema()) if path.exists() else None

    def write_verdicts(self, table: pa.Table) -> None:
        """Write verdicts.parquet with the table's own schema."""
        write_table(self.path / "verdicts.parquet", table, table.schema)

    # events and verdict ---------------------------------------------------------------------------

    def event(self, name: str, /, **fields: Any) -> None:
        """Append one line to events.jsonl and flush it to disk. Raises DiskError."""
        line = {"time": datetime.now(UTC).isoformat(), "event": name, **fields}
        path = self.path / "events.jsonl"
        try:
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, ensure_ascii=True, default=str) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise _unwritable(path, error) from None

    def events(self) -> Iterator[dict[str, Any]]:
        """The events so far; a half-written last line is passed over."""
        path = self.path / "events.jsonl"
        if not path.exists():
            return
        with path.open(encoding="utf-8") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    continue

    def failures(self) -> list[dict[str, Any]]:
        """Launches that failed for good and were not finished later: the last failure of each."""
        failed: dict[tuple[str, int], dict[str, Any]] = {}
        for event in self.events():
            key = (str(event.get("cell_id")), int(event.get("launch", -1)))
            if event["event"] == "launch failed":
                failed[key] = event
            elif event["event"] == "launch done":
                failed.pop(key, None)
        return [failed[k] for k in sorted(failed)]

    def write_verdict(self, document: Mapping[str, Any]) -> None:
        """Write verdict.json, the last file of a run."""
        write_json(self.path / "verdict.json", document)

    def verdict(self) -> dict[str, Any] | None:
        """verdict.json, or None where the run has none (unfinished). Raises StoreError if
        damaged."""
        path = self.path / "verdict.json"
        return read_json(path) if path.exists() else None

    def remove_verdict(self) -> None:
        """A resumed or re-compared run has no verdict until it is written again."""
        (self.path / "verdict.json").unlink(missing_ok=True)

    def log_path(self, cell_id: str, launch: int, attempt: int) -> Path:
        """Where a launch's processes' output is kept."""
        path = self.path / "logs" / f"{cell_id}-{launch}-{attempt}.log"
        path.parent.mkdir(exist_ok=True)
        return path


def find_run(results: str | Path, run: str) -> Path:
    """RUN as the command line takes it: a path, a run id, or ``latest``. Raises StoreError."""
    root = Path(results)
    if run == "latest":
        runs = list(root.glob("*/manifest.json"))
        if not runs:
            raise StoreError(f"{root}: no runs yet; 'raytest demo' makes one")
        return max(runs, key=_created_at).parent
    for path in (root / run, Path(run)):
        if (path / "manifest.json").is_file():
            return path
    if Path(run).is_dir():
        raise StoreError(f"{run}: has no manifest.json; not a run of raytest")
    raise StoreError(f"{run}: no such run in {root} and no such folder")


def _created_at(manifest: Path) -> tuple[str, float]:
    """Runs in order of their making; a copied folder keeps its own time."""
    try:
        created = str(json.loads(manifest.read_bytes()).get("created_at", ""))
    except (OSError, ValueError):
        created = ""
    return created, manifest.stat().st_mtime


def new_run_id(name: str) -> str:
    """``<name>-<UTC time>-<4 hex>``, from the system's own generator, never a seeded one."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{name}-{stamp}-{uuid.uuid4().hex[:4]}"


def payload_rows(table: pa.Table) -> Iterator[Payload]:
    """Rows of a payload table as numpy arrays, bit-exact (no Python floats on the way)."""
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    ids = columns["payload_id"].to_pylist()
    top_k = columns["top_k"].to_pylist()
    text = columns["text"].to_pylist()
    for i, payload_id in enumerate(ids):
        arrays = {
            name: columns[name][i].values.to_numpy(zero_copy_only=False)
            for name in ("token_ids", "logprobs", "top_token_ids", "top_logprobs")
        }
        yield Payload(payload_id=payload_id, top_k=top_k[i], text=text[i], **arrays)


def write_table(path: Path, table: pa.Table, schema: pa.Schema) -> None:
    """Write one Parquet file so that it is there whole or not at all. Raises StoreError."""
    import pyarrow.parquet as pq

    table = table.select(schema.names).cast(schema)
    floats = [f.name for f in schema if "float" in str(f.type)]
    hashed = [f.name for f in schema if str(f.type) == "fixed_size_binary[16]"]
    metadata = {b"raytest.schema_version": str(SCHEMA_VERSION).encode()}
    leaf = {n: f"{n}.list.element" if "list" in str(schema.field(n).type) else n for n in floats}
    plain = {leaf.get(n, n) for n in (*floats, *hashed)}
    leaves = [f"{f.name}.list.element" if "list" in str(f.type) else f.name for f in schema]
    row_bytes = table.nbytes // max(1, table.num_rows)
    with _Atomic(path) as temporary:
        pq.write_table(
            table.replace_schema_metadata(metadata),
            temporary,
            compression="zstd",
            use_dictionary=[n for n in leaves if n not in plain],
            use_byte_stream_split=[leaf[n] for n in floats],
            row_group_size=max(1, min(64 * 1024, ROW_GROUP_BYTES // max(1, row_bytes))),
            write_page_checksum=True,
        )


def read_table(path: Path, schema: pa.Schema, columns: list[str] | None = None) -> pa.Table:
    """Read one Parquet file and hold it to ``schema`` (extra columns are left out, types are not
    cast). Raises StoreError naming the file and what is wrong with it."""
    names = schema.names if columns is None else columns
    with open_table(path, schema, names) as file:
        table = file.read(columns=names, use_threads=False)
        return table.select(names).replace_schema_metadata(None)


@contextmanager
def open_table(path: Path, schema: pa.Schema, names: list[str]) -> Iterator[pq.ParquetFile]:
    """One Parquet file, to be read by row group; ``names`` are checked against ``schema``.

    Raises StoreError naming the file, also for what fails while it is read inside the block.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        small = path.stat().st_size <= READ_AT_ONCE
        source = pa.BufferReader(path.read_bytes()) if small else path
        with pq.ParquetFile(source, page_checksum_verification=True) as file:
            arrow = file.schema_arrow
            found = dict(zip(arrow.names, arrow.types, strict=True))
            wanted = dict(zip(schema.names, schema.types, strict=True))
            for name in names:
                if name not in found:
                    raise StoreError(f"{path}: column {name!r} is missing")
                if found[name] != wanted[name]:
                    raise StoreError(
                        f"{path}: column {name!r} is {found[name]}, expected {wanted[name]}"
                    )
            yield file
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing") from None
    except (pa.ArrowException, OSError) as error:
        raise StoreError(f"{path}: damaged or not Parquet ({str(error).splitlines()[0]})") from None


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically (sorted keys, UTF-8, newline at the end). Raises StoreError."""
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, default=_plain)
    write_text(path, text + "\n")


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 atomically; what cannot be encoded is escaped. Raises StoreError."""
    with _Atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises StoreError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise StoreError(f"{path}: is missing; not a run of raytest") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: cannot be read as JSON ({error})") from None
    if not isinstance(value, dict):
        raise StoreError(f"{path}: expected a JSON object")
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "keys"):
        return dict(value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return str(value)


def _unwritable(path: Path, error: OSError) -> DiskError:
    """The error for a file or folder that cannot be written, with what to do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason += "; make room there, then the run goes on with --resume"
    return DiskError(f"{path}: cannot be written: {reason}")


class _Atomic:
    """A temporary file beside ``path`` that takes its place when the block ends well."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")

    def __enter__(self) -> Path:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self._path.parent, error) from None
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: Any
    ) -> None:
        try:
            if kind is None:
                with self._temporary.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(self._temporary, self._path)
                return
        except OSError as failure:
            raise _unwritable(self._path, failure) from None
        finally:
            self._temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _unwritable(self._path, error) from None
