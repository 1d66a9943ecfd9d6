"""What a check says, and how it runs a tool of others."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CLUSTER = REPOSITORY / "cluster"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One check of one file: its problems, or why it did not take place."""

    file: str
    check: str
    problems: tuple[str, ...] = ()
    skipped: str = ""


def outcome(file: Path | str, check: str, problems: Iterable[str]) -> Outcome:
    """An Outcome of a check that took place."""
    return Outcome(str(file), check, tuple(problems))


def find_tool(name: str) -> str | None:
    """A program beside this Python (a package of the dev extra), else on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def said_by(
    command: Sequence[str | Path], *, quiet: bool = False, within: Path | None = None
) -> list[str]:
    """What ``command`` has against a file: [] where it ends with 0.

    ``quiet``: words on stderr are a complaint too, for tools that return 0 all the same.
    """
    done = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=within,
    )
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    if done.returncode != 0:
        return said or [f"{command[0]} ended with {done.returncode} and said nothing"]
    return done.stderr.splitlines() if quiet else []


def by_tool(file: Path | str, tool: str, *arguments: str | Path, **how: Any) -> Outcome:
    """The outcome of one call of a tool; skipped where this machine lacks it."""
    program = find_tool(tool)
    if program is None:
        return Outcome(str(file), tool, skipped=f"{tool} is not on this machine")
    return outcome(file, tool, said_by([program, *arguments], **how))


def documents(path: Path) -> list[dict[str, Any]]:
    """The documents of a YAML file; a duplicate key raises instead of winning silently."""
    from ruamel.yaml import YAML

    return [found for found in YAML(typ="safe", pure=True).load_all(path.read_text()) if found]
