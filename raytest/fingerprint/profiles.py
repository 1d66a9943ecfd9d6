"""What a profile pins, as engine arguments and variables."""

from __future__ import annotations

from typing import Any

from raytest.fingerprint.versions import parse_version

_GIB = 1 << 30


def profile_engine_args(
    profile: str, platform: str, vllm_version: str, world_size: int
) -> dict[str, Any]:
    """Engine arguments of a profile: ``strict``, ``eager`` or ``as-deployed`` (none).

    ``strict`` pins what vLLM would otherwise choose from the GPU's memory, from timings or from
    the model's folder: two slots that chose differently would run different engines.
    """
    if profile == "eager":
        return {"enforce_eager": True}
    if profile != "strict":
        return {}
    arguments: dict[str, Any] = {
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "generation_config": "vllm",
        "logprobs_mode": "raw_logprobs",
    }
    if platform == "cuda":
        arguments["kv_cache_memory_bytes"] = 4 * _GIB
        arguments["attention_backend"] = "FLASH_ATTN"
        arguments["enable_flashinfer_autotune"] = False
        # Batch-invariant mode did the same until 0.31; since 0.32 it sums in rank order.
        if world_size > 1 and parse_version(vllm_version) < (0, 32):
            arguments["disable_custom_all_reduce"] = True
    return arguments


def profile_env(profile: str, platform: str, vllm_version: str) -> dict[str, str]:
    """Variables of a profile that must be set before the engine's process exists."""
    if platform == "cpu":
        # For every profile: by default a CPU engine takes half of the node's memory for its cache
        # and binds its threads to all cores of a NUMA node, so that a second one fails or halves
        # the first one's speed. Neither says anything about how a GPU engine is deployed.
        return {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    # Off unless asked for in 0.20.
    strict = profile == "strict" and parse_version(vllm_version) >= (0, 21)
    return {"VLLM_USE_FLASHINFER_SAMPLER": "0"} if strict else {}
