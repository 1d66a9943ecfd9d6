"""What of a GPU changes by itself, and which of its changes tell of trouble."""

from __future__ import annotations

import re
from collections.abc import Mapping

from raytest.fingerprint.gpu import VOLATILE_PREFIXES

GPU_KEY = re.compile(r"gpu\.(\d+)\.(.+)")
# Throttling that a healthy GPU shows neither idle nor busy.
FAULTY_THROTTLING = frozenset({"hw_slowdown", "hw_thermal", "hw_power_brake", "sw_thermal"})


def device_health(facts: Mapping[str, str]) -> dict[str, str]:
    """Of a fingerprint, the facts of GPUs that change from minute to minute (``gpu.<i>.<key>``):
    temperature, clocks, power, throttling, memory errors."""
    return {
        key: value
        for key, value in facts.items()
        if (match := GPU_KEY.match(key)) and match[2].startswith((*VOLATILE_PREFIXES, "ecc."))
    }


def faulty_throttling(reasons: str) -> list[str]:
    """Those of NVML's clock event reasons (comma-separated) that tell of a fault, sorted."""
    return sorted(FAULTY_THROTTLING.intersection(reasons.split(",")))


def worsened(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Before and after, by key: throttling that was not there, memory errors that came, rows that
    wait to be remapped."""
    found = {}
    for key, now in after.items():
        was = before.get(key, "")
        name = key.split(".", 2)[2]
        if name == "throttle_reasons":
            worse = bool(set(faulty_throttling(now)).difference(faulty_throttling(was)))
        elif name.startswith(("ecc.corrected", "ecc.uncorrected", "ecc.remapped")):
            worse = now.isdigit() and int(now) > int(was if was.isdigit() else now)
        else:
            worse = name == "ecc.remapping_pending" and now not in ("0", "False", was)
        if worse:
            found[key] = (was, now)
    return found
