"""What runs inside every vLLM rank: the ``worker_extension_cls`` of each engine.

vLLM imports this module in each rank's process before it loads the model, so the module seeds the
process on import: that is the earliest point every executor and version offers. vLLM then seeds
itself from the engine's ``seed``, and :meth:`RankExtension.raytest_reset` seeds again before every
trial.

An extension method must never raise: replies carry no tag, so after an error on one rank the next
call would return stale replies of the others (vLLM issue 49972). Each reply names its rank and the
caller's nonce instead, and carries an error as text.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from typing import Any

from raytest.engines.base import SEED_VARIABLE
from raytest.seeding import seed_everything, state_digests


def _seed_on_import() -> dict[str, str]:
    """Seed this process as its engine's owner demands; the digests before the model is loaded."""
    demand = os.environ.get(SEED_VARIABLE)
    if demand is None:
        return {}
    settings = json.loads(demand)
    seed_everything(settings["seed"], level=settings["level"], warn_only=settings["warn_only"])
    return state_digests()


STATE_BEFORE_LOAD = _seed_on_import()


def _reply(method: Callable[..., Any]) -> Callable[..., Any]:
    """Answer with ``{"nonce", "rank", "value" | "error"}`` and never raise."""

    @functools.wraps(method)
    def call(self: Any, nonce: str, *args: Any) -> dict[str, Any]:
        answer: dict[str, Any] = {"nonce": nonce, "rank": int(getattr(self, "rank", 0))}
        try:
            answer["value"] = method(self, *args)
        except Exception as error:  # noqa: BLE001 - the rank's process edge: see the module's text
            answer["error"] = f"{type(error).__name__}: {error}"
        return answer

    return call


class RankExtension:
    """Methods that every vLLM worker gets; called by name through ``LLM.collective_rpc``."""

    # What vLLM's own worker provides.
    rank: int
    model_runner: Any
    vllm_config: Any
    device: Any

    @_reply
    def raytest_prepare(self) -> dict[str, str]:
        """Once after loading: make the PP receive buffer where the platform did not, and start
        watching engine steps. Returns the seed audit from before the model was loaded."""
        _allocate_pipeline_buffer(self.model_runner)
        _watch_steps(self)
        return STATE_BEFORE_LOAD

    @_reply
    def raytest_plant(self, fault: dict[str, Any]) -> str:
        """Plant a fault in this rank; what was done ('' where it is another rank's)."""
        from raytest.engines.vllm_faults import plant

        return plant(self.model_runner.model, int(self.rank), fault)

    @_reply
    def raytest_reset(self, seed: int, level: int, warn_only: bool) -> dict[str, str]:
        """Before a trial: seed this rank, forget its steps; the generators' state digests."""
        seed_everything(seed, level=level, warn_only=warn_only)
        self.__dict__["raytest_steps"] = []
        return state_digests()

    @_reply
    def raytest_steps_taken(self) -> list[list[int]]:
        """Per engine step since the last reset: requests scheduled, tokens scheduled."""
        return [list(step) for step in self.__dict__.get("raytest_steps", [])]

    @_reply
    def raytest_fingerprint(self) -> dict[str, str]:
        """This process' fingerprint, the device it really uses and vLLM's effective
        configuration."""
        from raytest.fingerprint.capture import capture

        facts = capture("rank")
        facts.update(_device_facts(self.device))
        facts.update(_effective_configuration(self))
        return facts

    @_reply
    def raytest_trace_start(self, options: dict[str, Any]) -> None:
        """Put hooks on every module; ``options`` as :class:`raytest.engines.vllm_trace.Tracer`
        takes them."""
        from raytest.engines.vllm_trace import Tracer

        self.raytest_trace_stop("")
        tracer = Tracer(self, options)
        self.__dict__["raytest_tracer"] = tracer
        tracer.start()

    @_reply
    def raytest_trace_take(self) -> dict[str, Any]:
        """What was traced since the start, in plain values; the hooks are taken out."""
        tracer = self.__dict__.pop("raytest_tracer")
        tracer.stop()
        return dict(tracer.take())

    @_reply
    def raytest_trace_stop(self) -> None:
        """Take the hooks out, where there are any, and forget what they saw."""
        tracer = self.__dict__.pop("raytest_tracer", None)
        if tracer is not None:
            tracer.stop()


def _allocate_pipeline_buffer(model_runner: Any) -> None:
    """The CPU runner makes this buffer only in a warm-up that eager mode skips, and then fails on
    the first request. Zeros, no forward pass and no random number: the rank's state stays as it
    was."""
    from vllm.distributed.parallel_state import get_pp_group

    if get_pp_group().is_first_rank or getattr(model_runner, "intermediate_tensors", 0) is not None:
        return
    model_runner.intermediate_tensors = model_runner.model.make_empty_intermediate_tensors(
        batch_size=model_runner.max_num_tokens,
        dtype=model_runner.model_config.dtype,
        device=model_runner.device,
    )


