"""Versions and builds of what is installed, and of what this process has loaded.

Nothing is imported for it: torch and vLLM are read through their files, or through
``sys.modules`` where they are loaded already.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raytest.fingerprint import vllm_source
from raytest.fingerprint.host import read_text
from raytest.fingerprint.knobs_data import VARIABLES
from raytest.fingerprint.redact import redact_env

# Groups of the fingerprint and the distributions that belong to them, by normalised name.
_GROUPS = {
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton", "triton-cpu"),
    "flash_attn": ("flash-attn", "flash-attn-3", "vllm-flash-attn"),
    "flashinfer": ("flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"),
    "vllm": vllm_source.DISTRIBUTIONS,
    "ray": ("ray",),
}
_VERSION_FILES = {
    "torch": ("version.py", ("__version__", "cuda", "git_version", "hip")),
    "vllm": ("_version.py", ("__version__", "version", "commit_id", "__commit_id__")),
    "ray": ("_version.py", ("version", "commit")),
}
# Which of several copies is loaded decides the order of sums, or which kernels there are.
_LIBRARIES = re.compile(
    r"(lib(?:gomp|iomp5|omp|mkl_rt|openblas|nccl|cublas|cublasLt|cudnn|cudart|cuda|tcmalloc"
    r"|tcmalloc_minimal|jemalloc))[-.][^/]*$"
)


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _package_folders() -> list[str]:
    """Where this process imports from, less what setuptools puts there for its own use: those
    copies are in the path of whoever happened to import it."""
    return [entry or "." for entry in sys.path if Path(entry).name != "_vendor"]


@cache
def packages() -> dict[str, str]:
    """Installed distributions, normalised name → version, the first on ``sys.path`` winning.

    Read from the names of ``*.dist-info`` folders: parsing some hundred metadata files takes
    longer than all the rest.
    """
    found: dict[str, str] = {}
    for entry in _package_folders():
        try:
            names = sorted(os.listdir(entry))
        except OSError:
            continue
        for folder in names:
            stem, dot, kind = folder.rpartition(".")
            name, dash, version = stem.partition("-")
            if dot and kind in ("dist-info", "egg-info") and dash:
                version = version.split("-")[0] if kind == "egg-info" else version
                found.setdefault(normalised(name), version)
    return found


@cache
def sources() -> dict[str, str]:
    """Where distributions came from that came from no index, normalised name → address.

    A version control address ends with the commit: ``git+https://host/x@<commit>``.
    """
    found: dict[str, str] = {}
    for entry in _package_folders():
        for file in sorted(Path(entry).glob("*.dist-info/direct_url.json")):
            name = normalised(file.parent.name.partition("-")[0])
            try:
                origin = json.loads(file.read_text(encoding="utf-8"))
                url = str(origin["url"])
            except (OSError, ValueError, LookupError, TypeError):
                continue
            control = origin.get("vcs_info")
            if isinstance(control, dict):
                url = f"{control.get('vcs')}+{url}@{control.get('commit_id')}"
            found.setdefault(name, url)
    return found


def package_facts() -> dict[str, str]:
    """``package.<name>``: every installed distribution; ``source.<name>`` where it came from no
    index."""
    versions = {f"package.{name}": version for name, version in sorted(packages().items())}
    return {**versions, **{f"source.{name}": url for name, url in sorted(sources().items())}}


def version_facts() -> dict[str, str]:
    """``<group>.version`` and what a package says about its own build."""
    facts = {}
    for group, names in _GROUPS.items():
        versions = [packages()[n] for n in names if n in packages()]
        if versions:
            facts[f"{group}.version"] = versions[0]
    for group, (file, names) in _VERSION_FILES.items():
        for name, value in _constants(group, file).items():
            if name in names:
                facts[f"{group}.{name.strip('_')}"] = value
    for group in ("torch", "vllm"):
        digest = _record_digest(group)
        if digest:
            facts[f"{group}.files_digest"] = digest
    return facts


def _package_folder(name: str) -> Path | None:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # a module put into sys.modules without a spec
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _constants(package: str, file: str) -> dict[str, str]:
    """Module-level string constants of one file of a package."""
    folder = _package_folder(package)
    try:
        body = [] if folder is None else ast.parse((folder / file).read_text("utf-8")).body
    except (OSError, SyntaxError, UnicodeDecodeError):
        return {}
    found = {}
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update({t.id: value.value for t in targets if isinstance(t, ast.Name)})
    return found


@cache
def _record_digest(package: str) -> str:
    """Digest of the hashes that the wheel recorded for the package's own files.

    It tells two builds of one version apart; files edited after the installation keep it.
    """
    folder = _package_folder(package)
    if folder is None:
        return ""
    for name in _GROUPS[package]:
        record = next(folder.parent.glob(f"{name.replace('-', '_')}-*.dist-info/RECORD"), None)
        if record is not None:
            lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
            own = sorted(x for x in lines if x.startswith(f"{package}/") and ",sha256=" in x)
            return hashlib.sha256("\n".join(own).encode()).hexdigest()[:16]
    return ""


def torch_facts() -> dict[str, str]:
    """``torch.*`` and ``threads.torch*`` of a torch that is loaded; starts no CUDA context."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    config = str(torch.__config__.show())
    return {
        "threads.torch": str(torch.get_num_threads()),
        "threads.torch_interop": str(torch.get_num_interop_threads()),
        "torch.build_digest": hashlib.sha256(config.encode()).hexdigest()[:16],
        "torch.cpu_capability": str(torch.backends.cpu.get_cpu_capability()),
        "torch.cudnn": str(torch.backends.cudnn.version()),
        "torch.cudnn.benchmark": str(torch.backends.cudnn.benchmark),
        "torch.cudnn.deterministic": str(torch.backends.cudnn.deterministic),
        "torch.default_dtype": str(torch.get_default_dtype()),
        "torch.deterministic_algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "torch.float32_matmul_precision": str(torch.get_float32_matmul_precision()),
        "torch.mkldnn": str(torch.backends.mkldnn.is_available()),
        "cuda.initialized": str(torch.cuda.is_initialized()),
    }


