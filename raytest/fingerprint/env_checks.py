"""Checks variables against what a version of vLLM, and its libraries, really read."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from raytest.fingerprint import vllm_history, vllm_source
from raytest.fingerprint.finding import Finding, Severity
from raytest.fingerprint.knobs_data import (
    BOOLEAN,
    LIBRARY_VARIABLES,
    PLUGIN_PREFIXES,
    PREFIXES,
    RELEVANT,
    REMOVED_VARIABLES,
    REWRITTEN_WHEN_BATCH_INVARIANT,
    SET_BY_OTHERS,
    VARIABLES,
    Knob,
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

_KNOBS = {k.name: k for k in (*VARIABLES, *LIBRARY_VARIABLES)}


def check_env(env: Mapping[str, str], vllm_version: str, platform: str) -> list[Finding]:
    """What is wrong with variables that somebody sets for an engine.

    ``vllm_version`` may be '' (the newest known is meant), ``platform`` is ``cuda`` or ``cpu``.
    """
    version = parse_version(vllm_version)
    known = _known_variables(version)
    invariant = env.get("VLLM_BATCH_INVARIANT") == "1"
    findings = []
    for name, value in env.items():
        if name.startswith("VLLM_") and name not in known:
            findings.append(_unknown_variable(name, version, known))
            continue
        findings += [*_check_value(name, value, version), *_check_special(name, value)]
        findings += _check_platform(_KNOBS.get(name), platform)
        if name not in known and not name.startswith(PREFIXES):
            findings += _near_miss(name)
        if invariant and name.startswith(REWRITTEN_WHEN_BATCH_INVARIANT):
            findings.append(_rewritten(name))
    return findings


def _known_variables(version: Version) -> frozenset[str]:
    """What that vLLM reads: its own list where it is the installed one, else the history's."""
    listed = vllm_history.known("variables", version)
    if is_installed(version):
        listed = vllm_source.environment_variables() or listed
    return listed | vllm_history.known("unlisted_variables", version) | SET_BY_OTHERS


def _unknown_variable(name: str, version: Version, known: frozenset[str]) -> Finding:
    ignored = f"vLLM {dotted(version)} ignores {name}"
    when = when_known("variables", name, version)
    if name in REMOVED_VARIABLES and not when.startswith("it came"):
        sentence = f"{ignored}: {when or f'it was gone before {dotted(_oldest())}'}."
        remedy = use(REMOVED_VARIABLES[name])
        return Finding("error", "removed-variable", name, sentence, remedy)
    if when:
        code = "future-variable" if when.startswith("it came") else "removed-variable"
        newer = " or use a newer vLLM." if code == "future-variable" else "."
        return Finding("error", code, name, f"{ignored}: {when}.", f"Remove it{newer}")
    if name.startswith(PLUGIN_PREFIXES):
        sentence = f"{name} belongs to a plugin: whether it is read cannot be checked."
        return Finding("info", "plugin-variable", name, sentence, "")
    remedy = closest(name, known) or "Remove it: vLLM reads no variable of a similar name."
    severity: Severity = "error" if is_certain(version) else "warning"
    sentence = f"vLLM {dotted(version)} knows no variable {name}."
    if severity == "warning":
        nearest = dotted(min(max(version, _oldest()), vllm_history.covered()[1]))
        sentence = f"vLLM {nearest} knows no variable {name}; {dotted(version)} may."
    return Finding(severity, "unknown-variable", name, sentence, remedy)


def _oldest() -> Version:
    return vllm_history.covered()[0]


def _check_value(name: str, value: str, version: Version) -> list[Finding]:
    knob = _KNOBS.get(name)
    values = knob.values if knob is not None else ()
    if not values and is_installed(version):
        values = vllm_source.accepted_values().get(name, ())
    # vLLM reads its switches with int(): any number will do, and "true" is refused.
    number = values == BOOLEAN and value.strip().lstrip("-").isdecimal()
    if not values or number or value.lower() in {v.lower() for v in values}:
        return []
    note = f" ({knob.note})" if knob is not None else ""
    accepted = ", ".join(repr(v) for v in values)
    remedy = f"It takes one of {accepted}."
    return [Finding("error", "bad-value", name, f"{name} is {value!r}{note}.", remedy)]


def _check_platform(knob: Knob | None, platform: str) -> list[Finding]:
    if knob is None or knob.platform in ("", platform):
        return []
    sentence = f"{knob.name} has no effect on the {platform} platform."
    return [Finding("warning", "other-platform", knob.name, sentence, "Remove it.")]


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
