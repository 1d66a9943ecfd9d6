"""A lock file: the exact environment that a baseline belongs to, in one readable JSON file."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from raytest.errors import UsageError
from raytest.fingerprint.diff import Group, by_position, group_of
from raytest.fingerprint.finding import Finding, Severity
from raytest.fingerprint.redact import REDACTED

SCHEMA = "raytest.lock/1"

# Section of the file → prefix of the fingerprint's keys, which the file leaves out.
_PREFIXES = {"packages": "package.", "sources": "source.", "variables": "env."}
_EXTRA: Mapping[str, Severity] = {
    "packages": "info",
    "sources": "info",
    "variables": "warning",
}
_SECTIONS = ("packages", "sources", "variables", "versions", "gpu", "model", "node")
# What may differ between nodes of one fleet without changing a sum; the rest of the node's keys do.
_LOCKED_NODE_KEYS = ("cpu.model", "cpu.instruction_sets", "os.libc", "os.machine")
# Known only once torch is loaded, or of no consequence for any sum.
_UNLOCKED = (
    "library.", "torch.build_digest", "torch.cpu_capability", "torch.cudnn", "torch.mkldnn",
    "python.build", "python.compiler", "python.hash_randomization",
)  # fmt: skip
_PINNED = re.compile(r"\d[0-9A-Za-z.!]*(?:\+[0-9A-Za-z.]+)?")


def make_lock(facts: Mapping[str, str], model: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The lock of a fingerprint and, where given, of a model's (:func:`model_fingerprint`).

    Names, places, health and noise are left out: a lock holds on every node that it describes.
    """
    sections: dict[str, dict[str, str]] = {name: {} for name in _SECTIONS}
    for key, value in sorted({**by_position(facts), **(model or {})}.items()):
        section = _section(key)
        if section is not None:
            sections[section][key.removeprefix(_PREFIXES.get(section, ""))] = value
    return {
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **sections,
    }


def _section(key: str) -> str | None:
    group = group_of(key)
    if group is Group.PACKAGES:
        return "packages" if key.startswith("package.") else "sources"
    if group is Group.VARIABLES:
        return "variables" if key.startswith("env.") else None
    if group in (Group.VERSIONS, Group.GPU, Group.MODEL):
        return None if key.startswith(_UNLOCKED) else str(group)
    return "node" if key in _LOCKED_NODE_KEYS else None


def write(path: str | os.PathLike[str], lock: Mapping[str, Any]) -> None:
    """Write a lock file, whole or not at all. Raises UsageError where it cannot be written."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(lock, indent=2) + "\n", encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{target}: cannot be written: {error.strerror}") from None


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A lock file's content. Raises UsageError that names the file and the key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: is no lock file: it is not UTF-8 text") from None
    try:
        lock = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path}: is no lock file: {error}") from None
    found = lock.get("schema") if isinstance(lock, dict) else None
    if found != SCHEMA:
        raise UsageError(f"{path}: schema is {found!r}, this raytest reads {SCHEMA!r}")
    for section in _SECTIONS:
        content = lock.get(section)
        if not isinstance(content, dict):
            raise UsageError(f"{path}: {section}: must be an object, is {content!r:.60}")
        for name, value in content.items():
            if not isinstance(value, str):
                raise UsageError(f"{path}: {section}.{name}: must be a string, is {value!r:.60}")
    return dict(lock)


def check_lock(
    lock: Mapping[str, Any], facts: Mapping[str, str], model: Mapping[str, str] | None = None
) -> list[Finding]:
    """Where an environment is not the locked one. Errors, but for what is there beside it:
    packages (harmless) and variables (Ray and containers add some of their own).

    Without ``model`` the lock's model is not checked, and a finding says so.
    """
    here = make_lock(facts, model)
    findings = []
    for section in _SECTIONS:
        if section == "model" and model is None:
            continue
        locked, found = lock[section], here[section]
        findings += [
            _deviation(section, name, locked.get(name), found.get(name))
            for name in sorted(locked.keys() | found.keys())
            if locked.get(name) != found.get(name)
        ]
    if lock["model"] and model is None:
        sentence = "the model was locked and has not been checked."
        findings.append(Finding("warning", "lock-unchecked", "model", sentence, "Name its path."))
    return findings


def _deviation(section: str, name: str, locked: str | None, found: str | None) -> Finding:
    where = f"{section}.{name}"
    if locked is None:
        sentence = f"{name} is {found!r} here and is not locked."
        severity = _EXTRA.get(section, "error")
        remedy = "Unset it." if section == "variables" else "Lock again if it belongs here."
        return Finding(severity, "lock-extra", where, sentence, remedy)
    if found is None:
        code, sentence = "lock-missing", f"{name} is missing here, locked is {locked!r}."
    else:
        code, sentence = "lock-different", f"{name} is {found!r} here, locked is {locked!r}."
    return Finding("error", code, where, sentence, _remedy(section, name, locked))


def _remedy(section: str, name: str, locked: str) -> str:
    if section == "packages":
        return f"pip install '{name}=={locked}'"
    if section == "variables" and locked != REDACTED:
        return f"Set {name}={locked} before the process starts."
    return "Use a node like the locked one, or lock again."


def requirements(lock: Mapping[str, Any]) -> str:
    """The locked packages in the form that ``pip install -r`` reads.

    What pip could not find again (a package from a folder, a version without a release) is a
    comment.
    """
    return "\n".join(_requirement_lines(lock)) + "\n"


def _requirement_lines(lock: Mapping[str, Any]) -> Iterator[str]:
    python = lock["versions"].get("python.version", "unknown")
    yield f"# raytest lock of {lock.get('created_at', 'unknown')}, Python {python}"
    packages, sources = lock["packages"], lock["sources"]
    if "+" in packages.get("torch", ""):
        build = packages["torch"].partition("+")[2]
        yield f"--extra-index-url https://download.pytorch.org/whl/{build}"
    for name, version in sorted(packages.items()):
        source = sources.get(name, "")
        if source.startswith(("file:", "/")):
            yield f"# {name}=={version} was installed from {source}"
        elif source:
            yield f"{name} @ {source}"
        elif _PINNED.fullmatch(version):
            yield f"{name}=={version}"
        else:
            yield f"# {name}: version {version!r} is no release"
