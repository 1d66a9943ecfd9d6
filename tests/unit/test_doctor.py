"""What would make a run fail or results differ is found on the node that has it, and only there."""

from __future__ import annotations

from pathlib import Path

import pytest

from raytest.doctor import diagnose, model_default_findings
from raytest.fingerprint.capture import capture
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.host import path_facts
from raytest.fingerprint.model import generation_defaults

GIB = 1 << 30
HEALTHY = {
    "torch.version": "2.13.0+cu130",
    "package.torchvision": "0.28.0+cu130",
    "vllm.version": "0.32.0",
    "ray.version": "2.60.0",
    "python.version": "3.11.7",
    "memory.shm_total": str(64 * GIB),
    "process.limit.open_files": "65536",
    "path./models/x.exists": "yes",
    "path./results.free": str(100 * GIB),
    "env.OMP_NUM_THREADS": "1",
    "env.PYTHONHASHSEED": "0",
    "env.CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "gpu.count": "2",
}
GPU = {
    "name": "NVIDIA H200",
    "driver": "595.71.05",
    "ecc.mode": "on",
    "ecc.uncorrected": "0",
    "ecc.remapping_pending": "0",
    "mig.mode": "off",
    "throttle_reasons": "idle",
    "processes": "",
    "pcie.width": "16",
    "pcie.current.width": "16",
}


def node(**changes: str | None) -> dict[str, str]:
    facts: dict[str, str | None] = {**HEALTHY}
    for index in (0, 1):
        facts.update({f"gpu.{index}.{key}": value for key, value in GPU.items()})
        facts[f"gpu.{index}.uuid"] = f"GPU-{index}"
    facts.update(changes)
    return {k: v for k, v in facts.items() if v is not None}


def found(**changes: str | None) -> list[Finding]:
    return diagnose({"n1": node(**changes)}, model_path="/models/x")


def test_a_healthy_node_has_no_findings() -> None:
    assert found() == []


def test_nodes_that_are_equal_have_no_findings() -> None:
    assert diagnose({"n1": node(), "n2": node(), "n3": node()}) == []


