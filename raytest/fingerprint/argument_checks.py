"""Checks engine arguments against what a version of vLLM really takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from raytest.fingerprint import vllm_history, vllm_source
from raytest.fingerprint.finding import Finding, Severity
from raytest.fingerprint.knobs_data import (
    ARGUMENT_VALUES,
    BACKEND_ALIASES,
    DEAD_ARGUMENTS,
    EXCLUSIVE_ARGUMENTS,
    REMOVED_ARGUMENTS,
    RESERVED_ARGUMENTS,
    SAMPLING_ARGUMENTS,
)
from raytest.fingerprint.versions import (
    closest,
    dotted,
    is_certain,
    is_installed,
    parse_version,
    use,
    when_known,
)
from raytest.fingerprint.vllm_history import Version


def check_engine_args(
    args: Mapping[str, Any],
    vllm_version: str,
    platform: str,
    known_fields: Collection[str] | None,
) -> list[Finding]:
    """What is wrong with engine arguments.

    ``known_fields`` are the fields of that vLLM's ``EngineArgs``; with None they are read from the
    installed vLLM where it has that version, and else from the history.
    """
    version = parse_version(vllm_version)
    fields = frozenset(known_fields) if known_fields is not None else _fields(version)
    findings = []
    for name, value in args.items():
        unknown = _check_name(name, version, fields, known_fields is not None)
        findings += unknown or _check_value(name, value, version)
    findings += _check_backends(args, platform, version)
    findings += [f for names in EXCLUSIVE_ARGUMENTS for f in _check_exclusive(args, *names)]
    return findings + _check_overruled(args)


def _fields(version: Version) -> frozenset[str]:
    if is_installed(version) and vllm_source.engine_arguments():
        return vllm_source.engine_arguments()
    return vllm_history.known("engine_arguments", version)


def _check_name(name: str, version: Version, fields: frozenset[str], told: bool) -> list[Finding]:
    """``told``: the fields are that engine's own, so that the version does not matter."""

    def found(code: str, sentence: str, remedy: str, severity: Severity = "error") -> list[Finding]:
        return [Finding(severity, code, name, sentence, remedy)]

    if name in RESERVED_ARGUMENTS:
        remedy = use(RESERVED_ARGUMENTS[name])
        return found("reserved-argument", f"{name} is set by raytest.", remedy)
    if name in SAMPLING_ARGUMENTS:
        sentence = f"{name} belongs to a request, not to an engine."
        return found("sampling-argument", sentence, "Move it to [sampling].")
    if name in fields:
        return []
    lacks = f"vLLM {dotted(version)} has no engine argument {name}"
    when = when_known("engine_arguments", name, version)
    if when.startswith("it came"):
        return found("future-argument", f"{lacks}: {when}.", "Remove it, or use a newer vLLM.")
    if when or name in REMOVED_ARGUMENTS:
        sentence = f"{lacks}: {when}." if when else f"{lacks}."
        return found("removed-argument", sentence, use(REMOVED_ARGUMENTS.get(name)))
    remedy = closest(name.lstrip("-").replace("-", "_"), fields) or "Remove it."
    certain = told or is_certain(version)
    return found("unknown-argument", f"{lacks}.", remedy, "error" if certain else "warning")


def _check_value(name: str, value: Any, version: Version) -> list[Finding]:
    values = ARGUMENT_VALUES.get(name, ())
    if values and value not in values:
        remedy = f"It takes one of {', '.join(map(repr, values))}."
        return [Finding("error", "bad-value", name, f"{name} is {value!r}.", remedy)]
    if name in DEAD_ARGUMENTS and version >= DEAD_ARGUMENTS[name]:
        sentence = f"{name} has no effect since vLLM {dotted(DEAD_ARGUMENTS[name])}."
        return [Finding("warning", "dead-argument", name, sentence, "Remove it.")]
    return []


def _inner(args: Mapping[str, Any], section: str, key: str) -> Any:
    config = args.get(section)
    return config.get(key) if isinstance(config, Mapping) else None


def _check_backends(args: Mapping[str, Any], platform: str, version: Version) -> list[Finding]:
    places = {
        "attention_backend": args.get("attention_backend"),
        "attention_config.backend": _inner(args, "attention_config", "backend"),
    }
    return [f for where, value in places.items() for f in _backend(value, platform, where, version)]


def _backend(value: Any, platform: str, where: str, version: Version) -> list[Finding]:
    if value is None or str(value).lower() == "auto":
        return []
    backend = str(getattr(value, "name", value)).upper()
    known = vllm_history.known("attention_backends", version)
    if is_installed(version):
        known = vllm_source.attention_backends() or known
    if backend not in known:
        meant = BACKEND_ALIASES.get(backend)
        remedy = use(meant) if meant else closest(backend, known)
        sentence = f"vLLM {dotted(version)} has no attention backend {value!r}."
        when = when_known("attention_backends", backend, version)
        if when:
            sentence = f"{sentence[:-1]}: {when}."
        remedy = remedy or "Use FLASH_ATTN, TRITON_ATTN, FLASHINFER or FLEX_ATTENTION."
        severity: Severity = "error" if is_certain(version) else "warning"
        return [Finding(severity, "unknown-backend", where, sentence, remedy)]
    if platform == "cpu" and not backend.startswith("CPU"):
        sentence = f"{where} {value!r} has no effect on the cpu platform, which has its own."
        return [Finding("warning", "other-platform", where, sentence, "Remove it.")]
    return []


def _check_exclusive(args: Mapping[str, Any], name: str, section: str, key: str) -> list[Finding]:
    if args.get(name) is None or _inner(args, section, key) is None:
        return []
    sentence = f"{name} and {section}.{key} exclude each other."
    return [Finding("error", "conflict", f"{section}.{key}", sentence, "Remove one of the two.")]


def _check_overruled(args: Mapping[str, Any]) -> list[Finding]:
    """Settings that another one makes void without a word."""
    found = []
    mode = _inner(args, "compilation_config", "cudagraph_mode")
    if args.get("enforce_eager") and mode not in (None, "NONE", 0):
        where = "compilation_config.cudagraph_mode"
        sentence = f"{where} {mode!r} has no effect with enforce_eager."
        remedy = "Set enforce_eager = false, or remove it."
        found.append(Finding("error", "overruled", where, sentence, remedy))
    if args.get("kv_cache_memory_bytes") and "gpu_memory_utilization" in args:
        where = "gpu_memory_utilization"
        sentence = f"{where} does not size the cache where kv_cache_memory_bytes is set."
        found.append(Finding("warning", "overruled", where, sentence, "Remove one of the two."))
    return found
