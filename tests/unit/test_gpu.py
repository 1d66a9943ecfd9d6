"""GPUs as NVML reports them, through a stand-in module: boards, drivers and containers differ in
what they answer."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raytest.fingerprint import gpu

UUIDS = ("GPU-11111111-aaaa-bbbb-cccc-000000000000", "GPU-22222222-aaaa-bbbb-cccc-000000000001")


class NVMLError(Exception):
    pass


def fake_nvml(**answers: Any) -> ModuleType:
    """A pynvml with two GPUs; what is not in ``answers`` is unsupported."""
    module = ModuleType("pynvml")
    table: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetUUID": lambda handle: UUIDS[handle],
        **answers,
    }

    def lookup(name: str) -> Any:
        def unsupported(*args: Any) -> Any:
            raise NVMLError("not supported")

        if not name.startswith("nvml"):
            raise AttributeError(name)
        return table.get(name, unsupported)

    module.NVMLError = NVMLError  # type: ignore[attr-defined]
    module.__getattr__ = lookup  # type: ignore[method-assign]
    return module


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**answers: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(**answers))

    return install


def test_a_machine_without_the_driver_has_no_gpus(use: Any) -> None:
    def absent() -> None:
        raise NVMLError("library not found")

    use(nvmlInit=absent)
    assert gpu.gpus() == []
    assert gpu.topology() == {}


def test_an_environment_without_the_binding_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu.gpus() == []


def test_what_a_board_does_not_support_is_absent_and_not_made_up(use: Any) -> None:
    use()
    assert gpu.gpus() == [{"index": "0", "uuid": UUIDS[0]}, {"index": "1", "uuid": UUIDS[1]}]


def test_a_gpu_that_fell_off_the_bus_is_left_out_and_keeps_its_index_free(use: Any) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise NVMLError("GPU is lost")
        return index

    use(nvmlDeviceGetHandleByIndex=handle)
    assert [g["index"] for g in gpu.gpus()] == ["1"]


def test_values_come_in_plain_units(use: Any) -> None:
    use(
        nvmlSystemGetDriverVersion=lambda: "595.71.05",
        nvmlSystemGetCudaDriverVersion=lambda: 13020,
        nvmlDeviceGetName=lambda h: b"NVIDIA H200",
        nvmlDeviceGetSerial=lambda h: "165",
        nvmlDeviceGetVbiosVersion=lambda h: "96.00.A5",
        nvmlDeviceGetCudaComputeCapability=lambda h: (9, 0),
        nvmlDeviceGetPciInfo=lambda h: SimpleNamespace(busId=b"0000:1B:00.0"),
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=150754820096, used=1 << 20),
        nvmlDeviceGetEnforcedPowerLimit=lambda h: 700_000,
        nvmlDeviceGetPowerUsage=lambda h: 75_500,
        nvmlDeviceGetTemperature=lambda h, sensor: 31,
        nvmlDeviceGetMaxPcieLinkGeneration=lambda h: 5,
        nvmlDeviceGetMaxPcieLinkWidth=lambda h: 16,
        nvmlDeviceGetClockInfo=lambda h, kind: {0: 345, 1: 345, 2: 3201}[kind],
        nvmlDeviceGetMaxClockInfo=lambda h, kind: {0: 1980, 1: 1980, 2: 3201}[kind],
    )
    found = gpu.gpus()[0]
    expected = {
        "driver": "595.71.05",
        "cuda_driver": "13.2",
        "name": "NVIDIA H200",
        "compute_capability": "9.0",
        "pci.bus_id": "0000:1B:00.0",
        "memory.total": "150754820096",
        "power.limit": "700",
        "power.draw": "75.5",
        "temperature": "31",
        "pcie.generation": "5",
        "pcie.width": "16",
        "clocks.current.memory": "3201",
        "clocks.max.sm": "1980",
    }
    assert {key: found[key] for key in expected} == expected


def test_error_counts_tell_corrected_from_uncorrected_and_now_from_ever(use: Any) -> None:
    use(
        nvmlDeviceGetTotalEccErrors=lambda h, error, counter: 10 * error + counter,
        nvmlDeviceGetRemappedRows=lambda h: (3, 2, 1, 0),
    )
    found = gpu.gpus()[0]
    assert found["ecc.corrected"] == "0"
    assert found["ecc.uncorrected"] == "10"
    assert found["ecc.aggregate.corrected"] == "1"
    assert found["ecc.aggregate.uncorrected"] == "11"
    assert found["ecc.remapped_uncorrected"] == "2"
    assert found["ecc.remapping_pending"] == "1"


@pytest.mark.parametrize(
    ("pair", "expected"),
    [([1, 1], "on"), ([0, 0], "off"), ([0, 1], "off (on after a reset)")],
)
def test_a_mode_that_waits_for_a_reset_says_so(use: Any, pair: list[int], expected: str) -> None:
    use(nvmlDeviceGetMigMode=lambda h: pair, nvmlDeviceGetEccMode=lambda h: pair)
    assert gpu.gpus()[0]["mig.mode"] == expected
    assert gpu.gpus()[0]["ecc.mode"] == expected


def test_processes_are_pids_in_order_and_none_is_an_empty_list(use: Any) -> None:
    running = {0: [SimpleNamespace(pid=31), SimpleNamespace(pid=4)], 1: []}
    use(nvmlDeviceGetComputeRunningProcesses=lambda h: running[h])
    assert [g["processes"] for g in gpu.gpus()] == ["4,31", ""]


def test_an_older_driver_answers_for_throttling_under_its_old_name(use: Any) -> None:
    use(nvmlDeviceGetCurrentClocksThrottleReasons=lambda h: 0x44)
    assert gpu.gpus()[0]["throttle_reasons"] == "sw_power_cap,hw_thermal"


@pytest.mark.parametrize(
    ("mask", "expected"),
    [(0, ""), (1, "idle"), (0x60, "sw_thermal,hw_thermal"), (1 << 20, "0x100000")],
)
def test_throttle_reasons_are_words_and_unknown_bits_are_kept(mask: int, expected: str) -> None:
    assert gpu.throttle_names(mask) == expected


def test_links_are_counted_where_the_board_has_any(use: Any) -> None:
    def state(handle: int, link: int) -> int:
        if link >= 4 or handle == 1:
            raise NVMLError("no such link")
        return int(link != 2)

    use(nvmlDeviceGetNvLinkState=state)
    first, second = gpu.gpus()
    assert first["nvlink.active"] == "3"
    assert "nvlink.active" not in second


def test_topology_uses_the_words_of_nvidia_smi(use: Any) -> None:
    use(
        nvmlDeviceGetTopologyCommonAncestor=lambda a, b: 50,
        nvmlDeviceGetP2PStatus=lambda a, b, capability: 0 if capability == 2 else 1,
    )
    assert gpu.topology() == {"0-1": "SYS+NVLINK"}


def test_a_pair_that_nothing_is_known_about_is_left_out(use: Any) -> None:
    use()
    assert gpu.topology() == {}


def test_nvml_is_closed_again_also_when_a_query_is_unsupported(use: Any) -> None:
    closed: list[int] = []
    use(nvmlShutdown=lambda: closed.append(1))
    gpu.gpus()
    gpu.topology()
    assert closed == [1, 1]


def test_what_changes_by_itself_is_marked_as_volatile_and_identity_is_not() -> None:
    for key in ("temperature", "power.draw", "clocks.current.sm", "processes", "memory.used"):
        assert key.startswith(gpu.VOLATILE_PREFIXES)
    for key in ("uuid", "driver", "vbios", "clocks.max.sm", "power.limit", "ecc.uncorrected"):
        assert not key.startswith(gpu.VOLATILE_PREFIXES)


def test_the_constants_are_those_of_the_installed_binding() -> None:
    import pynvml

    assert pynvml.NVML_P2P_CAPS_INDEX_NVLINK == gpu._NVLINK_CAPABILITY
    assert pynvml.NVML_NVLINK_MAX_LINKS <= gpu._MAX_NVLINKS
    assert {pynvml.NVML_TOPOLOGY_SINGLE: "PIX", pynvml.NVML_TOPOLOGY_SYSTEM: "SYS"}.items() <= (
        gpu._LEVELS.items()
    )
    assert gpu._THROTTLE_REASONS[pynvml.nvmlClocksEventReasonSwThermalSlowdown] == "sw_thermal"
    assert gpu._THROTTLE_REASONS[pynvml.nvmlClocksThrottleReasonHwSlowdown] == "hw_slowdown"
    assert gpu._CLOCKS["memory"] == pynvml.NVML_CLOCK_MEM
