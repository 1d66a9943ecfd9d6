"""Run the command line as a user does: a process of its own, its exit code, both streams."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

RAYTEST = str(Path(sys.executable).with_name("raytest"))

REFERENCE = """
name = "reference"
backend = "reference"
[model]
path = "reference"
dtype = "float32"
max_model_len = 256
[workload]
limit = 6
sampling = { max_tokens = 8, logprobs = 3 }
[cluster]
nodes = 2
devices_per_node = 2
[placement]
scope = "every-node"
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """What it told the user: lines of stderr."""
        return [line for line in self.err.splitlines() if line.strip()]


def environment() -> dict[str, str]:
    """The caller's, without what would steer raytest or Ray from outside."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RAYTEST_", "RAY_ADDRESS"))}


def raytest(*arguments: str | Path, cwd: Path, timeout: float = 300) -> Ended:
    """Run to the end."""
    done = subprocess.run(
        [RAYTEST, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start and return at once; the caller waits or sends signals."""
    return subprocess.Popen(
        [RAYTEST, *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
