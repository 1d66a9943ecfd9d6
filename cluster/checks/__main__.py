"""Every check of every file: one line each, exit code 1 if any found a problem.

``--require-tools`` counts a check that this machine has no tool for as a problem.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from cluster.checks import (
    docker,
    github,
    kubernetes,
    npd,
    prometheus,
    schedules,
    schemas,
    shell,
    systemd,
)
from cluster.checks.outcome import CLUSTER, Outcome

ALL = (schemas, kubernetes, schedules, shell, systemd, prometheus, github, docker, npd)


def check_all(folder: Path = CLUSTER) -> list[Outcome]:
    """The outcomes of all checks of a folder laid out like ``cluster/``."""
    return [found for module in ALL for found in _outcomes(module, folder)]


def _outcomes(module: ModuleType, folder: Path) -> list[Outcome]:
    """A module's outcomes; a file whose shape is wrong fails in one line."""
    from ruamel.yaml.error import YAMLError

    try:
        found: list[Outcome] = module.checks(folder)
    except (LookupError, TypeError, ValueError, AttributeError, OSError, YAMLError) as error:
        name = module.__name__.rpartition(".")[2]
        text = f"cannot be judged: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Outcome(name, "shape", (text,))]
    return found


def main(arguments: list[str]) -> int:
    """Print every outcome; the exit code."""
    if set(arguments) - {"--require-tools"}:
        sys.stderr.write("usage: python -m cluster.checks [--require-tools]\n")
        return 2
    failed = 0
    for found in check_all():
        skipped = bool(found.skipped)
        bad = bool(found.problems) or (skipped and bool(arguments))
        failed += bad
        word = "FAILED" if bad else "skipped" if skipped else "ok"
        sys.stdout.write(f"{word:8}{found.file}: {found.check}\n")
        for line in (found.skipped,) if skipped else found.problems:
            sys.stdout.write(f"        {line}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
