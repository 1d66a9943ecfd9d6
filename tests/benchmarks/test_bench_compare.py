"""The verdict of 64 workers x 1,000 requests x 1,024 tokens, against merely reading the columns,
DuckDB and pandas; growth from 8 workers; peak memory. Reports, asserts no time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.bulk_run import SHAPES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("shape", SHAPES)
def test_verdict_over_reading(shape: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.bench_compare", "--shapes", shape],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    print(f"\n{done.stdout.strip()}")  # noqa: T201 - a benchmark reports
