"""How fast a verdict is, as ratios measured in one run.

    python -m tests.benchmarks.bench_compare [--workers 64] [--requests 1000] [--tokens 1024]
    [--top-k 0]

Per shape of run: the verdict's time over the time that pyarrow takes merely to read the same
columns, over DuckDB SQL and pandas that find the same classes and first divergences; growth from an
eighth of the workers to all (one GPU a node, so that a worker takes part in as many comparisons at
either size); peak memory of a process that does nothing but the verdict.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.bulk_run import SHAPES, Bulk

# What `make bench` holds raytest to: verdict time over reading time.
MOST_OVER_READING = {"equal": 1.5, "some": 2.5, "one": 2.5, "all": 2.5}
MOST_GROWTH = 1.2
MOST_MEMORY_MB = 1500


def evaluate_folder(path: Path) -> Any:
    from raytest.compare.evaluate import evaluate
    from raytest.store import RunFolder

    return evaluate(RunFolder.open(path))


def merely_read(path: Path) -> int:
    """Read the columns that the verdict is drawn from, and nothing else. (The analysis takes those
    that have one value from the statistics of a file.)"""
    import pyarrow.parquet as pq

    from raytest.compare import flat, observed

    rows = 0
    for file in sorted((path / "observations").glob("*/*.parquet")):
        with pq.ParquetFile(file) as parquet:
            rows += parquet.read(columns=observed.COLUMNS).num_rows
    for file in sorted((path / "payloads").glob("*.parquet")):
        with pq.ParquetFile(file) as parquet:
            for group in range(parquet.num_row_groups):
                rows += parquet.read_row_group(group, columns=flat.COLUMNS).num_rows
    return rows


SQL = """
with o as (
  select regexp_extract(slot, '^[^:]+') as node, regexp_extract(slot, '[^:]+$') as local, cell_id,
         request_index, sample_index, payload_id
  from read_parquet('{path}/observations/*/*.parquet')
),
axes as (
  select 'gpu' as axis, node as grp, * from o union all select 'node', local, * from o
),
classes as (
  select axis, grp, request_index, sample_index, payload_id, count(*) as n, min(cell_id) as first
  from axes group by all
),
ranked as (
  select *, row_number() over (
    partition by axis, grp, request_index, sample_index order by n desc, first) as place
  from classes
),
pairs as (
  select m.axis, m.grp, m.request_index, r.payload_id as reference, m.payload_id as other
  from ranked m join ranked r using (axis, grp, request_index, sample_index)
  where r.place = 1 and m.place > 1
),
payloads as (select payload_id, token_ids, logprobs from read_parquet('{path}/payloads/*.parquet'))
select count(*), sum(coalesce(list_position(
    list_transform(list_zip(a.token_ids, b.token_ids), lambda x: x[1] <> x[2]), true), 0)),
  max(list_max(list_transform(list_zip(a.logprobs, b.logprobs), lambda x: abs(x[1] - x[2]))))
from pairs join payloads a on a.payload_id = reference join payloads b on b.payload_id = other
"""


def with_duckdb(path: Path) -> int:
    import duckdb

    row = duckdb.connect().execute(SQL.format(path=path)).fetchone()
    assert row is not None
    return int(row[0])


def with_pandas(path: Path) -> int:
    """The same with pandas and a loop over the divergent pairs."""
    import numpy as np
    import pandas as pd

    columns = ["slot", "cell_id", "request_index", "sample_index", "payload_id"]
    o = pd.concat(
        pd.read_parquet(p, columns=columns)
        for p in sorted((path / "observations").glob("*/*.parquet"))
    )
    parts = o["slot"].str.split(":", expand=True)
    o["node"], o["local"] = parts[0], parts[1]
    payloads = pd.concat(
        pd.read_parquet(p, columns=["payload_id", "token_ids", "logprobs"])
        for p in sorted((path / "payloads").glob("*.parquet"))
    ).set_index("payload_id")
    pairs = 0
    for group in ("node", "local"):
        keys = [group, "request_index", "sample_index"]
        classes = (
            o.groupby([*keys, "payload_id"], sort=False)
            .agg(n=("cell_id", "size"), first=("cell_id", "min"))
            .reset_index()
            .sort_values([*keys, "n", "first"], ascending=[True, True, True, False, True])
        )
        reference = classes.drop_duplicates(keys)
        others = classes[classes.duplicated(keys)].merge(reference, on=keys)
        for other, ours in zip(others["payload_id_x"], others["payload_id_y"], strict=True):
            a, b = payloads.loc[ours], payloads.loc[other]
            np.flatnonzero(a["token_ids"] != b["token_ids"])[:1]
            np.abs(a["logprobs"] - b["logprobs"]).max()
            pairs += 1
    return pairs


def seconds(work: Callable[[], Any], times: int) -> float:
    """Median of ``times`` runs."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def peak_memory(path: Path) -> float:
    """MB that a process needs which does nothing but the verdict."""
    command = [sys.executable, "-m", "tests.benchmarks.bench_compare", "--verdict-only", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
    return float(json.loads(done.stdout)["peak_mb"])


def verdict_only(path: Path) -> None:
    evaluate_folder(path)
    # ru_maxrss starts at what the parent had when it forked; the kernel's own mark starts afresh
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1024
    sys.stdout.write(json.dumps({"peak_mb": peak}) + "\n")


def measure(path: Path, times: int, others: bool) -> dict[str, float]:
    """Seconds of each way, interleaved so that a slow spell hits all of them."""
    ways: dict[str, Callable[[Path], Any]] = {"read_s": merely_read, "verdict_s": evaluate_folder}
    if others:
        ways |= {"duckdb_s": with_duckdb, "pandas_s": with_pandas}
    for way in ways.values():  # imports, and the file cache
        way(path)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, way in ways.items():
            taken[name].append(seconds(partial(way, path), 1))
    return {name: statistics.median(values) for name, values in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--no-others", action="store_true", help="leave DuckDB and pandas out")
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--verdict-only", type=Path)
    args = parser.parse_args()
    if args.verdict_only:
        verdict_only(args.verdict_only)
        return
    root = args.folder or Path(tempfile.mkdtemp(prefix="raytest-bench-"))
    try:
        for shape in args.shapes:
            sys.stdout.write(json.dumps(report(shape, root, args)) + "\n")
            sys.stdout.flush()
    finally:
        if args.folder is None:
            shutil.rmtree(root)


def report(shape: str, root: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One line of results; the folders go when it is done."""

    def folder(workers: int, per_node: int) -> Path:
        size = (args.requests, args.tokens, args.top_k)
        path = root / f"{shape}-{workers}-{per_node}"
        if not path.exists():
            Bulk(shape, workers, *size, per_node).write(root, path.name)
        return path

    whole = folder(args.workers, 8)
    found: dict[str, Any] = {"shape": shape, "workers": args.workers}
    found |= measure(whole, args.times, not args.no_others)
    found["over_reading"] = found["verdict_s"] / found["read_s"]
    found["limit"] = MOST_OVER_READING[shape]
    for name in ("duckdb", "pandas"):
        if f"{name}_s" in found:
            found[f"over_{name}"] = found["verdict_s"] / found[f"{name}_s"]
    found["peak_mb"] = peak_memory(whole)
    if not args.no_growth:
        few, many = (
            measure(folder(n, 1), args.times, False) for n in (args.workers // 8, args.workers)
        )
        found["growth_per_worker"] = many["verdict_s"] / few["verdict_s"] / 8
    for path in root.glob(f"{shape}-*"):
        if args.folder is None:
            shutil.rmtree(path)
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


if __name__ == "__main__":
    main()
