"""Variables and engine arguments that decide whether two runs agree, by vLLM version.

Versions were read from vLLM's source distributions 0.20 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass

OLDEST, NEWEST = (0, 20), (0, 33)

BOOLEAN = ("0", "1")


@dataclass(frozen=True, slots=True)
class Knob:
    """A name, the versions that know it, and what it does to determinism.

    ``since`` is the first version with it and ``until`` the first without, each (major, minor);
    None where it was there before 0.20, or still is. ``values`` are all that it accepts, () where
    any value may be right. ``instead`` says what took its place.
    """

    name: str
    note: str = ""
    since: tuple[int, int] | None = None
    until: tuple[int, int] | None = None
    values: tuple[str, ...] = ()
    instead: str = ""
    platform: str = ""


VARIABLES = (
    Knob("VLLM_BATCH_INVARIANT", "batch-invariant kernels", values=BOOLEAN, platform="cuda"),
    Knob(
        "VLLM_ATTENTION_BACKEND",
        "the attention kernel",
        until=(0, 16),
        instead="the engine argument attention_backend",
    ),
    Knob("VLLM_ENABLE_V1_MULTIPROCESSING", "0 runs the engine in-process", values=BOOLEAN),
    Knob(
        "VLLM_USE_V2_MODEL_RUNNER",
        "which model runner; its default changed in 0.22 to 0.25 and 0.29",
        values=BOOLEAN,
    ),
    Knob("VLLM_USE_BREAKABLE_CUDAGRAPH", "breakable CUDA graphs", since=(0, 22)),
    Knob("VLLM_DISABLE_COMPILE_CACHE", "torch.compile starts anew", values=BOOLEAN),
    Knob("VLLM_USE_AOT_COMPILE", "ahead-of-time compilation", values=BOOLEAN),
    Knob(
        "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE",
        "kernels chosen by timing, which may differ from process to process",
        values=BOOLEAN,
    ),
    Knob(
        "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING",
        "kernels chosen by timing, which may differ from process to process",
        values=BOOLEAN,
    ),
    Knob("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "where timed choices are kept", since=(0, 22)),
    Knob(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "a sampler whose path depends on what else is in the batch; on by default since 0.21",
        values=BOOLEAN,
        platform="cuda",
    ),
    Knob("VLLM_ALLREDUCE_USE_SYMM_MEM", "all-reduce through symmetric memory", values=BOOLEAN),
    Knob(
        "VLLM_ALLREDUCE_USE_FLASHINFER",
        "FlashInfer's all-reduce; on by default since 0.29",
        values=BOOLEAN,
    ),
    Knob("VLLM_USE_NCCL_SYMM_MEM", "NCCL's symmetric memory", values=BOOLEAN),
    Knob("VLLM_DISABLE_PYNCCL", "NCCL through torch instead of vLLM's binding"),
    Knob(
        "VLLM_USE_RAY_V2_EXECUTOR_BACKEND",
        "which Ray executor",
        until=(0, 33),
    ),
    Knob("VLLM_USE_V1", "which engine", until=(0, 20)),
    Knob("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "variables that reach Ray workers"),
    Knob("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "variables that reach Ray workers"),
    Knob("VLLM_WORKER_MULTIPROC_METHOD", "how ranks start", values=("fork", "spawn")),
    Knob(
        "VLLM_FLOAT32_MATMUL_PRECISION",
        "TF32 in float32 matrix products",
        values=("highest", "high", "medium"),
    ),
    Knob("VLLM_TUNED_CONFIG_FOLDER", "tuned kernel tables, which may differ between nodes"),
    Knob("VLLM_PP_LAYER_PARTITION", "layers of each pipeline stage"),
    Knob("VLLM_CPU_KVCACHE_SPACE", "KV cache in GiB", platform="cpu"),
    Knob("VLLM_CPU_OMP_THREADS_BIND", "cores of each rank", platform="cpu"),
    Knob("VLLM_CPU_NUM_OF_RESERVED_CPU", "cores left out of binding", platform="cpu"),
    Knob("VLLM_CPU_ATTN_SPLIT_KV", "how attention is split over threads", platform="cpu"),
    Knob("VLLM_CPU_SIM_MULTI_NUMA", "pretended NUMA nodes", platform="cpu"),
    Knob("VLLM_CPU_CI_ENV", "skips the warm-up", platform="cpu"),
    Knob("VLLM_OMP_NUM_THREADS_SET_BY_VLLM", "who set OMP_NUM_THREADS", since=(0, 28)),
)

# Variables of other libraries; no version of vLLM decides whether they exist.
LIBRARY_VARIABLES = (
    Knob(
        "CUBLAS_WORKSPACE_CONFIG", "cuBLAS is deterministic only with these", values=(
            ":4096:8", ":16:8"),
    ),
    Knob("CUDA_DEVICE_ORDER", "whether indices mean the same to CUDA and NVML",
         values=("PCI_BUS_ID", "FASTEST_FIRST")),
    Knob("CUDA_LAUNCH_BLOCKING", "for diagnosis only: it changes timing, not sums",
         values=BOOLEAN),
    Knob("NCCL_ALGO", "the order of sums over GPUs"),
    Knob("NCCL_PROTO", "how sums over GPUs are cut in pieces"),
    Knob("NCCL_TOPO_FILE", "the topology that NCCL plans for"),
    Knob("NVIDIA_TF32_OVERRIDE", "TF32 in every library", values=BOOLEAN),
    Knob("OMP_NUM_THREADS", "threads, and with them the order of sums on the CPU"),
    Knob("MKL_NUM_THREADS", "threads, and with them the order of sums on the CPU"),
    Knob("OPENBLAS_NUM_THREADS", "threads, and with them the order of sums on the CPU"),
    Knob("PYTHONHASHSEED", "order of sets; hash of prefix-cache blocks before 0.29"),
    Knob("TOKENIZERS_PARALLELISM", "threads of the tokenizer; not what it returns",
         values=("true", "false", "0", "1")),
    Knob("TORCHINDUCTOR_DETERMINISTIC", "deterministic choices in Inductor", values=BOOLEAN),
    Knob("TRITON_CACHE_AUTOTUNING", "whether timed choices are kept", values=BOOLEAN),
    Knob("PYTORCH_CUDA_ALLOC_CONF", "the allocator, and with it the memory left for the cache"),
    Knob("LD_PRELOAD", "libraries put before all others, such as another OpenMP runtime"),
)  # fmt: skip

# Batch-invariant mode sets these in every rank, whatever the spec says.
REWRITTEN_WHEN_BATCH_INVARIANT = ("NCCL_", "CUBLAS_WORKSPACE_CONFIG", "VLLM_USE_AOT_COMPILE")

# vLLM's plugins for other hardware read variables of their own.
PLUGIN_PREFIXES = ("VLLM_ASCEND_", "VLLM_GAUDI_", "VLLM_HPU_", "VLLM_NEURON_", "VLLM_SPYRE_")

# Determinism may depend on anything that begins so: all of it goes into the fingerprint.
PREFIXES = (
    "VLLM_", "NCCL_", "CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "TORCH", "PYTORCH_", "TRITON_",
    "FLASHINFER_", "FLASH_ATTENTION_", "OMP_", "MKL_", "OPENBLAS_", "GOMP_", "KMP_", "NUMEXPR_",
    "RAY_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD",
    "LD_LIBRARY_PATH", "CPU_VISIBLE_MEMORY_NODES", "UCX_", "GLOO_", "ROCR_", "HIP_", "RAYTEST_",
)  # fmt: skip

RELEVANT = frozenset(k.name for k in (*VARIABLES, *LIBRARY_VARIABLES))

# raytest sets these from the spec's own keys; an engine argument would contradict the plan.
RESERVED_ARGUMENTS = {
    "model": "[model] path",
    "tokenizer": "[model] tokenizer",
    "tensor_parallel_size": "the variant's tensor_parallel_size",
    "pipeline_parallel_size": "the variant's pipeline_parallel_size",
    "distributed_executor_backend": "the variant's executor",
    "worker_extension_cls": "",
    "device_ids": "[placement]",
    "seed": "the spec's seed",
    "dtype": "the variant's dtype",
    "max_model_len": "[model] max_model_len",
    "trust_remote_code": "[model] trust_remote_code",
}

ARGUMENTS = (
    Knob("use_beam_search", until=(0, 20), instead="[sampling] beam_width, or LLM.beam_search"),
    Knob("best_of", until=(0, 20), instead="[sampling] n"),
    Knob("swap_space", until=(0, 20)),
    Knob("use_v2_block_manager", until=(0, 20)),
    Knob("num_scheduler_steps", until=(0, 20)),
    Knob("max_seq_len_to_capture", until=(0, 20), instead="max_cudagraph_capture_size"),
    Knob("guided_decoding_backend", until=(0, 20), instead="structured_outputs_config"),
    Knob("max_num_partial_prefills", until=(0, 27)),
    Knob("linear_backend", since=(0, 22)),
    Knob("use_fp64_gumbel", since=(0, 22)),
    Knob("enable_trace_replay", since=(0, 29)),
)

# These belong to a request, not to an engine.
SAMPLING_ARGUMENTS = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs",
        "prompt_logprobs", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias",
    }
)  # fmt: skip

# All but those for one model family or for hardware that raytest does not drive.
ATTENTION_BACKENDS = (
    "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION", "TREE_ATTN", "FLASH_ATTN_MLA",
    "FLASHINFER_MLA", "FLASHMLA", "CUTLASS_MLA", "TRITON_MLA", "FLASH_ATTN_DIFFKV", "ROCM_ATTN",
    "ROCM_AITER_FA", "ROCM_AITER_MLA", "ROCM_AITER_UNIFIED_ATTN", "CPU_ATTN", "TORCH_SDPA",
    "CUSTOM",
)  # fmt: skip
BACKEND_ALIASES = {
    "FLASH_ATTENTION": "FLASH_ATTN",
    "FLASHATTENTION": "FLASH_ATTN",
    "FLASHATTN": "FLASH_ATTN",
    "FLASH_ATTN_VLLM_V1": "FLASH_ATTN",
    "FLASH_ATTENTION_2": "FLASH_ATTN",
    "FLASHINFER_VLLM_V1": "FLASHINFER",
    "FLASH_INFER": "FLASHINFER",
    "TRITON": "TRITON_ATTN",
    "TRITON_ATTN_VLLM_V1": "TRITON_ATTN",
    "XFORMERS": "TRITON_ATTN",
    "SDPA": "TRITON_ATTN",
}
