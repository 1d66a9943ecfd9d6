"""Checks variables and engine arguments against what a version of vLLM really reads.

vLLM ignores a variable that it does not know with a line in its log. A determinism test must not:
a setting that did nothing would be reported as one that changed nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from raytest.fingerprint import vllm_source
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.knobs_data import (
    ARGUMENTS,
    ATTENTION_BACKENDS,
    BACKEND_ALIASES,
    LIBRARY_VARIABLES,
    NEWEST,
    PLUGIN_PREFIXES,
    PREFIXES,
    RELEVANT,
    RESERVED_ARGUMENTS,
    REWRITTEN_WHEN_BATCH_INVARIANT,
    SAMPLING_ARGUMENTS,
    VARIABLES,
    Knob,
)

__all__ = [
    "PREFIXES",
    "RELEVANT",
    "check_engine_args",
    "check_env",
    "is_relevant",
    "machine_defaults",
    "profile_engine_args",
    "profile_env",
]

_GIB = 1 << 30


def is_relevant(name: str) -> bool:
    """Whether determinism may depend on the variable ``name``."""
    return name.startswith(PREFIXES)


def parse_version(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as ``0.32.0+cpu``; the newest known where it has none."""
    match = re.match(r"(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else NEWEST


def _in_version(knob: Knob, version: tuple[int, int]) -> bool:
    return (knob.since is None or version >= knob.since) and (
        knob.until is None or version < knob.until
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _closest(name: str, known: Iterable[str]) -> str:
    matches = get_close_matches(name, sorted(known), n=1, cutoff=0.75)
    return f"Did you mean {matches[0]}?" if matches else ""


def _use(instead: str) -> str:
    return f"Use {instead}." if instead else "Remove it."


def check_env(env: Mapping[str, str], vllm_version: str, platform: str) -> list[Finding]:
    """What is wrong with variables that somebody sets for an engine.

    ``vllm_version`` may be '' (the newest known is meant), ``platform`` is ``cuda`` or ``cpu``.
    """
    version = parse_version(vllm_version)
    known = _known_variables(version)
    knobs = {k.name: k for k in (*VARIABLES, *LIBRARY_VARIABLES)}
    invariant = env.get("VLLM_BATCH_INVARIANT") == "1"
    findings = []
    for name, value in env.items():
        knob = knobs.get(name)
        if name.startswith("VLLM_") and name not in known:
            findings.append(_unknown_variable(name, version, known))
        elif knob is not None:
            findings += _check_knob(knob, value, platform)
        elif name not in known and not is_relevant(name):
            findings += _near_miss(name)
        if invariant and name.startswith(REWRITTEN_WHEN_BATCH_INVARIANT):
            findings.append(_rewritten(name))
        findings += _check_special(name, value)
    return findings


def _known_variables(version: tuple[int, int]) -> frozenset[str]:
    """What that vLLM reads: its own list where it is the installed one, else that and ours."""
    installed = vllm_source.environment_variables()
    ours = frozenset(k.name for k in VARIABLES if _in_version(k, version))
    gone = frozenset(k.name for k in VARIABLES if not _in_version(k, version))
    if installed and parse_version(vllm_source.installed_version()) == version:
        return installed | ours
    return (installed | ours) - gone


def _unknown_variable(name: str, version: tuple[int, int], known: frozenset[str]) -> Finding:
    vllm = f"vLLM {_dotted(version)}"
    for knob in VARIABLES:
        if knob.name == name and knob.until is not None and version >= knob.until:
            return Finding(
                "error",
                "removed-variable",
                name,
                f"{vllm} ignores {name}: it is gone since {_dotted(knob.until)}.",
                _use(knob.instead),
            )
        if knob.name == name and knob.since is not None:
            return Finding(
                "error",
                "future-variable",
                name,
                f"{vllm} ignores {name}: it came with {_dotted(knob.since)}.",
                "Remove it, or use a newer vLLM.",
            )
    if name.startswith(PLUGIN_PREFIXES):
        sentence = f"{name} belongs to a plugin: whether it is read cannot be checked."
        return Finding("info", "plugin-variable", name, sentence, "")
    remedy = _closest(name, known) or "Remove it: vLLM reads no variable of a similar name."
    return Finding("error", "unknown-variable", name, f"{vllm} knows no variable {name}.", remedy)


def _check_knob(knob: Knob, value: str, platform: str) -> list[Finding]:
    found = []
    if knob.values and value.lower() not in {v.lower() for v in knob.values}:
        accepted = ", ".join(repr(v) for v in knob.values)
        sentence = f"{knob.name} is {value!r} ({knob.note})."
        found.append(
            Finding("error", "bad-value", knob.name, sentence, f"It takes one of {accepted}.")
        )
    if knob.platform and knob.platform != platform:
        sentence = f"{knob.name} has no effect on the {platform} platform."
        found.append(Finding("warning", "other-platform", knob.name, sentence, "Remove it."))
    return found


def _near_miss(name: str) -> list[Finding]:
    """A variable that nobody reads because a letter is missing: ``VLM_BATCH_INVARIANT``."""
    match = get_close_matches(name, sorted(RELEVANT), n=1, cutoff=0.88)
    if not match:
        return []
    sentence = f"{name} is no variable that vLLM or its libraries are known to read."
    return [Finding("warning", "near-miss", name, sentence, f"Did you mean {match[0]}?")]


def _rewritten(name: str) -> Finding:
    sentence = f"{name} is overwritten in every rank by VLLM_BATCH_INVARIANT=1."
    return Finding("warning", "overwritten", name, sentence, "Remove one of the two.")


def _check_special(name: str, value: str) -> list[Finding]:
    if name == "PYTHONHASHSEED" and not (value.isdecimal() and int(value) < 2**32):
        sentence = f"PYTHONHASHSEED is {value!r}, which fixes nothing."
        remedy = "Use a number from 0 to 4294967295."
        return [Finding("error", "bad-value", name, sentence, remedy)]
    if name == "NCCL_DETERMINISTIC":
        sentence = "No evidence was found that NCCL reads NCCL_DETERMINISTIC."
        remedy = "Set NCCL_ALGO, or use VLLM_BATCH_INVARIANT=1."
        return [Finding("warning", "unread-variable", name, sentence, remedy)]
    if name == "CUDA_VISIBLE_DEVICES":
        sentence = "CUDA_VISIBLE_DEVICES would bypass Ray's placement and book a GPU twice."
        remedy = "Use [placement] instead."
        return [Finding("error", "reserved-variable", name, sentence, remedy)]
    return []


def check_engine_args(
    args: Mapping[str, Any],
    vllm_version: str,
    platform: str,
    known_fields: Collection[str] | None,
) -> list[Finding]:
    """What is wrong with engine arguments.

    ``known_fields`` are the fields of that vLLM's ``EngineArgs``; with None they are read from the
    installed vLLM where it has that version, and else only known removals are found.
    """
    version = parse_version(vllm_version)
    if known_fields is None and parse_version(vllm_source.installed_version()) == version:
        known_fields = vllm_source.engine_arguments()
    findings = []
    for name, value in args.items():
        findings += _check_argument(name, version, frozenset(known_fields or ()))
        if name == "attention_backend":
            findings += _check_backend(value, platform, name)
    config = args.get("attention_config")
    if isinstance(config, Mapping) and config.get("backend") is not None:
        findings += _check_backend(config["backend"], platform, "attention_config.backend")
        if args.get("attention_backend") is not None:
            sentence = "attention_backend and attention_config.backend exclude each other."
            where = "attention_config.backend"
            findings.append(Finding("error", "conflict", where, sentence, "Remove one of the two."))
    return findings


def _check_argument(name: str, version: tuple[int, int], fields: frozenset[str]) -> list[Finding]:
    def error(code: str, sentence: str, remedy: str) -> list[Finding]:
        return [Finding("error", code, name, sentence, remedy)]

    vllm = f"vLLM {_dotted(version)}"
    knob = next((k for k in ARGUMENTS if k.name == name), None)
    if name in RESERVED_ARGUMENTS:
        return error(
            "reserved-argument", f"{name} is set by raytest.", _use(RESERVED_ARGUMENTS[name])
        )
    if name in SAMPLING_ARGUMENTS:
        return error(
            "sampling-argument",
            f"{name} belongs to a request, not to an engine.",
            "Move it to [sampling].",
        )
    if fields and name in fields:
        return []
    if knob is not None and knob.until is not None and version >= knob.until:
        return error(
            "removed-argument", f"{vllm} has no engine argument {name}.", _use(knob.instead)
        )
    if knob is not None and knob.since is not None and version < knob.since:
        sentence = f"{vllm} has no engine argument {name}: it came with {_dotted(knob.since)}."
        return error("future-argument", sentence, "Remove it, or use a newer vLLM.")
    if fields:
        remedy = _closest(name.lstrip("-").replace("-", "_"), fields) or "Remove it."
        return error("unknown-argument", f"{vllm} has no engine argument {name!r}.", remedy)
    return []


def _check_backend(value: Any, platform: str, where: str) -> list[Finding]:
    if value is None or str(value).lower() == "auto":
        return []
    backend = str(getattr(value, "name", value)).upper()
    if backend not in ATTENTION_BACKENDS and not vllm_source.attention_backends() & {backend}:
        meant = BACKEND_ALIASES.get(backend)
        remedy = f"Use {meant}." if meant else _closest(backend, ATTENTION_BACKENDS)
        remedy = remedy or f"Use one of {', '.join(ATTENTION_BACKENDS[:4])}."
        sentence = f"vLLM has no attention backend {value!r}."
        return [Finding("error", "unknown-backend", where, sentence, remedy)]
    if platform == "cpu" and backend != "CPU_ATTN":
        sentence = f"{where} {value!r} has no effect on the cpu platform, which has one backend."
        return [Finding("warning", "other-platform", where, sentence, "Remove it.")]
    return []


def profile_engine_args(
    profile: str, platform: str, vllm_version: str, world_size: int
) -> dict[str, Any]:
    """Engine arguments of a profile: ``strict``, ``eager`` or ``as-deployed`` (none).

    ``strict`` pins what vLLM would otherwise choose from the GPU's memory, from timings or from
    the model's folder: two slots that chose differently would run different engines.
    """
    if profile == "eager":
        return {"enforce_eager": True}
    if profile != "strict":
        return {}
    arguments: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
    }
    if platform == "cuda":
        arguments["kv_cache_memory_bytes"] = 4 * _GIB
        arguments["attention_backend"] = "FLASH_ATTN"
        arguments["enable_flashinfer_autotune"] = False
        # Batch-invariant mode did the same until 0.31; since 0.32 it sums in rank order.
        if world_size > 1 and parse_version(vllm_version) < (0, 32):
            arguments["disable_custom_all_reduce"] = True
    return arguments


def profile_env(profile: str, platform: str, vllm_version: str) -> dict[str, str]:
    """Variables of a profile that must be set before the engine's process exists."""
    if platform == "cpu":
        # For every profile: by default a CPU engine takes half of the node's memory for its cache
        # and binds its threads to all cores of a NUMA node, so that a second one fails or halves
        # the first one's speed. Neither says anything about how a GPU engine is deployed.
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Off unless asked for in 0.20.
    strict = profile == "strict" and parse_version(vllm_version) >= (0, 21)
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if strict else {}


def machine_defaults(env: Mapping[str, str]) -> list[Finding]:
    """What this machine would decide where ``env`` does not: a likely difference between nodes."""
    findings = []
    for name in ("OMP_NUM_THREADS", "PYTHONHASHSEED"):
        if not env.get(name):
            why = "it follows the core count" if name.startswith("OMP") else "it is random"
            sentence = f"{name} is unset: in each process {why}."
            remedy = "Determinism level 2 and above sets it."
            findings.append(Finding("info", "unset-variable", name, sentence, remedy))
    if not env.get("CUDA_DEVICE_ORDER"):
        sentence = "CUDA_DEVICE_ORDER is unset: on nodes with mixed GPUs CUDA counts by speed."
        remedy = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID on every node."
        findings.append(Finding("info", "unset-variable", "CUDA_DEVICE_ORDER", sentence, remedy))
    for name in sorted(n for n in env if n.startswith(("NCCL_", "LD_PRELOAD")) and env[n]):
        sentence = f"{name} is set on this machine, and a spec that does not name it keeps it."
        remedy = "Set it on every node, or in the spec."
        findings.append(Finding("info", "node-local-variable", name, sentence, remedy))
    # A Kubernetes service called "vllm" puts its address into VLLM_PORT.
    if env.get("VLLM_PORT", "").startswith("tcp://"):
        sentence = "VLLM_PORT holds a Kubernetes service address, which vLLM cannot read."
        remedy = "Rename the service, or set enableServiceLinks: false."
        findings.append(Finding("error", "kubernetes-service", "VLLM_PORT", sentence, remedy))
    return findings