@pytest.mark.parametrize(
    ("key", "value", "severity", "code"),
    [
        ("torch.version", "2.13.0+cpu", "error", "cpu-torch"),
        ("package.torchvision", "0.28.0+cpu", "error", "torchvision-build"),
        ("vllm.version", None, "warning", "no-vllm"),
        ("memory.shm_total", str(64 << 20), "error", "shared-memory"),
        ("memory.shm_total", str(2 * GIB), "warning", "shared-memory"),
        ("process.limit.open_files", "1024", "warning", "few-open-files"),
        ("path./models/x.exists", "no", "error", "missing-model"),
        ("path./results.free", str(5 * GIB), "warning", "disk-space"),
        ("path./results.free", str(GIB // 2), "error", "disk-space"),
        ("env.OMP_NUM_THREADS", None, "info", "unset-variable"),
        ("env.VLLM_ATTENTION_BACKEND", "FLASH_ATTN", "warning", "removed-variable"),
        ("env.VLLM_BATCH_INVARIENT", "1", "warning", "unknown-variable"),
        ("env.NCCL_ALGO", "Ring", "info", "node-local-variable"),
        ("env.RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1", "error", "gpus-not-confined"),
        ("process.launcher", "uv run", "warning", "uv-run"),
        ("capture.failed.cpu", "OSError", "warning", "unread-facts"),
    ],
)
def test_a_fault_of_a_node_is_found_and_named(
    key: str, value: str | None, severity: str, code: str
) -> None:
    matching = [f for f in found(**{key: value}) if f.code == code]
    assert len(matching) == 1
    assert matching[0].severity == severity
    assert matching[0].where.startswith("n1")


@pytest.mark.parametrize(
    ("key", "value", "severity", "code"),
    [
        ("processes", "4711", "warning", "gpu-in-use"),
        ("mig.mode", "on", "error", "mig"),
        ("ecc.uncorrected", "3", "error", "ecc-uncorrected"),
        ("ecc.remapping_pending", "1", "error", "ecc-remapping"),
        ("throttle_reasons", "idle,hw_thermal", "warning", "throttling"),
        ("pcie.current.width", "8", "warning", "pcie-width"),
    ],
)
def test_a_fault_of_a_gpu_names_the_gpu_and_no_other(
    key: str, value: str, severity: str, code: str
) -> None:
    only = found(**{f"gpu.1.{key}": value})
    assert [(f.severity, f.code, f.where) for f in only] == [(severity, code, "n1, GPU 1 (GPU-1)")]


def test_ecc_that_is_off_everywhere_is_named_on_every_gpu() -> None:
    off = found(**{"gpu.0.ecc.mode": "off", "gpu.1.ecc.mode": "off"})
    assert {f.where for f in off if f.code == "ecc-off"} == {
        "n1, GPU 0 (GPU-0)",
        "n1, GPU 1 (GPU-1)",
    }


def test_a_gpu_that_is_held_down_by_its_power_limit_is_healthy() -> None:
    assert found(**{"gpu.0.throttle_reasons": "sw_power_cap,applications_clocks"}) == []


def test_a_cpu_torch_on_a_node_without_gpus_is_right() -> None:
    facts = {k: v for k, v in node().items() if not k.startswith("gpu.")}
    facts.update({"torch.version": "2.13.0+cpu", "package.torchvision": "0.28.0+cpu"})
    assert diagnose({"n1": facts}) == []
    facts["package.torchvision"] = "0.28.0"
    assert [f.code for f in diagnose({"n1": facts})] == ["torchvision-build"]


@pytest.mark.parametrize(
    ("key", "severity"),
    [
        ("ray.version", "error"),
        ("python.version", "error"),
        ("vllm.version", "error"),
        ("torch.files_digest", "error"),
        ("package.transformers", "error"),
        ("package.numpy", "warning"),
        ("env.NCCL_PROTO", "warning"),
        ("model.weights", "error"),
    ],
)
def test_nodes_that_disagree_are_named_with_what_each_has(key: str, severity: str) -> None:
    nodes = {"n1": node(**{key: "1.0"}), "n2": node(**{key: "2.0"}), "n3": node(**{key: "1.0"})}
    mixed = [f for f in diagnose(nodes) if f.code == "mixed-nodes"]
    assert [(f.severity, f.where) for f in mixed] == [(severity, key)]
    assert mixed[0].sentence == f"{key} is 1.0 on n1, n3; 2.0 on n2."


def test_a_variable_that_one_node_lacks_is_a_disagreement() -> None:
    nodes = {"n1": node(), "n2": node(**{"env.NCCL_PROTO": "Simple"})}
    mixed = [f for f in diagnose(nodes) if f.code == "mixed-nodes"]
    assert mixed[0].sentence == "env.NCCL_PROTO is (unset) on n1; Simple on n2."


def test_what_ray_sets_for_each_worker_is_no_disagreement() -> None:
    nodes = {
        "n1": node(**{"env.RAY_JOB_ID": "1", "env.CUDA_VISIBLE_DEVICES": "0"}),
        "n2": node(**{"env.RAY_JOB_ID": "2", "env.CUDA_VISIBLE_DEVICES": "1"}),
    }
    assert diagnose(nodes) == []


def test_two_kinds_of_gpu_are_named_by_place() -> None:
    mixed = found(**{"gpu.1.name": "NVIDIA H100"})
    assert [f.where for f in mixed] == ["gpu.name"]
    assert "NVIDIA H100 on n1 GPU 1" in mixed[0].sentence


def test_two_drivers_are_an_error_and_two_power_limits_a_warning() -> None:
    drivers = found(**{"gpu.1.driver": "580.0"})
    assert [(f.severity, f.where) for f in drivers] == [("error", "gpu.driver")]
    limits = found(**{"gpu.0.power.limit": "700", "gpu.1.power.limit": "500"})
    assert [(f.severity, f.where) for f in limits] == [("warning", "gpu.power.limit")]


@pytest.mark.parametrize("off", ["0", "false"])
def test_uv_run_is_right_where_its_hook_is_off(off: str) -> None:
    facts = {"process.launcher": "uv run", "env.RAY_ENABLE_UV_RUN_RUNTIME_ENV": off}
    assert found(**facts) == []


def test_a_large_fleet_is_summed_up() -> None:
    nodes = {f"n{i:03}": node() for i in range(100)}
    nodes["n007"] = node(**{"vllm.version": "0.31.0"})
    mixed = diagnose(nodes)
    assert len(mixed) == 1
    assert "and 94 more" in mixed[0].sentence
    assert mixed[0].sentence.endswith("0.31.0 on n007.")


def test_errors_come_first() -> None:
    changes = {"gpu.0.processes": "1", "gpu.1.mig.mode": "on", "env.PYTHONHASHSEED": None}
    severities = [f.severity for f in found(**changes)]
    assert severities == ["error", "warning", "info"]


def test_a_value_that_was_hidden_is_not_judged() -> None:
    assert found(**{"env.VLLM_API_KEY": "<redacted>"}) == []


def test_the_real_facts_of_this_machine_are_understood() -> None:
    facts = {**capture("doctor", all_gpus=True), **path_facts(["/", "/no/such/folder"])}
    for finding in diagnose({"here": facts}, model_path="/no/such/folder"):
        assert finding.sentence
        assert finding.where
    missing = [f for f in diagnose({"here": facts}, "/no/such/folder") if f.code == "missing-model"]
    assert len(missing) == 1
    free = [int(facts[f"path.{p}.free"]) for p in ("/no/such/folder", "/")]
    assert abs(free[0] - free[1]) < GIB  # one file system, asked twice


def test_what_the_model_would_fill_in_is_shown(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        '{"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "do_sample": true}'
    )
    defaults, stops = model_default_findings(generation_defaults(tmp_path))
    assert (defaults.code, defaults.severity) == ("model-defaults", "info")
    assert "temperature 0.6, top_k 20:" in defaults.sentence
    assert "tokens 1, 2" in stops.sentence


@pytest.mark.parametrize("text", [None, "", "[]", "{}", '{"eos_token_id": 2}'])
def test_a_model_without_defaults_is_no_finding(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "generation_config.json").write_text(text)
    assert model_default_findings(generation_defaults(tmp_path)) == []


def test_a_clock_that_is_off_is_named_with_its_direction() -> None:
    (ahead,) = found(**{"process.clock_skew": "12.000"})
    assert (ahead.code, ahead.severity) == ("clock-skew", "warning")
    assert "12.0 s ahead of ours" in ahead.sentence
    assert "behind" in found(**{"process.clock_skew": "-2"})[0].sentence
    assert found(**{"process.clock_skew": "0.3"}) == []
