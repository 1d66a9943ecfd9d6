"""The fingerprint of this process, as flat keys and values, secrets removed.

Called inside every vLLM rank: it imports neither torch nor vLLM, draws no random number, starts no
CUDA context and never raises. A group that cannot be read leaves ``capture.failed.<group>`` behind,
so that it is not taken for one that is empty.
"""

from __future__ import annotations

import locale
import os
import platform
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial

from raytest.fingerprint import gpu, host, software
from raytest.fingerprint.health import device_health
from raytest.fingerprint.knobs import is_relevant
from raytest.fingerprint.redact import redact_env, redact_text

_Group = Callable[[], Mapping[str, str]]

# What other people's libraries, files and drivers answer with when they are not as expected.
_TOLERATED = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError,
    RuntimeError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def capture(stage: str, *, all_gpus: bool = False) -> dict[str, str]:
    """Facts about this process and its node; ``stage`` says when (``before load``, ``loaded``).

    Keys are ``<group>.<name>``; absent means unknown, '' means empty. Sizes are bytes. With
    ``all_gpus`` also the GPUs that this process may not use: it speaks for the node.
    """
    facts = {"process.stage": stage}
    groups: dict[str, _Group] = {**_GROUPS, "gpu": partial(_gpu_facts, all_gpus)}
    for name, group in groups.items():
        try:
            found = group()
        except _TOLERATED as error:
            found = {f"capture.failed.{name}": f"{type(error).__name__}: {error}"}
        facts.update({k: redact_text(str(v)) for k, v in found.items()})
    return facts


def capture_health() -> dict[str, str]:
    """What :func:`raytest.fingerprint.health.device_health` tells of the GPUs of this process, now;
    {} where there are none."""
    try:
        return device_health(_gpu_facts(all_gpus=False))
    except _TOLERATED as error:
        return {"capture.failed.health": redact_text(f"{type(error).__name__}: {error}")}


def env_facts(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """``env.<NAME>`` of every variable that determinism may depend on."""
    env = os.environ if env is None else env
    relevant = {k: v for k, v in sorted(env.items()) if is_relevant(k)}
    return {f"env.{name}": value for name, value in redact_env(relevant).items()}


def _python_facts() -> dict[str, str]:
    return {
        "python.version": platform.python_version(),
        "python.implementation": platform.python_implementation(),
        "python.build": " ".join(platform.python_build()),
        "python.compiler": platform.python_compiler(),
        "python.executable": sys.executable,
        "python.hash_randomization": str(sys.flags.hash_randomization),
        "python.optimize": str(sys.flags.optimize),
    }


def _thread_facts() -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return {
        "threads.affinity_count": str(len(cores)),
        "threads.affinity": _ranges(cores),
    }


def _ranges(numbers: Sequence[int]) -> str:
    """0,1,2,5 as ``0-2,5``."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


def _process_facts() -> dict[str, str]:
    limits = {
        "open_files": resource.RLIMIT_NOFILE,
        "locked_memory": resource.RLIMIT_MEMLOCK,
        "stack": resource.RLIMIT_STACK,
    }
    return {
        "process.pid": str(os.getpid()),
        "process.parent_pid": str(os.getppid()),
        "process.captured_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "process.directory": os.getcwd(),
        "process.launcher": host.launcher(),
        "process.nice": str(os.nice(0)),
        "process.locale": ".".join(part or "" for part in locale.getlocale()),
        **{f"process.limit.{n}": str(resource.getrlimit(kind)[0]) for n, kind in limits.items()},
    }


def visible_gpus(
    known: Sequence[Mapping[str, str]], visible: str | None
) -> list[Mapping[str, str]]:
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all of ``known`` where it is unset.

    As in CUDA, a name may be an index or the beginning of a UUID, and the list ends at the first
    that is neither.
    """
    if visible is None:
        return list(known)
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        named = [g for g in known if g["index"] == name]
        if name.startswith("GPU-"):
            named = [g for g in known if g["uuid"].startswith(name)]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return chosen


def _gpu_facts(all_gpus: bool) -> dict[str, str]:
    visible = None if all_gpus else os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible_gpus(gpu.gpus(), visible)
    facts = {f"gpu.{g['index']}.{key}": value for g in shown for key, value in g.items()}
    indices = {g["index"] for g in shown}
    facts["gpu.count"] = str(len(shown))
    if len(shown) > 1:
        pairs = gpu.topology()
        facts.update(
            {f"gpu.topology.{p}": w for p, w in pairs.items() if set(p.split("-")) <= indices}
        )
    return facts


_GROUPS: Mapping[str, _Group] = {
    "python": _python_facts,
    "os": host.os_facts,
    "cpu": host.cpu_facts,
    "memory": host.memory_facts,
    "container": host.container_facts,
    "process": _process_facts,
    "threads": _thread_facts,
    "versions": software.version_facts,
    "torch": software.torch_facts,
    "vllm": software.vllm_facts,
    "cuda": software.cuda_facts,
    "library": software.library_facts,
    "package": software.package_facts,
    "env": env_facts,
}
