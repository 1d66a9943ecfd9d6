"""What differs between two fingerprints, the most telling first, noise apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raytest.fingerprint.gpu import VOLATILE_PREFIXES


class Group(StrEnum):
    """Groups of keys, in the order in which they usually explain a divergence."""

    VARIABLES = "variables"
    THREADS = "threads"
    SETTINGS = "engine settings"
    SEEDS = "seeds"
    MODEL = "model"
    VERSIONS = "versions"
    GPU = "gpu"
    HEALTH = "gpu health"
    PACKAGES = "packages"
    NODE = "node"
    UNREAD = "could not be read"
    NAMES = "names and places"
    NOISE = "noise"


@dataclass(frozen=True, slots=True)
class Difference:
    """One key with its two values; None where a side does not have it."""

    group: Group
    key: str
    a: str | None
    b: str | None


# First match wins: exceptions before the groups that they are taken from.
_NOISE = re.compile(
    r"process\.(pid|parent_pid|captured_at|stage|nice|clock_skew)$|container\.id$"
    r"|memory\.(available|shm_free)$"
    r"|env\.(RAY_(JOB_ID|RAYLET_PID|WORKER_\w+|SESSION\w*|NODE_ID|CLUSTER_ID|RUNTIME_ENV\w*"
    r"|CLIENT_MODE|JOB_CONFIG\w*|GCS_\w+)|VLLM_(PORT|HOST_IP|DP_\w+|LOOPBACK_IP|INSTANCE_ID|DIST_IDENT"
    r"|OBJECT_STORAGE_SHM_BUFFER_NAME))$"
)
_NAMES = re.compile(
    r"os\.hostname$|process\.|python\.executable$|device\.uuid$|effective\.rank$|model\.path$"
    r"|gpu\[\d+\]\.(index|uuid|serial|pci\.bus_id)$|threads\.affinity$|disk\.|path\."
    r"|env\.(CUDA_VISIBLE_DEVICES|NVIDIA_VISIBLE_DEVICES|RAY_ADDRESS|RAY_TMPDIR)$"
)
_PATTERNS: tuple[tuple[re.Pattern[str], Group], ...] = (
    (_NOISE, Group.NOISE),
    (_NAMES, Group.NAMES),
    (re.compile(r"capture\.failed\."), Group.UNREAD),
    (re.compile(r"env\.|vllm\.envs\."), Group.VARIABLES),
    (re.compile(r"threads\."), Group.THREADS),
    (re.compile(r"effective\.|torch\.(cudnn\.\w+|default_dtype|deterministic|float32)"
                r"|cuda\.initialized"), Group.SETTINGS),
    (re.compile(r"seed\."), Group.SEEDS),
    (re.compile(r"model\.|tokenizer\."), Group.MODEL),
    (re.compile(r"(torch|vllm|cuda|triton|flash_attn|flashinfer|ray|python|library)\."
                r"|gpu\[\d+\]\.(driver|cuda_driver)$"), Group.VERSIONS),
    (re.compile(r"gpu\[\d+\]\.ecc\.(?!mode)"), Group.HEALTH),
    (re.compile(r"gpu\[|gpu\.|device\."), Group.GPU),
    (re.compile(r"package\.|source\."), Group.PACKAGES),
)  # fmt: skip

_GPU_KEY = re.compile(r"gpu\.(\d+)\.(.+)")
_PAIR_KEY = re.compile(r"gpu\.topology\.(\d+)-(\d+)")
_POSITION = re.compile(r"gpu\[\d+\]\.")


def group_of(key: str) -> Group:
    """The group of a key, as a fingerprint has it or as :func:`by_position` renames it."""
    key = _GPU_KEY.sub(r"gpu[\1].\2", key)
    match = _POSITION.match(key)
    if match and key[match.end() :].startswith(VOLATILE_PREFIXES):
        return Group.NOISE
    return next((group for pattern, group in _PATTERNS if pattern.match(key)), Group.NODE)


def by_position(facts: Mapping[str, str]) -> dict[str, str]:
    """GPUs numbered by their place among those that the process sees: ``gpu[0].name``.

    Two processes on GPU 3 and GPU 5 of their nodes are compared as first with first.
    """
    # most keys are not a GPU's, and a fleet has a million of them
    own_keys = {k: v for k, v in facts.items() if k.startswith("gpu.")}
    if not own_keys:
        return dict(facts)
    indices = sorted({int(m[1]) for k in own_keys if (m := _GPU_KEY.match(k))})
    place = {index: i for i, index in enumerate(indices)}
    renamed = {k: v for k, v in facts.items() if k not in own_keys}
    for key, value in own_keys.items():
        own, pair = _GPU_KEY.match(key), _PAIR_KEY.match(key)
        if own:
            key = f"gpu[{place[int(own[1])]}].{own[2]}"
        elif pair and int(pair[1]) in place and int(pair[2]) in place:
            key = f"gpu.topology[{place[int(pair[1])]}-{place[int(pair[2])]}]"
        renamed[key] = value
    return renamed


def diff(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """Every key whose values differ, grouped, groups in the order of :class:`Group`.

    A key that one side lacks is a difference: an unset variable is not an empty one.
    """
    left, right = by_position(a), by_position(b)
    order = list(Group)
    found = [
        Difference(group_of(key), key, left.get(key), right.get(key))
        for key in left.keys() | right.keys()
        if left.get(key) != right.get(key)
    ]
    return sorted(found, key=lambda d: (order.index(d.group), d.key))


def significant(differences: Sequence[Difference]) -> list[Difference]:
    """Without names and noise: what may explain a divergence."""
    return [d for d in differences if d.group not in (Group.NAMES, Group.NOISE)]


def rows(differences: Sequence[Difference]) -> list[tuple[str, str, str, str]]:
    """Group, key, both values, for a table; the group only where it begins, ``(unset)`` for
    None."""
    table, last = [], None
    for d in differences:
        group = "" if d.group is last else str(d.group)
        shown = ["(unset)" if v is None else v or "(empty)" for v in (d.a, d.b)]
        table.append((group, d.key, shown[0], shown[1]))
        last = d.group
    return table
