"""Known variables and engine arguments: the one import for those who check or pin them.

vLLM ignores a variable that it does not know with a line in its log. A determinism test must not:
a setting that did nothing would be reported as one that changed nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from raytest.fingerprint.argument_checks import check_engine_args
from raytest.fingerprint.env_checks import check_env
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.knobs_data import BEHAVIOUR_CHANGES, PREFIXES, RELEVANT
from raytest.fingerprint.profiles import profile_engine_args, profile_env
from raytest.fingerprint.versions import parse_version

__all__ = [
    "PREFIXES",
    "RELEVANT",
    "behaviour_changes",
    "check_engine_args",
    "check_env",
    "is_relevant",
    "machine_defaults",
    "profile_engine_args",
    "profile_env",
]


# NVIDIA's images say in NCCL_VERSION what they hold; NCCL does not read it.
_NODE_LOCAL = ("NCCL_", "LD_PRELOAD")
_HARMLESS = ("NCCL_VERSION",)


def is_relevant(name: str) -> bool:
    """Whether determinism may depend on the variable ``name``."""
    return name.startswith(PREFIXES)


def behaviour_changes(one: str, other: str) -> list[str]:
    """What changed in vLLM between two versions that makes equal settings give different results.

    Sentences that begin with the version that brought the change, oldest first.
    """
    older, newer = sorted((parse_version(one), parse_version(other)))
    return [
        f"{version[0]}.{version[1]}: {what}"
        for version, what in BEHAVIOUR_CHANGES
        if older < version <= newer
    ]


def machine_defaults(env: Mapping[str, str]) -> list[Finding]:
    """What this machine would decide where ``env`` does not: a likely difference between nodes."""
    findings = []
    unset = {
        "OMP_NUM_THREADS": ("it follows the core count", 2),
        "PYTHONHASHSEED": ("it is random", 1),
    }
    for name, (why, level) in unset.items():
        if not env.get(name):
            sentence = f"{name} is unset: in each process {why}."
            remedy = f"Determinism level {level} and above sets it."
            findings.append(Finding("info", "unset-variable", name, sentence, remedy))
    if not env.get("CUDA_DEVICE_ORDER"):
        sentence = "CUDA_DEVICE_ORDER is unset: on nodes with mixed GPUs CUDA counts by speed."
        remedy = "Set CUDA_DEVICE_ORDER=PCI_BUS_ID on every node."
        findings.append(Finding("info", "unset-variable", "CUDA_DEVICE_ORDER", sentence, remedy))
    local = {n for n in env if n.startswith(_NODE_LOCAL) and env[n]}
    for name in sorted(local.difference(_HARMLESS)):
        sentence = f"{name} is set on this machine, and a spec that does not name it keeps it."
        remedy = "Set it on every node, or in the spec."
        findings.append(Finding("info", "node-local-variable", name, sentence, remedy))
    # A Kubernetes service called "vllm" puts its address into VLLM_PORT.
    if env.get("VLLM_PORT", "").startswith("tcp://"):
        sentence = "VLLM_PORT holds a Kubernetes service address, which vLLM cannot read."
        remedy = "Rename the service, or set enableServiceLinks: false."
        findings.append(Finding("error", "kubernetes-service", "VLLM_PORT", sentence, remedy))
    return findings
