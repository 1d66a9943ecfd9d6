"""GPUs as NVML sees them: no CUDA context is made, so nothing is taken from the engine.

NVML counts all GPUs of the node in PCI bus order, whatever ``CUDA_VISIBLE_DEVICES`` says. Every
query may be unsupported (by the board, a container, a virtual GPU, an old driver): its key is then
absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Keys that change while nothing is wrong: never a difference between environments.
VOLATILE_PREFIXES = (
    "temperature",
    "power.draw",
    "clocks.current.",
    "memory.used",
    "processes",
    "utilization",
    "throttle_reasons",
    "pcie.current.",
)

# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h (CUDA 13).
_THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}
_CLOCKS = {"graphics": 0, "sm": 1, "memory": 2}  # nvmlClockType_t
# nvmlGpuTopologyLevel_t, in the words of `nvidia-smi topo -m`.
_LEVELS = {0: "INTERNAL", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_MAX_NVLINKS = 36
_NVLINK_CAPABILITY = 2  # NVML_P2P_CAPS_INDEX_NVLINK


@contextmanager
def _nvml() -> Iterator[Any]:
    """The NVML module, initialised, or None where there is no library, driver or GPU."""
    try:
        import pynvml
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        _ask(pynvml, "nvmlShutdown")


def _ask(nvml: Any, function: str, *args: Any) -> Any:
    """What NVML answers, or None where it does not (or where its binding lacks the function)."""
    call = getattr(nvml, function, None)
    if call is None:
        return None
    try:
        answer = call(*args)
    # A binding newer than the driver's library: a missing symbol is an AttributeError.
    except (nvml.NVMLError, AttributeError, UnicodeDecodeError):
        return None
    return answer.decode("utf-8", "replace") if isinstance(answer, bytes) else answer


def gpus() -> list[dict[str, str]]:
    """Every GPU of this node, in NVML order; [] where NVML is absent.

    Clocks in MHz, power in watts, temperature in degrees Celsius, memory in bytes; ECC counts are
    since the driver was loaded (``ecc.*``) and over the board's life (``ecc.aggregate.*``).
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        node = {
            "driver": _ask(nvml, "nvmlSystemGetDriverVersion"),
            "cuda_driver": _cuda_version(_ask(nvml, "nvmlSystemGetCudaDriverVersion")),
        }
        found = []
        for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            if handle is None:  # fallen off the bus
                continue
            facts = {"index": index, **_identity(nvml, handle), **node, **_state(nvml, handle)}
            if facts["uuid"] is not None:
                found.append({k: str(v) for k, v in facts.items() if v is not None})
        return found


def _cuda_version(number: Any) -> str | None:
    return None if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _identity(nvml: Any, handle: Any) -> dict[str, Any]:
    """What stays for the board's life, or until somebody configures it anew."""

    def ask(function: str, *args: Any) -> Any:
        return _ask(nvml, function, handle, *args)

    limit = ask("nvmlDeviceGetEnforcedPowerLimit")
    capability = ask("nvmlDeviceGetCudaComputeCapability")
    return {
        "uuid": ask("nvmlDeviceGetUUID"),
        "name": ask("nvmlDeviceGetName"),
        "serial": ask("nvmlDeviceGetSerial"),
        "vbios": ask("nvmlDeviceGetVbiosVersion"),
        "pci.bus_id": _field(ask("nvmlDeviceGetPciInfo"), "busId"),
        "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
        "cores": ask("nvmlDeviceGetNumGpuCores"),
        "pcie.generation": ask("nvmlDeviceGetMaxPcieLinkGeneration"),
        "pcie.width": ask("nvmlDeviceGetMaxPcieLinkWidth"),
        "ecc.mode": _switch(ask("nvmlDeviceGetEccMode")),
        "mig.mode": _switch(ask("nvmlDeviceGetMigMode")),
        "persistence_mode": _switch(ask("nvmlDeviceGetPersistenceMode")),
        "compute_mode": ask("nvmlDeviceGetComputeMode"),
        "memory.total": _field(ask("nvmlDeviceGetMemoryInfo"), "total"),
        "power.limit": None if limit is None else f"{limit / 1000:g}",
        **{f"clocks.max.{n}": ask("nvmlDeviceGetMaxClockInfo", t) for n, t in _CLOCKS.items()},
        **{
            f"clocks.applications.{name}": ask("nvmlDeviceGetApplicationsClock", kind)
            for name, kind in _CLOCKS.items()
        },
        "nvlink.active": _active_nvlinks(ask),
    }


