"""variant x slot x installed versions -> what an engine is started with. The one place that decides
the executor and merges level, profile and the variant's own settings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raytest.engines.base import EngineConfig
from raytest.engines.vllm_faults import check_fault
from raytest.errors import UsageError
from raytest.fingerprint.finding import Finding
from raytest.fingerprint.knobs import (
    check_engine_args,
    check_env,
    profile_engine_args,
    profile_env,
)
from raytest.inventory import Inventory, Slot
from raytest.plan import Cell
from raytest.schema import Arrangement
from raytest.seeding import level_engine_args, level_env, unsupported
from raytest.spec import Spec, Variant


@dataclass(frozen=True, slots=True)
class Target:
    """What the engines will run on: ``platform`` is ``cuda`` or ``cpu``; ``vllm`` its version or
    ''."""

    platform: str
    vllm: str


def target_of(inventory: Inventory, vllm: str) -> Target:
    """The platform that the inventory's devices stand for."""
    return Target("cuda" if inventory.device_kind == "gpu" else "cpu", vllm)


def check_spec(spec: Spec, target: Target, source: str) -> None:
    """Refuse what the installed vLLM or the platform would ignore or not do. Raises UsageError."""
    lines = []
    for variant in spec.variants if spec.backend == "vllm" else ():
        key = f"{source}: variants.{variant.name}"
        reason = unsupported(spec.level(variant), target.platform)
        if reason:
            lines.append(f"{key}: level {spec.level(variant)}: {reason}")
        if variant.fault is not None:
            check_fault(variant.fault, key)
        findings = variant_findings(spec, variant, target)
        lines += [f"{key}: {f.sentence} {f.remedy}" for f in findings if f.severity == "error"]
    if lines:
        raise UsageError("\n".join(lines))


def variant_findings(spec: Spec, variant: Variant, target: Target) -> list[Finding]:
    """What is wrong with what a variant's engine would be started with: its own settings among
    those of level and profile, which may overrule them."""
    arguments = _engine_arguments(spec, variant, target)
    return [
        *check_env(variant.env, target.vllm, target.platform),
        *check_engine_args(arguments, target.vllm, target.platform, None),
    ]


def _engine_arguments(spec: Spec, variant: Variant, target: Target) -> dict[str, Any]:
    """Engine arguments of profile, level and workload, and over them the variant's own."""
    profile, world = spec.profile(variant), variant.world_size
    arguments = profile_engine_args(profile, target.platform, target.vllm, world)
    arguments.update(level_engine_args(spec.level(variant)))
    if Arrangement.PREFIX in spec.trials.arrangements:
        arguments["enable_prefix_caching"] = True
    return {**arguments, **variant.engine}


def choose_executor(variant: Variant, slot: Slot, target: Target) -> str:
    """The executor that works for this slot. Raises UsageError where none does.

    ``uni`` for one rank; ``mp`` for several on one node; ``ray`` across nodes, which vLLM refuses
    on the CPU platform.
    """
    if variant.world_size == 1:
        return "uni" if variant.executor == "auto" else variant.executor
    spans = len(slot.nodes) > 1
    if spans and target.platform == "cpu":
        raise UsageError(
            f"variant {variant.name}: vLLM's Ray executor does not run on the CPU platform, "
            "so one engine cannot span nodes there"
        )
    if variant.executor == "ray" and target.platform == "cpu":
        raise UsageError(
            f"variant {variant.name}: executor 'ray' does not run on the CPU platform; use 'mp'"
        )
    if variant.executor == "auto":
        return "ray" if spans else "mp"
    return variant.executor


def configure(
    spec: Spec, cell: Cell, target: Target, *, model_path: str, tokenizer_path: str
) -> tuple[EngineConfig, dict[str, str]]:
    """The engine's configuration and the variables that must be set before its process exists."""
    variant = next(v for v in spec.variants if v.name == cell.variant)
    level, profile = spec.level(variant), spec.profile(variant)
    reference = spec.backend == "reference"
    executor = "uni" if reference else choose_executor(variant, cell.slot, target)
    env = {**level_env(level, threads=_threads(spec, variant)), "HF_HUB_OFFLINE": "1"}
    if not reference:
        env.update(profile_env(profile, target.platform, target.vllm))
    if not model_path.startswith(("/", "synthetic:")):
        env.pop("HF_HUB_OFFLINE")
    env.update(variant.env)
    arguments = _engine_arguments(spec, variant, target)
    config = EngineConfig(
        backend=spec.backend,
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        dtype=variant.dtype or spec.model.dtype,
        max_model_len=spec.model.max_model_len,
        seed=spec.seed,
        tensor_parallel_size=variant.tensor_parallel_size,
        pipeline_parallel_size=variant.pipeline_parallel_size,
        level=level,
        profile=profile,
        device_kind=cell.slot.devices[0].kind,
        device_uuids=tuple(d.uuid for d in cell.slot.devices),
        executor=executor,
        trust_remote_code=spec.model.trust_remote_code,
        warn_only=spec.determinism.warn_only,
        engine_args=arguments,
        env=env,
        logprobs=spec.logprobs(variant),
        fault=variant.fault,
    )
    return config, env


def _threads(spec: Spec, variant: Variant) -> int:
    """Threads that a level fixes. A variant's own OMP_NUM_THREADS counts for all libraries: with
    MKL, torch takes MKL's number for OpenMP too (ATen, ParallelOpenMP.cpp, ``init_num_threads``),
    so that a lower MKL_NUM_THREADS would make the variant's setting void without a word."""
    own = variant.env.get("OMP_NUM_THREADS", "")
    return int(own) if own.isdigit() and int(own) > 0 else spec.determinism.threads


def with_fault(config: EngineConfig, fault: dict[str, Any]) -> EngineConfig:
    """The same engine with a planted fault, for controls and the self-test."""
    return replace(config, fault=fault)
