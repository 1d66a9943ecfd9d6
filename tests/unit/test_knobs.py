"""A setting that vLLM would ignore is refused, and the message says what would be right."""

from __future__ import annotations

from typing import Any

import pytest

from raytest.fingerprint import knobs, vllm_history, vllm_source
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.knobs import (
    check_engine_args,
    check_env,
    machine_defaults,
    profile_engine_args,
    profile_env,
)
from raytest.fingerprint.knobs_data import (
    ARGUMENT_VALUES,
    BACKEND_ALIASES,
    DEAD_ARGUMENTS,
    REMOVED_ARGUMENTS,
    REMOVED_VARIABLES,
    RESERVED_ARGUMENTS,
    SAMPLING_ARGUMENTS,
    VARIABLES,
)
from raytest.seeding import level_env

VERSIONS = ("0.24.0", "0.26.0", "0.32.0", "0.33.0")
FIELDS_032 = frozenset(
    {
        "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enforce_eager",
        "generation_config", "logprobs_mode", "kv_cache_memory_bytes", "attention_backend",
        "attention_config", "enable_flashinfer_autotune", "disable_custom_all_reduce",
        "linear_backend", "enable_trace_replay", "compilation_config",
    }
)  # fmt: skip


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a laptop: nothing is known but what raytest ships."""
    for name in ("environment_variables", "engine_arguments", "attention_backends"):
        monkeypatch.setattr(vllm_source, name, lambda: frozenset())
    monkeypatch.setattr(vllm_source, "installed_version", lambda: "")


def errors(findings: list[Finding]) -> list[Finding]:
    return [f for f in findings if f.severity == "error"]


def only(findings: list[Finding]) -> Finding:
    assert len(findings) == 1, findings
    return findings[0]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.usefixtures("no_vllm")
def test_the_old_variable_for_the_attention_backend_is_refused_naming_the_argument(
    version: str,
) -> None:
    found = only(check_env({"VLLM_ATTENTION_BACKEND": "FLASH_ATTN"}, version, "cuda"))
    assert (found.severity, found.code) == ("error", "removed-variable")
    assert "attention_backend" in found.remedy
    assert version[:4] in found.sentence


@pytest.mark.usefixtures("no_vllm")
def test_a_misspelt_variable_names_the_closest_right_one() -> None:
    found = only(check_env({"VLLM_BATCH_INVARIENT": "1"}, "0.32.0", "cuda"))
    assert found.severity == "error"
    assert found.remedy == "Did you mean VLLM_BATCH_INVARIANT?"


@pytest.mark.usefixtures("no_vllm")
def test_a_variable_that_does_not_begin_like_vllms_may_still_be_a_slip() -> None:
    found = only(check_env({"VLM_BATCH_INVARIANT": "1"}, "0.32.0", "cuda"))
    assert (found.severity, found.remedy) == ("warning", "Did you mean VLLM_BATCH_INVARIANT?")
    assert check_env({"MY_OWN_SETTING": "1"}, "0.32.0", "cuda") == []


@pytest.mark.usefixtures("no_vllm")
def test_a_variable_of_a_later_version_says_when_it_came() -> None:
    name = "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR"
    assert check_env({name: "/x"}, "0.22.0", "cuda") == []
    found = only(check_env({name: "/x"}, "0.21.0", "cuda"))
    assert found.code == "future-variable"
    assert "0.22" in found.sentence


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0", vllm_source.installed_version()])
def test_a_variable_that_vllm_reads_without_listing_it_is_known(version: str) -> None:
    assert check_env({"VLLM_CPU_SIM_MULTI_NUMA": "1"}, version, "cpu") == []


@pytest.mark.usefixtures("no_vllm")
def test_a_variable_of_a_plugin_is_not_called_wrong() -> None:
    found = only(check_env({"VLLM_ASCEND_ENABLE_NZ": "0"}, "0.32.0", "cuda"))
    assert found.severity == "info"


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("VLLM_BATCH_INVARIANT", "true", "'1'"),
        ("VLLM_FLOAT32_MATMUL_PRECISION", "tf32", "'highest'"),
        ("VLLM_WORKER_MULTIPROC_METHOD", "forkserver", "'spawn'"),
        ("CUBLAS_WORKSPACE_CONFIG", ":4096:2", "':4096:8'"),
        ("PYTHONHASHSEED", "random", "number"),
        ("PYTHONHASHSEED", str(2**32), "4294967295"),
    ],
)
def test_a_value_that_is_not_accepted_names_those_that_are(
    name: str, value: str, right: str
) -> None:
    found = only(check_env({name: value}, "0.32.0", "cuda"))
    assert (found.severity, found.code, found.where) == ("error", "bad-value", name)
    assert repr(value) in found.sentence
    assert right in found.remedy


def test_what_batch_invariant_mode_overwrites_is_named() -> None:
    env = {"VLLM_BATCH_INVARIANT": "1", "NCCL_ALGO": "Ring", "CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    found = check_env(env, "0.32.0", "cuda")
    assert {f.where for f in found if f.code == "overwritten"} == {
        "NCCL_ALGO",
        "CUBLAS_WORKSPACE_CONFIG",
    }
    assert check_env({"NCCL_ALGO": "Ring"}, "0.32.0", "cuda") == []


def test_a_setting_for_the_other_platform_is_a_warning_not_an_error() -> None:
    for env, platform in (
        ({"VLLM_CPU_KVCACHE_SPACE": "4"}, "cuda"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "cpu"),
    ):
        found = only(check_env(env, "0.32.0", platform))
        assert (found.severity, found.code) == ("warning", "other-platform")


def test_choosing_gpus_behind_rays_back_is_refused() -> None:
    found = only(errors(check_env({"CUDA_VISIBLE_DEVICES": "3"}, "0.32.0", "cuda")))
    assert "[placement]" in found.remedy


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "flash_attention", "FLASHATTENTION"])
def test_a_backends_colloquial_name_is_told_its_real_one(backend: str) -> None:
    args = {"attention_backend": backend}
    found = only(check_engine_args(args, "0.32.0", "cuda", FIELDS_032))
    assert found.severity == "error"
    assert found.remedy == "Use FLASH_ATTN."


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "flash_attn", "FLASHINFER", "auto", None])
def test_a_right_backend_is_left_alone(backend: str | None) -> None:
    assert check_engine_args({"attention_backend": backend}, "0.32.0", "cuda", FIELDS_032) == []


def test_a_backend_is_checked_inside_the_attention_configuration_too() -> None:
    args = {"attention_config": {"backend": "FLASH_ATN"}}
    found = only(check_engine_args(args, "0.32.0", "cuda", FIELDS_032))
    assert found.where == "attention_config.backend"
    assert found.remedy == "Did you mean FLASH_ATTN?"


def test_two_ways_to_name_a_backend_exclude_each_other() -> None:
    args = {"attention_backend": "FLASH_ATTN", "attention_config": {"backend": "FLASHINFER"}}
    assert only(check_engine_args(args, "0.32.0", "cuda", FIELDS_032)).code == "conflict"


def test_a_gpu_backend_on_the_cpu_platform_has_no_effect() -> None:
    args = {"attention_backend": "FLASH_ATTN"}
    found = only(check_engine_args(args, "0.32.0", "cpu", FIELDS_032))
    assert (found.severity, found.code) == ("warning", "other-platform")


@pytest.mark.parametrize("name", ["max-num-seqs", "--max-num-seqs", "max_num_seq", "max_nun_seqs"])
def test_a_misspelt_argument_names_the_closest_right_one(name: str) -> None:
    found = only(check_engine_args({name: 8}, "0.32.0", "cuda", FIELDS_032))
    assert (found.severity, found.remedy) == ("error", "Did you mean max_num_seqs?")


@pytest.mark.parametrize(
    ("name", "version", "code"),
    [
        ("use_beam_search", "0.32.0", "removed-argument"),
        ("best_of", "0.26.0", "removed-argument"),
        ("max_num_partial_prefills", "0.27.0", "removed-argument"),
        ("enable_trace_replay", "0.28.0", "future-argument"),
        ("temperature", "0.32.0", "sampling-argument"),
        ("tensor_parallel_size", "0.32.0", "reserved-argument"),
        ("seed", "0.32.0", "reserved-argument"),
    ],
)
@pytest.mark.usefixtures("no_vllm")
def test_a_wrong_argument_is_refused_for_its_own_reason(name: str, version: str, code: str) -> None:
    found = only(check_engine_args({name: 1}, version, "cuda", None))
    assert (found.severity, found.code, found.where) == ("error", code, name)
    assert found.remedy


@pytest.mark.parametrize(("version", "severity"), [("0.33.0", "error"), ("0.99.0", "warning")])
@pytest.mark.usefixtures("no_vllm")
def test_what_a_version_beyond_the_known_ones_takes_is_not_judged_with_certainty(
    version: str, severity: str
) -> None:
    found = [
        only(check_engine_args({"brand_new": 1}, version, "cuda", None)),
        only(check_env({"VLLM_BRAND_NEW": "1"}, version, "cuda")),
        only(check_engine_args({"attention_backend": "NEW_ATTN"}, version, "cuda", None)),
    ]
    assert {f.severity for f in found} == {severity}


def test_fields_that_the_engine_itself_told_of_are_certain() -> None:
    found = only(check_engine_args({"brand_new": 1}, "0.99.0", "cuda", FIELDS_032))
    assert found.severity == "error"
    assert check_engine_args({"brand_new": 1}, "0.99.0", "cuda", {"brand_new"}) == []


@pytest.mark.parametrize(
    ("name", "version", "when"),
    [
        ("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "0.29.0", "gone since 0.29"),
        ("VLLM_ROCM_USE_AITER_FP4_ASM_GEMM", "0.33.0", "gone since 0.33"),
        ("VLLM_USE_BREAKABLE_CUDAGRAPH", "0.21.0", "came with 0.22"),
        ("VLLM_RPC_TIMEOUT", "0.26.0", "gone since 0.23"),
    ],
)
@pytest.mark.usefixtures("no_vllm")
def test_a_name_of_another_version_is_told_apart_from_a_misspelt_one(
    name: str, version: str, when: str
) -> None:
    assert when in only(check_env({name: "1"}, version, "cuda")).sentence


@pytest.mark.parametrize(
    ("args", "code", "where"),
    [
        (
            {"enforce_eager": True, "compilation_config": {"cudagraph_mode": "FULL"}},
            "overruled",
            "compilation_config.cudagraph_mode",
        ),
        (
            {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5},
            "overruled",
            "gpu_memory_utilization",
        ),
        (
            {
                "enable_flashinfer_autotune": False,
                "kernel_config": {"enable_flashinfer_autotune": True},
            },
            "conflict",
            "kernel_config.enable_flashinfer_autotune",
        ),
        ({"disable_cascade_attn": True}, "dead-argument", "disable_cascade_attn"),
        ({"logprobs_mode": "logprobs"}, "bad-value", "logprobs_mode"),
    ],
)
def test_a_setting_that_another_one_voids_is_named(
    args: dict[str, Any], code: str, where: str
) -> None:
    found = only(check_engine_args(args, "0.32.0", "cuda", None))
    assert (found.code, found.where) == (code, where)


def test_settings_that_go_together_are_left_alone() -> None:
    args = {
        "enforce_eager": True,
        "compilation_config": {"cudagraph_mode": "NONE"},
        "kv_cache_memory_bytes": 1 << 30,
        "disable_cascade_attn": True,
    }
    assert check_engine_args(args, "0.26.0", "cuda", None) == []


def test_an_upgrade_names_what_changes_results() -> None:
    changes = knobs.behaviour_changes("0.30.0", "0.32.0")
    assert all(c.startswith(("0.31: ", "0.32: ")) for c in changes)
    assert any("murmur3" in c for c in changes)
    assert knobs.behaviour_changes("0.32.0", "0.30.0") == changes
    assert knobs.behaviour_changes("0.32.0", "0.32.1") == []


def test_every_removed_name_is_gone_from_the_newest_version() -> None:
    newest = vllm_history.covered()[1]
    assert not REMOVED_VARIABLES.keys() & vllm_history.known("variables", newest)
    assert not REMOVED_ARGUMENTS.keys() & vllm_history.known("engine_arguments", newest)


def test_every_listed_name_is_one_that_some_version_knows() -> None:
    for knob in VARIABLES:
        unlisted = vllm_history.spans("unlisted_variables", knob.name)
        assert unlisted or vllm_history.spans("variables", knob.name), knob.name
    for name in (*DEAD_ARGUMENTS, *ARGUMENT_VALUES, *RESERVED_ARGUMENTS):
        assert vllm_history.spans("engine_arguments", name), name
    for backend in BACKEND_ALIASES.values():
        assert vllm_history.spans("attention_backends", backend), backend
    newest = vllm_history.covered()[1]
    assert not SAMPLING_ARGUMENTS & vllm_history.known("engine_arguments", newest)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("platform", ["cuda", "cpu"])
@pytest.mark.parametrize("profile", ["strict", "eager", "as-deployed"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_profile_passes_its_own_checks(
    profile: str, platform: str, version: str, world_size: int
) -> None:
    args = profile_engine_args(profile, platform, version, world_size)
    assert check_engine_args(args, version, platform, FIELDS_032) == []
    assert check_engine_args(args, version, platform, None) == []
    assert check_env(profile_env(profile, platform, version), version, platform) == []


@pytest.mark.parametrize("platform", ["cuda", "cpu"])
def test_strict_pins_what_vllm_would_take_from_the_gpu(platform: str) -> None:
    args = profile_engine_args("strict", platform, "0.32.0", 1)
    pinned: dict[str, Any] = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    assert args.items() >= pinned.items()
    assert args["enable_prefix_caching"] is False
    assert ("kv_cache_memory_bytes" in args) == (platform == "cuda")
    assert ("attention_backend" in args) == (platform == "cuda")


def test_custom_all_reduce_is_off_where_it_does_not_sum_in_rank_order() -> None:
    older = profile_engine_args("strict", "cuda", "0.31.0", 2)
    assert older["disable_custom_all_reduce"] is True
    assert "disable_custom_all_reduce" not in profile_engine_args("strict", "cuda", "0.32.0", 2)
    assert "disable_custom_all_reduce" not in profile_engine_args("strict", "cuda", "0.31.0", 1)


def test_as_deployed_changes_nothing_on_a_gpu() -> None:
    assert profile_engine_args("as-deployed", "cuda", "0.32.0", 4) == {}
    assert profile_env("as-deployed", "cuda", "0.32.0") == {}


@pytest.mark.parametrize("profile", ["strict", "eager", "as-deployed"])
def test_engines_share_a_machine_without_gpus_under_every_profile(profile: str) -> None:
    env = profile_env(profile, "cpu", "0.32.0")
    assert env == {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0", (0, 32)), ("0.32.0+cpu", (0, 32)), ("1.2rc1", (1, 2)), ("", (0, 33))],
)
def test_versions_are_read_by_major_and_minor(text: str, expected: tuple[int, int]) -> None:
    assert knobs.parse_version(text) == expected


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONHASHSEED"])
def test_the_level_that_is_advised_is_the_lowest_that_sets_the_variable(name: str) -> None:
    lowest = next(level for level in range(6) if name in level_env(level))
    unset = only([f for f in machine_defaults({}) if f.where == name])
    assert unset.remedy == f"Determinism level {lowest} and above sets it."


def test_machine_defaults_name_what_is_left_to_the_node() -> None:
    found = {f.where for f in machine_defaults({})}
    assert found == {"OMP_NUM_THREADS", "PYTHONHASHSEED", "CUDA_DEVICE_ORDER"}
    pinned = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert machine_defaults(pinned) == []
    assert only(machine_defaults({**pinned, "NCCL_ALGO": "Ring"})).code == "node-local-variable"


def test_a_kubernetes_service_called_vllm_is_recognised() -> None:
    found = errors(machine_defaults({"VLLM_PORT": "tcp://10.0.0.1:8000"}))
    assert only(found).code == "kubernetes-service"


def test_what_decides_determinism_is_relevant_and_a_prompt_is_not() -> None:
    for name in ("VLLM_X", "NCCL_ALGO", "OMP_NUM_THREADS", "PYTHONHASHSEED", "LD_PRELOAD"):
        assert knobs.is_relevant(name)
    for name in ("PS1", "HOME", "EDITOR"):
        assert not knobs.is_relevant(name)
    assert all(knobs.is_relevant(name) for name in knobs.RELEVANT)


@pytest.mark.skipif(not vllm_source.installed_version(), reason="vLLM is not installed here")
def test_what_is_said_about_the_installed_vllm_is_what_its_source_says() -> None:
    version = knobs.parse_version(vllm_source.installed_version())
    read = vllm_source.environment_variables()
    assert {"VLLM_BATCH_INVARIANT", "VLLM_CPU_KVCACHE_SPACE"} <= read
    assert "FLASH_ATTN" in vllm_source.attention_backends()
    fields = vllm_source.engine_arguments()
    for platform in ("cuda", "cpu"):
        strict = profile_engine_args("strict", platform, ".".join(map(str, version)), 2)
        assert strict.keys() <= fields
    assert vllm_history.known("variables", version) == read
    assert vllm_history.known("engine_arguments", version) == fields
    assert vllm_history.known("attention_backends", version) == vllm_source.attention_backends()
    for knob in VARIABLES:
        accepted = vllm_source.accepted_values().get(knob.name)
        if accepted and knob.values:
            assert set(knob.values) == set(accepted), knob.name


@pytest.mark.skipif(not vllm_source.installed_version(), reason="vLLM is not installed here")
def test_a_value_is_checked_against_the_installed_source_too() -> None:
    version = vllm_source.installed_version()
    found = only(check_env({"VLLM_DEEP_GEMM_WARMUP": "sometimes"}, version, "cuda"))
    assert "'skip'" in found.remedy
