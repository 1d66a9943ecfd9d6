"""What holds for every test: its layer's marker and time limit, the GPU rule, fixed randomness."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# The folder says the layer: run in this order, each test with so many seconds.
LAYERS = {"unit": 60, "integration": 300, "e2e": 600, "gpu": 900, "benchmarks": 900}

# No test downloads anything or reports its use anywhere: it fails at once instead of waiting.
os.environ.update(HF_HUB_OFFLINE="1", DO_NOT_TRACK="1", RAY_USAGE_STATS_ENABLED="0")

# Loaded machines miss deadlines; in CI the same examples every time, elsewhere new ones.
settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("developer", deadline=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "developer")


def layer_of(item: pytest.Item) -> str:
    here = Path(__file__).parent
    return item.path.relative_to(here).parts[0] if item.path.is_relative_to(here) else "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    known = list(LAYERS)
    for item in items:
        layer = layer_of(item)
        if layer not in LAYERS:
            raise pytest.UsageError(f"{item.nodeid}: tests live in one of {', '.join(known)}")
        if layer in ("integration", "e2e"):
            item.add_marker(layer)
        if layer == "gpu" and item.get_closest_marker("gpu") is None:
            item.add_marker("gpu")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LAYERS[layer]))
    items.sort(key=lambda item: known.index(layer_of(item)))


def count_gpus() -> int:
    """NVIDIA GPUs that a process started from here could use; 0 without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        count: int = pynvml.nvmlDeviceGetCount()
    finally:
        pynvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len([v for v in visible.split(",") if v]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    needed = marker.args[0] if marker.args else 1
    found = count_gpus()
    if found >= needed:
        return
    reason = f"needs {needed} NVIDIA GPU(s), found {found}"
    if os.environ.get("RAYTEST_REQUIRE_GPUS"):
        pytest.fail(f"{reason}, and RAYTEST_REQUIRE_GPUS is set", pytrace=False)
    pytest.skip(reason)
