"""What the operating system says about the node: kernel, processor, memory, container."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

_INSTRUCTION_SETS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def read_text(path: str) -> str:
    """A small file's text without surrounding blanks; '' where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def os_facts() -> dict[str, str]:
    """``os.*``: kernel, distribution, C library."""
    release = dict(
        line.split("=", 1) for line in read_text("/etc/os-release").splitlines() if "=" in line
    )
    libc = (os.confstr("CS_GNU_LIBC_VERSION") or "") if hasattr(os, "confstr") else ""
    return {
        "os.system": platform.system(),
        "os.kernel": platform.release(),
        "os.machine": platform.machine(),
        "os.distribution": release.get("PRETTY_NAME", "").strip('"'),
        "os.libc": libc,
        "os.hostname": socket.gethostname(),
    }


def cpu_facts() -> dict[str, str]:
    """``cpu.*``: model, cores, what decides which kernels a library picks."""
    fields: dict[str, str] = {}
    sockets = set()
    for line in read_text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            sockets.add(value.strip())
        fields.setdefault(key.strip(), value.strip())
    flags = sorted((fields.get("flags") or fields.get("Features") or "").split())
    numa = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    cpu = "/sys/devices/system/cpu"
    return {
        "cpu.model": fields.get("model name") or platform.processor(),
        "cpu.microcode": fields.get("microcode", ""),
        "cpu.count": str(os.cpu_count() or 0),
        "cpu.sockets": str(len(sockets) or 1),
        "cpu.numa_nodes": str(len(numa) or 1),
        "cpu.instruction_sets": ",".join(name for name in _INSTRUCTION_SETS if name in flags),
        "cpu.flags_digest": hashlib.sha256(" ".join(flags).encode()).hexdigest()[:16],
        "cpu.smt": read_text(f"{cpu}/smt/active"),
        "cpu.governor": read_text(f"{cpu}/cpu0/cpufreq/scaling_governor"),
    }


def launcher() -> str:
    """``uv run`` where that is an ancestor of this process, as Ray's own hook looks for it, else
    ''."""
    pid = os.getppid()
    while pid > 1:
        command = read_text(f"/proc/{pid}/cmdline").split("\0")
        if os.path.basename(command[0]) == "uv" and command[1:2] == ["run"]:
            return "uv run"
        # pid (name) state parent ...; the name may hold blanks and parentheses.
        after_name = read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        pid = int(after_name[1]) if len(after_name) > 1 else 0
    return ""


def memory_facts() -> dict[str, str]:
    """``memory.*`` in bytes; ``memory.shm_*`` is ``/dev/shm``, through which ranks talk."""
    facts = {}
    for line in read_text("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key in ("MemTotal", "MemAvailable", "SwapTotal"):
            name = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}[key]
            facts[f"memory.{name}"] = str(int(value.split()[0]) * 1024)
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return facts
    return {**facts, "memory.shm_total": str(usage.total), "memory.shm_free": str(usage.free)}


def container_facts() -> dict[str, str]:
    """``container.*``: kind, and the limits that its cgroup sets (version 2, then 1)."""
    cgroup = read_text("/proc/1/cgroup")
    kind = "none"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        kind = "kubernetes"
    elif os.path.exists("/.dockerenv") or "docker" in cgroup:
        kind = "docker"
    elif os.path.exists("/run/.containerenv") or "libpod" in cgroup:
        kind = "podman"
    elif "SINGULARITY_CONTAINER" in os.environ or "APPTAINER_CONTAINER" in os.environ:
        kind = "apptainer"
    root = "/sys/fs/cgroup"
    quota = read_text(f"{root}/cpu/cpu.cfs_quota_us")
    period = read_text(f"{root}/cpu/cpu.cfs_period_us")
    cpu_limit = read_text(f"{root}/cpu.max") or (quota and f"{quota} {period}")
    memory_limit = read_text(f"{root}/memory.max") or read_text(
        f"{root}/memory/memory.limit_in_bytes"
    )
    return {
        "container.kind": kind,
        "container.cpu_limit": cpu_limit,
        "container.memory_limit": memory_limit,
        **_image_facts(read_text("/run/.containerenv"), read_text("/proc/self/mountinfo")),
    }


# Docker and containerd mount files of the container's own folder, whose name is its id.
_CONTAINER_ID = re.compile(r"/(?:containers|sandboxes|overlay-containers)/([0-9a-f]{64})/")


def _image_facts(containerenv: str, mountinfo: str) -> dict[str, str]:
    """The container's id, and the image it was made from where that can be known from inside:
    podman writes it down, apptainer names its file, others are told by ``RAYTEST_IMAGE``."""
    written = dict(re.findall(r'^(id|image|imageid)="([^"]*)"$', containerenv, re.MULTILINE))
    mounted = _CONTAINER_ID.search(mountinfo)
    told = ("RAYTEST_IMAGE", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
    found = {
        "container.id": written.get("id") or (mounted[1] if mounted else ""),
        "container.image": written.get("image")
        or next((os.environ[n] for n in told if os.environ.get(n)), ""),
        "container.image_id": written.get("imageid", ""),
    }
    return {key: value for key, value in found.items() if value}


def path_facts(paths: Iterable[str]) -> dict[str, str]:
    """``path.<path>.exists`` (yes or no), and the free bytes of its file system in
    ``path.<path>.free``, asked of the nearest folder that exists."""
    facts = {}
    for path in paths:
        facts[f"path.{path}.exists"] = "yes" if os.path.exists(path) else "no"
        nearest = Path(path).absolute()
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        try:
            facts[f"path.{path}.free"] = str(shutil.disk_usage(nearest).free)
        except OSError:
            continue
    return facts
