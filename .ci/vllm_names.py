"""Write raytest/fingerprint/vllm_names.json from unpacked source distributions of vLLM.

    python .ci/vllm_names.py vllm-0.20.0 vllm-0.21.0 ...

Each folder is what ``vllm-<version>.tar.gz`` unpacks to. Name one per minor version, oldest first,
without a gap.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from raytest.fingerprint import vllm_source
from raytest.fingerprint.vllm_history import DATA

# Some variables are read where they are needed and are missing in vLLM's own table.
READ = re.compile(
    r"""environ(?:\.\w+)?\s*[\[(]\s*["'](VLLM_\w+)["']|getenv\(\s*["'](VLLM_\w+)["']"""
    r"""|["'](VLLM_\w+)["']\s+(?:not\s+)?in\s+os\.environ"""
)


def names_of(package: Path) -> dict[str, frozenset[str]]:
    """Every kind of name that the vLLM in ``package`` knows."""

    def text(relative: str) -> str:
        return (package / relative).read_text(encoding="utf-8")

    variables = vllm_source.variables_in(text(vllm_source.VARIABLES_FILE))
    read = {
        name
        for file in package.rglob("*.py")
        for groups in READ.findall(file.read_text(encoding="utf-8"))
        for name in groups
        if name
    }
    return {
        "variables": variables,
        "unlisted_variables": frozenset(read - variables),
        "engine_arguments": vllm_source.arguments_in(text(vllm_source.ARGUMENTS_FILE)),
        "attention_backends": vllm_source.backends_in(text(vllm_source.BACKENDS_FILE)),
    }


def groups(by_version: Mapping[str, frozenset[str]]) -> dict[str, list[str]]:
    """``0.22-0.33`` → the names that all of those versions know and their neighbours do not."""
    versions = list(by_version)
    found: dict[str, list[str]] = {}
    for name in sorted(frozenset().union(*by_version.values())):
        first = None
        for i, version in enumerate(versions):
            if name not in by_version[version]:
                continue
            first = first or version
            if i + 1 == len(versions) or name not in by_version[versions[i + 1]]:
                found.setdefault(f"{first}-{version}", []).append(name)
                first = None
    return dict(sorted(found.items()))


def main(folders: list[str]) -> None:
    """Read every folder and write the data file."""
    by_kind: dict[str, dict[str, frozenset[str]]] = {}
    for folder in folders:
        match = re.search(r"-(\d+\.\d+)\.", Path(folder).name)
        if match is None:
            raise SystemExit(f"{folder}: is not called vllm-<version>")
        for kind, names in names_of(Path(folder) / "vllm").items():
            if not names:
                raise SystemExit(f"{folder}: no {kind} found")
            by_kind.setdefault(kind, {})[match[1]] = names
    data = {kind: groups(by_version) for kind, by_version in by_kind.items()}
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
