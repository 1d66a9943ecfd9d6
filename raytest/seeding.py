"""Seeds and determinism levels, and the audit that proves they took.

Only the standard library is imported at the top: a worker calls :func:`seed_everything` before
anything that could draw a random number is imported.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Level:
    """One rung of the ladder: what it adds to the rung below."""

    level: int
    name: str
    adds: str


LEVELS = (
    Level(0, "nothing", "no seed is set and nothing is pinned"),
    Level(1, "seeds", "random, numpy, torch and every CUDA device, in every process"),
    Level(2, "threads", "cuDNN deterministic and not benchmarking, fixed thread counts"),
    Level(3, "schedule", "in-process deterministic scheduling: no engine process, no async"),
    Level(4, "batch-invariant", "VLLM_BATCH_INVARIANT: kernels that do not depend on the batch"),
    Level(
        5, "deterministic-algorithms", "torch.use_deterministic_algorithms, fixed cuBLAS workspace"
    ),
)

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def level_env(level: int, threads: int = 1) -> dict[str, str]:
    """Variables that must be set before the process exists, for ``level`` and those below it."""
    env: dict[str, str] = {}
    if level >= 1:
        env["PYTHONHASHSEED"] = "0"
    if level >= 2:
        env.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    if level >= 3:
        env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if level >= 4:
        env["VLLM_BATCH_INVARIANT"] = "1"
    if level >= 5:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        env["CUDA_LAUNCH_BLOCKING"] = "1"
    return env


def level_engine_args(level: int) -> dict[str, Any]:
    """Engine arguments of ``level`` (``seed`` is passed on its own)."""
    return {"async_scheduling": False} if level >= 3 else {}


def unsupported(level: int, platform: str) -> str | None:
    """Why ``level`` cannot be had on ``platform`` (``cuda`` or ``cpu``), or None."""
    if level >= 4 and platform == "cpu":
        return "vLLM has no batch-invariant kernels on the CPU platform; use level 3"
    return None


def seed_everything(seed: int, *, level: int, warn_only: bool = False) -> None:
    """Seed every generator of this process; at level 0 do nothing.

    numpy and torch are imported for it where they are installed: what imports them later finds
    them seeded. From level 2 on cuDNN is fixed, at level 5 torch refuses operations that are not
    deterministic, or warns of them with ``warn_only``.
    """
    if level == 0:
        return
    random.seed(seed)
    _seed_numpy(seed)
    _seed_torch(seed, level, warn_only)


def _seed_numpy(seed: int) -> None:
    try:
        import numpy as np
    except ImportError:
        return
    np.random.seed(seed % 2**32)


def _seed_torch(seed: int, level: int, warn_only: bool) -> None:
    try:
        import torch
    except ImportError:
        return
    torch.manual_seed(seed)  # every CUDA device too, at once or when CUDA starts
    if level >= 2:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False
    if level >= 5:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)


def state_digests() -> dict[str, str]:
    """Digest of each generator's state, drawing from none and starting no CUDA context."""
    digests = {
        "random": _digest(repr(random.getstate()).encode()),
        "python_hash_seed": os.environ.get("PYTHONHASHSEED", "unset"),
    }
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        kind, keys, position, *rest = numpy.random.get_state()
        digests["numpy"] = _digest(f"{kind}{position}{rest}".encode() + keys.tobytes())
    if torch is not None:
        digests["torch"] = _digest(torch.get_rng_state().numpy().tobytes())
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                state = torch.cuda.get_rng_state(i).numpy().tobytes()
                digests[f"torch.cuda.{i}"] = _digest(state)
    return digests


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def compare_audits(audits: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Sentences that name generator and process where processes that should agree do not.

    Generators that a process does not have are not held against it.
    """
    found = []
    for generator in sorted({g for states in audits.values() for g in states}):
        by_digest: dict[str, list[str]] = {}
        for process, states in audits.items():
            if generator in states:
                by_digest.setdefault(states[generator], []).append(process)
        if len(by_digest) > 1:
            majority = max(by_digest.values(), key=len)
            others = [p for ps in by_digest.values() if ps is not majority for p in ps]
            found.append(f"{generator}: {', '.join(others)} differ from {', '.join(majority)}")
    return found


# Some names go on in words: ``scatter with src tensor and reduce=None``.
_NONDETERMINISTIC = re.compile(
    r"([\w.:]+(?: with [^\n]{1,60}?)?) does not have a deterministic implementation"
)
# cuBLAS is judged by its workspace alone (torch, aten/src/ATen/Context.cpp).
_CUBLAS = re.compile(r"not deterministic because it uses CuBLAS")


def nondeterministic_operation(error_text: str) -> tuple[str, str] | None:
    """The operation that torch refused at level 5 and what would do, or None for another error."""
    if _CUBLAS.search(error_text):
        workspace = level_env(5)["CUBLAS_WORKSPACE_CONFIG"]
        return "cuBLAS", f"set CUBLAS_WORKSPACE_CONFIG={workspace} in the variant's env"
    match = _NONDETERMINISTIC.search(error_text)
    if match is None:
        return None
    return match[1], "level 4 does without it, or set determinism.warn_only = true"
