"""Shell scripts: parsed, linted, and each wrapper's end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from cluster.checks.outcome import Outcome, by_tool, outcome

SBATCH = "slurm/raytest.sbatch"
# raytest.sbatch and the units end with run.sh; the others read verdicts and run nothing.
JUDGING = ("run.sh", "submit.sh", "kuberay/launch.sh")
DIRECTIVES = {
    "exclusive": "",
    "no-requeue": "",
    "ntasks-per-node": "1",
    "open-mode": "append",
    "signal": r"B:TERM@\d+",
    "time": r"\d+:\d\d:\d\d",
    "mem": "0",
}


def checks(folder: Path) -> list[Outcome]:
    """Every script, and the directives of the Slurm one."""
    return [found for path in scripts(folder) for found in check_script(folder, path)]


def check_script(folder: Path, path: Path) -> list[Outcome]:
    """``bash -n``, shellcheck and our rules for one script."""
    file = path.relative_to(folder)
    # From the folder's parent: `source=cluster/judge.sh` in the scripts is relative to it.
    found = [
        by_tool(file, "bash", "-n", path),
        by_tool(file, "shellcheck", "-x", path, within=folder.parent),
        outcome(file, "rules", _rules(str(file), path.read_text())),
    ]
    if str(file) == SBATCH:
        found.append(outcome(file, "directives", _directives(path.read_text())))
    return found


def scripts(folder: Path) -> list[Path]:
    """Every shell script of the folder."""
    return sorted([*folder.rglob("*.sh"), *folder.rglob("*.sbatch")])


def _rules(file: str, text: str) -> Iterator[str]:
    if not re.search(r"^set -e?uo pipefail$", text, re.M) and file != "judge.sh":
        yield "`set -uo pipefail` is missing"
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(r"\|\|\s*(true|:)\s*$|set \+e", line):
            yield f"line {number}: a failure is thrown away"
    last = text.rstrip().splitlines()[-1]
    if file in JUDGING and not last.startswith("judge "):
        yield f"ends with {last!r}: expected judge, which asks `raytest verdict`"


def _directives(text: str) -> Iterator[str]:
    """Slurm reads directives up to the first command, and ignores later ones."""
    head: list[str] = []
    for line in text.splitlines():
        if line and not line.startswith("#"):
            break
        head.append(line)
    given: dict[str, str | None] = {
        match[1]: match[2]
        for line in head
        if (match := re.match(r"#SBATCH --([a-z-]+)(?:=(\S+))?$", line))
    }
    if len(given) != len(re.findall(r"^#SBATCH", text, re.M)):
        yield "a #SBATCH line that is malformed, repeated, or below the first command"
    for name, value in DIRECTIVES.items():
        if name not in given:
            yield f"#SBATCH --{name} is missing"
        elif not re.fullmatch(value, given[name] or ""):
            yield f"#SBATCH --{name}={given[name]}: expected {value}"