def _state(nvml: Any, handle: Any) -> dict[str, Any]:
    """What changes from minute to minute, and error counts."""

    def ask(function: str, *args: Any) -> Any:
        return _ask(nvml, function, handle, *args)

    draw = ask("nvmlDeviceGetPowerUsage")
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    if reasons is None:
        reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons")
    remapped = ask("nvmlDeviceGetRemappedRows")
    return {
        # nvmlMemoryErrorType_t 0 corrected, 1 uncorrected; nvmlEccCounterType_t 0 volatile,
        # 1 aggregate.
        "ecc.corrected": ask("nvmlDeviceGetTotalEccErrors", 0, 0),
        "ecc.uncorrected": ask("nvmlDeviceGetTotalEccErrors", 1, 0),
        "ecc.aggregate.corrected": ask("nvmlDeviceGetTotalEccErrors", 0, 1),
        "ecc.aggregate.uncorrected": ask("nvmlDeviceGetTotalEccErrors", 1, 1),
        "ecc.remapped_uncorrected": None if remapped is None else remapped[1],
        "ecc.remapping_pending": None if remapped is None else remapped[2],
        "pcie.current.generation": ask("nvmlDeviceGetCurrPcieLinkGeneration"),
        "pcie.current.width": ask("nvmlDeviceGetCurrPcieLinkWidth"),
        **{f"clocks.current.{n}": ask("nvmlDeviceGetClockInfo", t) for n, t in _CLOCKS.items()},
        "memory.used": _field(ask("nvmlDeviceGetMemoryInfo"), "used"),
        "power.draw": None if draw is None else f"{draw / 1000:g}",
        "temperature": ask("nvmlDeviceGetTemperature", 0),
        "throttle_reasons": None if reasons is None else throttle_names(reasons),
        "processes": _pids(ask("nvmlDeviceGetComputeRunningProcesses")),
    }


def throttle_names(mask: int) -> str:
    """The reasons in a bit mask, comma-separated; '' where clocks are free."""
    named = [name for bit, name in _THROTTLE_REASONS.items() if mask & bit]
    unknown = mask & ~sum(_THROTTLE_REASONS)
    return ",".join([*named, *([hex(unknown)] if unknown else [])])


def _switch(answer: Any) -> str | None:
    """'on' or 'off'; of a (current, pending) pair the current one, and what a reboot will
    bring."""
    if answer is None:
        return None
    if not isinstance(answer, (list, tuple)):
        return "on" if answer else "off"
    current, pending = ("on" if mode else "off" for mode in answer[:2])
    return current if current == pending else f"{current} ({pending} after a reset)"


def _field(answer: Any, name: str) -> Any:
    value = None if answer is None else getattr(answer, name, None)
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _pids(processes: Any) -> str | None:
    """Process ids in NVML's own namespace: inside a container they may be the host's."""
    return None if processes is None else ",".join(str(p) for p in sorted(q.pid for q in processes))


def _active_nvlinks(ask: Callable[..., Any]) -> int | None:
    states = [ask("nvmlDeviceGetNvLinkState", link) for link in range(_MAX_NVLINKS)]
    known = [s for s in states if s is not None]
    return sum(known) if known else None


def topology() -> dict[str, str]:
    """How each pair of GPUs is connected: ``0-1`` → ``PIX``, with ``+NVLINK`` where they have one.

    The words are those of ``nvidia-smi topo -m``. Tensor-parallel sums may depend on it.
    """
    with _nvml() as nvml:
        if nvml is None:
            return {}
        handles = {}
        for index in range(_ask(nvml, "nvmlDeviceGetCount") or 0):
            handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
            if handle is not None:
                handles[index] = handle
        pairs = {}
        for a, first in handles.items():
            for b, second in handles.items():
                if a < b:
                    pairs[f"{a}-{b}"] = _connection(nvml, first, second)
        return {pair: word for pair, word in pairs.items() if word}


def _connection(nvml: Any, first: Any, second: Any) -> str:
    level = _ask(nvml, "nvmlDeviceGetTopologyCommonAncestor", first, second)
    status = _ask(nvml, "nvmlDeviceGetP2PStatus", first, second, _NVLINK_CAPABILITY)
    words = [] if level is None else [_LEVELS.get(level, f"level {level}")]
    if status == 0:  # NVML_P2P_STATUS_OK
        words.append("NVLINK")
    return "+".join(words)