def _watch_steps(worker: Any) -> None:
    """Record what each step scheduled, and name the module in which a step failed."""
    runner = worker.model_runner
    execute = runner.execute_model
    worker.__dict__["raytest_steps"] = []

    @functools.wraps(execute)
    def watched(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        scheduled = scheduler_output.num_scheduled_tokens
        if scheduled:
            worker.__dict__["raytest_steps"].append((len(scheduled), sum(scheduled.values())))
        try:
            return execute(scheduler_output, *args, **kwargs)
        except RuntimeError as error:
            module = _failing_module(error, runner.model)
            if module is None:
                raise
            raise RuntimeError(f"{error} [in module {module}]") from error

    runner.execute_model = watched


def _failing_module(error: BaseException, model: Any) -> str | None:
    """Name of the innermost module of ``model`` on the error's stack."""
    names = {id(module): name for name, module in model.named_modules()}
    found = None
    trace = error.__traceback__
    while trace is not None:
        name = names.get(id(trace.tb_frame.f_locals.get("self")))
        found = name or found
        trace = trace.tb_next
    return found


def _device_facts(device: Any) -> dict[str, str]:
    """The device this rank computes on, asked of the device and not of a variable."""
    import torch

    if getattr(device, "type", "cpu") != "cuda":
        return {"device.kind": "cpu"}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device.kind": "gpu",
        "device.uuid": f"GPU-{properties.uuid}",
        "device.name": properties.name,
        "device.multiprocessors": str(properties.multi_processor_count),
        "device.capability": f"{properties.major}.{properties.minor}",
    }


# Where vLLM derives something from the machine, or a default moved between versions; read back so
# that two slots that run different engines are seen as such.
_EFFECTIVE = {
    "scheduler_config": (
        "max_num_seqs",
        "max_num_batched_tokens",
        "async_scheduling",
        "enable_chunked_prefill",
        "chunked_prefill_enabled",
        "policy",
    ),
    "cache_config": (
        "block_size",
        "num_gpu_blocks",
        "num_gpu_blocks_override",
        "enable_prefix_caching",
        "cache_dtype",
        "kv_cache_memory_bytes",
        "gpu_memory_utilization",
    ),
    "model_config": (
        "dtype",
        "max_model_len",
        "seed",
        "logprobs_mode",
        "generation_config",
        "enforce_eager",
        "quantization",
        "trust_remote_code",
        "max_logprobs",
    ),
    "parallel_config": (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "distributed_executor_backend",
        "disable_custom_all_reduce",
        "worker_cls",
    ),
    "compilation_config": ("mode", "level", "cudagraph_mode", "backend"),
    "attention_config": ("backend", "flash_attn_version"),
}


def _effective_configuration(worker: Any) -> dict[str, str]:
    facts = {}
    for section, names in _EFFECTIVE.items():
        config = getattr(worker.vllm_config, section, None)
        for name in names:
            if config is not None and hasattr(config, name):
                facts[f"effective.{section}.{name}"] = str(getattr(config, name))
    runner = type(worker.model_runner)
    facts["effective.model_runner"] = f"{runner.__module__}.{runner.__qualname__}"
    facts["effective.worker"] = f"{type(worker).__module__}.{type(worker).__qualname__}"
    facts["effective.rank"] = str(worker.rank)
    backends = {
        _backend_name(backend)
        for module in worker.model_runner.model.modules()
        if (backend := getattr(module, "attn_backend", None)) is not None
    }
    facts["effective.attention_backends"] = ",".join(sorted(backends))
    facts["effective.all_reduce"] = _all_reduce_path()
    facts["effective.sampling_defaults"] = _sampling_defaults(worker.vllm_config.model_config)
    return facts


def _sampling_defaults(model_config: Any) -> str:
    """What the engine would fill in where a request is silent, from the model's
    ``generation_config.json`` or the variant's ``override_generation_config``; JSON."""
    try:
        defaults: Any = getattr(model_config, "get_diff_sampling_param", dict)()
    except (OSError, ValueError) as error:
        return f"unread: {type(error).__name__}: {error}"
    return json.dumps(defaults, sort_keys=True)


def _backend_name(backend: Any) -> str:
    return str(backend.get_name()) if hasattr(backend, "get_name") else str(backend)


def _all_reduce_path() -> str:
    """Which communicators the tensor-parallel group has, which decides the order of its sums."""
    from vllm.distributed.parallel_state import get_tp_group

    communicator = getattr(get_tp_group(), "device_communicator", None)
    parts = [type(communicator).__name__]
    for name in ("ca_comm", "pynccl_comm", "qr_comm", "symm_mem_comm", "fi_ar_comm"):
        member = getattr(communicator, name, None)
        if member is not None and not getattr(member, "disabled", False):
            parts.append(name)
    return "+".join(parts)