def vllm_facts() -> dict[str, str]:
    """``vllm.envs.<NAME>``: what a loaded vLLM takes known variables for, defaults included."""
    envs: Any = sys.modules.get("vllm.envs")
    table = getattr(envs, "environment_variables", {})
    facts = {}
    for knob in VARIABLES:
        if knob.name in table:
            try:
                facts[f"vllm.envs.{knob.name}"] = table[knob.name]()
            except ValueError as error:
                facts[f"vllm.envs.{knob.name}"] = f"refused: {error}"
    return redact_env(facts)


def library_facts() -> dict[str, str]:
    """``library.<name>``: file names of the numeric libraries that this process has loaded."""
    found: dict[str, set[str]] = {}
    for line in read_text("/proc/self/maps").splitlines():
        match = _LIBRARIES.search(line)
        if match:
            found.setdefault(match[1], set()).add(os.path.basename(line.split(maxsplit=5)[-1]))
    return {f"library.{name}": ",".join(sorted(files)) for name, files in sorted(found.items())}


def cuda_facts() -> dict[str, str]:
    """``cuda.*`` from files: the kernel module and the toolkit."""
    facts = {}
    module = read_text("/proc/driver/nvidia/version")
    driver = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", module)
    if driver:
        facts["cuda.kernel_module"] = driver[1]
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    versions = read_text(f"{home}/version.json")
    toolkit = re.search(r'"cuda"\s*:\s*\{[^}]*"version"\s*:\s*"([^"]+)"', versions)
    if toolkit:
        facts["cuda.toolkit"] = toolkit[1]
    return facts
