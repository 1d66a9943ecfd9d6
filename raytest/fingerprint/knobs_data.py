"""Variables and engine arguments that decide whether two runs agree, and what is known of them.

Which version knows which name is in :mod:`raytest.fingerprint.vllm_history`.
"""

from __future__ import annotations

from dataclasses import dataclass

BOOLEAN = ("0", "1")


@dataclass(frozen=True, slots=True)
class Knob:
    """A variable and what it does to determinism.

    ``values`` are all that it accepts, () where any may be right; ``platform`` the only one that
    reads it, '' for all.
    """

    name: str
    note: str
    values: tuple[str, ...] = ()
    platform: str = ""


_THREADS = "threads, and with them the order of sums on the CPU"
_TIMED = "kernels chosen by timing, which may differ from process to process"

VARIABLES = (
    Knob("VLLM_BATCH_INVARIANT", "batch-invariant kernels", BOOLEAN, "cuda"),
    Knob("VLLM_ENABLE_V1_MULTIPROCESSING", "0 runs the engine in-process", BOOLEAN),
    Knob("VLLM_USE_V2_MODEL_RUNNER", "the model runner; its default changed in 0.22 to 0.25, 0.29"),
    Knob("VLLM_USE_BREAKABLE_CUDAGRAPH", "breakable CUDA graphs", BOOLEAN),
    Knob("VLLM_DISABLE_COMPILE_CACHE", "torch.compile starts anew", BOOLEAN),
    Knob("VLLM_USE_AOT_COMPILE", "ahead-of-time compilation", BOOLEAN),
    Knob("VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE", _TIMED, BOOLEAN),
    Knob("VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING", _TIMED, BOOLEAN),
    Knob("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "where timed choices are kept"),
    Knob("VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS", "operations that are not timed"),
    Knob(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "a sampler whose path depends on what else is in the batch; on by default since 0.21",
        BOOLEAN,
        "cuda",
    ),
    Knob("VLLM_ALLREDUCE_USE_SYMM_MEM", "all-reduce through symmetric memory", BOOLEAN),
    Knob("VLLM_ALLREDUCE_USE_FLASHINFER", "FlashInfer's all-reduce; default since 0.29", BOOLEAN),
    Knob("VLLM_CUSTOM_ALLREDUCE_ALGO", "how custom all-reduce sums"),
    Knob("VLLM_USE_NCCL_SYMM_MEM", "NCCL's symmetric memory", BOOLEAN),
    Knob("VLLM_DISABLE_PYNCCL", "NCCL through torch instead of vLLM's binding"),
    Knob("VLLM_USE_RAY_V2_EXECUTOR_BACKEND", "which Ray executor", BOOLEAN),
    Knob("VLLM_RAY_EXTRA_ENV_VARS_TO_COPY", "variables that reach Ray workers"),
    Knob("VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY", "variables that reach Ray workers"),
    Knob("VLLM_WORKER_MULTIPROC_METHOD", "how ranks start", ("fork", "spawn")),
    Knob(
        "VLLM_FLOAT32_MATMUL_PRECISION",
        "TF32 in float32 matrix products",
        ("highest", "high", "medium"),
    ),
    Knob("VLLM_TUNED_CONFIG_FOLDER", "tuned kernel tables, which may differ between nodes"),
    Knob("VLLM_PP_LAYER_PARTITION", "layers of each pipeline stage"),
    Knob("VLLM_KV_CACHE_LAYOUT", "order of the KV cache in memory"),
    Knob("VLLM_CPU_KVCACHE_SPACE", "KV cache in GiB", platform="cpu"),
    Knob("VLLM_CPU_OMP_THREADS_BIND", "cores of each rank", platform="cpu"),
    Knob("VLLM_CPU_NUM_OF_RESERVED_CPU", "cores left out of binding", platform="cpu"),
    Knob("VLLM_CPU_ATTN_SPLIT_KV", "how attention is split over threads", BOOLEAN, "cpu"),
    Knob("VLLM_CPU_SIM_MULTI_NUMA", "pretended NUMA nodes", platform="cpu"),
    Knob("VLLM_CPU_CI_ENV", "skips the warm-up", BOOLEAN, "cpu"),
)

# What took the place of what is gone; None: nothing, it can be removed.
REMOVED_VARIABLES: dict[str, str | None] = {
    "VLLM_ATTENTION_BACKEND": "the engine argument attention_backend",
    "VLLM_FLASH_ATTN_VERSION": "the engine argument attention_config.flash_attn_version",
    "VLLM_USE_V1": None,
    "VLLM_USE_RAY_V2_EXECUTOR_BACKEND": None,
    "VLLM_RPC_TIMEOUT": None,
}

# vLLM and Ray set these themselves, also where its table of variables does not list them.
SET_BY_OTHERS = frozenset({"VLLM_OMP_NUM_THREADS_SET_BY_VLLM"})

# Variables of other libraries; no version of vLLM decides whether they exist.
LIBRARY_VARIABLES = (
    Knob("CUBLAS_WORKSPACE_CONFIG", "cuBLAS is deterministic only with these",
         values=(":4096:8", ":16:8")),
    Knob("CUDA_DEVICE_ORDER", "whether indices mean the same to CUDA and NVML",
         values=("PCI_BUS_ID", "FASTEST_FIRST")),
    Knob("CUDA_LAUNCH_BLOCKING", "for diagnosis only: it changes timing, not sums",
         values=BOOLEAN),
    Knob("NCCL_ALGO", "the order of sums over GPUs"),
    Knob("NCCL_PROTO", "how sums over GPUs are cut in pieces"),
    Knob("NCCL_TOPO_FILE", "the topology that NCCL plans for"),
    Knob("NVIDIA_TF32_OVERRIDE", "TF32 in every library", values=BOOLEAN),
    Knob("OMP_NUM_THREADS", _THREADS),
    Knob("MKL_NUM_THREADS", _THREADS),
    Knob("OPENBLAS_NUM_THREADS", _THREADS),
    Knob("PYTHONHASHSEED", "order of sets; hash of prefix-cache blocks before 0.29"),
    Knob("TOKENIZERS_PARALLELISM", "threads of the tokenizer; not what it returns",
         values=("true", "false", "0", "1")),
    Knob("TORCHINDUCTOR_DETERMINISTIC", "deterministic choices in Inductor", values=BOOLEAN),
    Knob("TRITON_CACHE_AUTOTUNING", "whether timed choices are kept", values=BOOLEAN),
    Knob("PYTORCH_CUDA_ALLOC_CONF", "the allocator, and with it the memory left for the cache"),
    Knob("LD_PRELOAD", "libraries put before all others, such as another OpenMP runtime"),
)  # fmt: skip

# Batch-invariant mode sets these in every rank, whatever the spec says.
REWRITTEN_WHEN_BATCH_INVARIANT = (
    "NCCL_", "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "VLLM_USE_AOT_COMPILE",
    "VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_CUSTOM_ALLREDUCE_ALGO",
)  # fmt: skip

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
RESERVED_ARGUMENTS: dict[str, str | None] = {
    "model": "[model] path",
    "tokenizer": "[model] tokenizer",
    "tensor_parallel_size": "the variant's tensor_parallel_size",
    "pipeline_parallel_size": "the variant's pipeline_parallel_size",
    "distributed_executor_backend": "the variant's executor",
    "device_ids": "[placement]",
    "seed": "the spec's seed",
    "dtype": "the variant's dtype",
    "max_model_len": "[model] max_model_len",
    "trust_remote_code": "[model] trust_remote_code",
    "worker_extension_cls": None,  # raytest observes the ranks through it
}

REMOVED_ARGUMENTS: dict[str, str | None] = {
    "use_beam_search": "[sampling] beam_width",
    "best_of": "[sampling] n",
    "swap_space": None,
    "use_v2_block_manager": None,
    "num_scheduler_steps": None,
    "num_lookahead_slots": None,
    "disable_async_output_proc": None,
    "max_seq_len_to_capture": "max_cudagraph_capture_size",
    "guided_decoding_backend": "structured_outputs_config",
    "speculative_model": "speculative_config",
    "num_speculative_tokens": "speculative_config",
    "worker_use_ray": "the variant's executor",
    "task": None,
    "calculate_kv_scales": None,
    "max_num_partial_prefills": None,
    "max_long_partial_prefills": None,
    "override_attention_dtype": None,
}

# Accepted, and without effect since that version.
DEAD_ARGUMENTS = {"disable_cascade_attn": (0, 32)}

ARGUMENT_VALUES = {
    "logprobs_mode": ("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
}

# Two names of one setting: vLLM refuses both at once.
EXCLUSIVE_ARGUMENTS = (
    ("attention_backend", "attention_config", "backend"),
    ("enable_flashinfer_autotune", "kernel_config", "enable_flashinfer_autotune"),
)

# These belong to a request, not to an engine.
SAMPLING_ARGUMENTS = frozenset(
    {
        "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "logprobs",
        "prompt_logprobs", "stop", "stop_token_ids", "ignore_eos", "presence_penalty",
        "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias",
    }
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

# What makes equal settings give different results across versions: (first version with it, what).
BEHAVIOUR_CHANGES: tuple[tuple[tuple[int, int], str], ...] = (
    ((0, 21), "the FlashInfer sampler is on by default"),
    ((0, 21), "rejection sampling of speculative decoding changed"),
    ((0, 21), "batch-invariant matrix products take another route on compute capability 10.0"),
    ((0, 22), "the second model runner is the default for dense Qwen3 models"),
    ((0, 23), "the second model runner is the default for listed dense models"),
    ((0, 25), "the second model runner is the default for most dense models"),
    ((0, 27), "torch 2.13"),
    ((0, 29), "the second model runner is the default wherever it is supported"),
    ((0, 29), "FlashInfer's all-reduce is on by default"),
    ((0, 29), "hashes of prefix-cache blocks have a fixed seed"),
    ((0, 29), "tuned tables for batch-invariant matrix products"),
    ((0, 31), "the second model runner draws its sampling noise from murmur3, not Philox"),
    ((0, 31), "batch-invariant mode sets another NCCL_ALGO"),
    ((0, 32), "custom all-reduce stays on in batch-invariant mode"),
    ((0, 32), "the data-parallel rank is mixed into seeds"),
    ((0, 32), "cascade attention is gone"),
    ((0, 33), "torch 2.14, and batch-invariant kernels through Inductor"),
)  # fmt: skip
