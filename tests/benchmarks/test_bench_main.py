"""What raytest adds to the engine's own time, and how fast its command line starts.

Ratios in one run. Nothing here asserts a time: a benchmark reports.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

PAIRS = 7


@pytest.mark.e2e
def test_trial_over_bare_generate(tmp_path: Path) -> None:
    """A raytest trial (run, digests, Arrow, Parquet on disk) over ``LLM.generate`` with the same
    engine, requests and sampling, in turn, in one process."""
    script = Path(__file__).with_name("trial_overhead.py")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), str(PAIRS)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    print(  # noqa: T201 - a benchmark reports
        f"\ntrial / bare generate, {result['requests']} requests x {result['max_tokens']} tokens, "
        f"{PAIRS} pairs in turn: median {result['ratio']:.3f} "
        f"(min {result['ratio_min']:.3f}, max {result['ratio_max']:.3f}); "
        f"bare {result['bare_s']:.2f} s, trial {result['trial_s']:.2f} s; "
        f"trial / its own generate: median {result['inside']:.3f}, "
        f"{1000 * result['added_s']:.0f} ms added; "
        f"trial / bare generate without logprobs: median {result['no_logprobs']:.3f}"
    )


def test_capture_of_a_fingerprint() -> None:
    """One process' fingerprint in a fresh process, hashes of weights aside: seconds, and over
    ``python -c pass``."""
    code = "from raytest.fingerprint.capture import capture; capture('bench', all_gpus=True)"
    pairs = [
        (_seconds([sys.executable, "-c", code]), _seconds([sys.executable, "-c", "pass"]))
        for _ in range(9)
    ]
    added = [ours - base for ours, base in pairs]
    print(  # noqa: T201 - a benchmark reports
        f"\nfingerprint of one process over an empty one, 9 pairs in turn: "
        f"median {median(added):.2f} s (min {min(added):.2f}, max {max(added):.2f})"
    )


def test_help_over_importing_click() -> None:
    """``raytest --help`` over ``python -c "import click"``, in turn."""
    raytest = [str(Path(sys.executable).with_name("raytest")), "--help"]
    click = [sys.executable, "-c", "import click"]
    ratios, seconds = [], []
    for _ in range(15):
        ours, base = _seconds(raytest), _seconds(click)
        ratios.append(ours / base)
        seconds.append(ours)
    print(  # noqa: T201 - a benchmark reports
        f"\nraytest --help / python -c 'import click', 15 pairs in turn: "
        f"median {median(ratios):.2f}; {median(seconds) * 1000:.0f} ms"
    )


def _seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began
