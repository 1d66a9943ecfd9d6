"""What the reference engine was asked to be: engine arguments, environment, and its fingerprint."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raytest.digest import json_digest
from raytest.engines.base import EngineConfig
from raytest.engines.reference_faults import Fault
from raytest.engines.reference_numerics import DTYPES, VERSIONS, SumOrder
from raytest.engines.reference_weights import ModelShape
from raytest.errors import CellError

THREADS = "OMP_NUM_THREADS"
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
DEFAULT_MAX_MODEL_LEN = 2048
UNSET_THREADS = 4

# Engine argument -> its default. Others (those of vLLM) are accepted, have no effect, and show in
# the fingerprint, so that one variant table can serve both backends.
ARGUMENTS: Mapping[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 512,
    "eos_token_id": 2,
    "weights_seed": 0,
    "max_num_seqs": 256,
    "block_size": 16,
    "enable_prefix_caching": False,
    "batch_invariant": False,
    "reference_version": VERSIONS[0],
}
SHORT = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "intermediate": "intermediate_size",
}
FROM_MODEL = ("vocab_size", "eos_token_id")
SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Settings:
    """A reference engine, resolved. ``orders`` and ``environments`` have one entry per rank."""

    shape: ModelShape
    dtype: str
    max_model_len: int
    arguments: Mapping[str, Any]
    orders: tuple[SumOrder, ...]
    environments: tuple[Mapping[str, str], ...]

    @property
    def eos_token_id(self) -> int | None:
        """The id that ends a completion; None where the vocabulary has no such id."""
        eos = int(self.arguments["eos_token_id"])
        return eos if eos < self.shape.vocabulary else None

    @property
    def sampling_rank(self) -> int:
        """The first rank of the last stage: its logits are sampled from."""
        return self.shape.world_size - self.shape.tensor_parallel_size


def read_settings(config: EngineConfig, fault: Fault | None) -> Settings:
    """Resolve ``config`` with the fault planted. Raises :class:`CellError` for what cannot be."""
    arguments = _arguments(config)
    shape = ModelShape(
        layers=arguments["num_hidden_layers"],
        hidden=arguments["hidden_size"],
        heads=arguments["num_attention_heads"],
        intermediate=arguments["intermediate_size"],
        vocabulary=arguments["vocab_size"],
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )
    environments = tuple(_environment(config, fault, rank) for rank in range(shape.world_size))
    orders = tuple(
        _order(environment, arguments, fault, rank) for rank, environment in enumerate(environments)
    )
    return Settings(
        shape=shape,
        dtype=_dtype(config, fault),
        max_model_len=config.max_model_len or DEFAULT_MAX_MODEL_LEN,
        arguments=arguments,
        orders=orders,
        environments=environments,
    )


def _arguments(config: EngineConfig) -> dict[str, Any]:
    values = {**ARGUMENTS, **_model_config(config.model_path)}
    for key, value in config.engine_args.items():
        if key not in ARGUMENTS:
            near = difflib.get_close_matches(key, list(ARGUMENTS), n=1, cutoff=0.85)
            if key in SHORT or near:
                raise CellError(
                    f"engine argument {key!r} is unknown; "
                    f"did you mean {SHORT.get(key) or near[0]!r}?"
                )
            continue
        default = ARGUMENTS[key]
        if type(value) is not type(default):
            raise CellError(
                f"engine argument {key}: expected {type(default).__name__}, found {value!r}"
            )
        least = 0 if key in ("eos_token_id", "weights_seed") else 1
        if type(value) is int and value < least:
            raise CellError(f"engine argument {key}: expected {least} or more, found {value}")
        values[key] = value
    if values["reference_version"] not in VERSIONS:
        raise CellError(
            f"engine argument reference_version: expected one of {', '.join(VERSIONS)}, found "
            f"{values['reference_version']!r}"
        )
    return values


def _model_config(model_path: str) -> dict[str, int]:
    """Vocabulary and end of sequence of the model folder, so that its tokenizer's ids can be
    used."""
    path = Path(model_path) / "config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CellError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise CellError(f"{path}: expected a JSON object")
    return {key: found[key] for key in FROM_MODEL if type(found.get(key)) is int}


def _dtype(config: EngineConfig, fault: Fault | None) -> str:
    dtype = "float32" if config.dtype == "auto" else config.dtype
    if fault is not None and fault.name == "other_dtype":
        dtype = fault.value or ("bfloat16" if dtype == "float32" else "float32")
    if dtype not in DTYPES:
        raise CellError(f"dtype: expected one of auto, {', '.join(DTYPES)}, found {dtype!r}")
    return dtype


def _environment(config: EngineConfig, fault: Fault | None, rank: int) -> dict[str, str]:
    """Variables that reach a rank: the variant's, and of the process the two that have an
    effect."""
    inherited = {k: os.environ[k] for k in (THREADS, BATCH_INVARIANT) if k in os.environ}
    environment = {**inherited, **config.env}
    if fault is not None and fault.name == "env_unset" and (fault.rank or 0) == rank:
        environment.pop(fault.variable, None)
    return environment


def _order(
    environment: Mapping[str, str], arguments: Mapping[str, Any], fault: Fault | None, rank: int
) -> SumOrder:
    threads = _threads(environment)
    here = fault if fault is not None and (fault.rank or 0) == rank else None
    if here is not None and here.name == "env_unset" and here.variable == THREADS:
        threads = UNSET_THREADS if here.value is None else here.value
    return SumOrder(
        threads=threads,
        batch_invariant=arguments["batch_invariant"] or environment.get(BATCH_INVARIANT) == "1",
        version=arguments["reference_version"],
        reverse=here is not None and here.name == "reordered_reduction",
    )


def _threads(environment: Mapping[str, str]) -> int:
    """OMP_NUM_THREADS, whose first level counts where it lists several; 1 where it is unset."""
    text = environment.get(THREADS, "1")
    first = text.split(",")[0].strip()
    if not first.isdigit() or int(first) < 1:
        raise CellError(f"{THREADS}: expected a number of threads, found {text!r}")
    return int(first)


def fingerprint(
    config: EngineConfig, settings: Settings, fault: Fault | None, rank: int
) -> dict[str, str]:
    """Flat fingerprint of one rank. Secrets are left out; so is the fault, but not what it
    changes."""
    environment = settings.environments[rank]
    stage, tp_rank = divmod(rank, settings.shape.tensor_parallel_size)
    kept = {k: v for k, v in config.engine_args.items() if not SECRET.search(k)}
    table = {
        "rank": str(rank),
        "rank.stage": str(stage),
        "rank.tensor_parallel": str(tp_rank),
        "engine.backend": "reference",
        "engine.dtype": settings.dtype,
        "engine.seed": str(config.seed),
        "engine.tensor_parallel_size": str(config.tensor_parallel_size),
        "engine.pipeline_parallel_size": str(config.pipeline_parallel_size),
        "engine.max_model_len": str(settings.max_model_len),
        "engine.level": str(config.level),
        "engine.profile": config.profile,
        "reference.version": settings.arguments["reference_version"],
        "reference.threads": str(settings.orders[rank].threads),
        "reference.batch_invariant": str(settings.orders[rank].batch_invariant),
    }
    if rank < len(config.device_uuids):
        table["device.uuid"] = config.device_uuids[rank]
    table |= {f"engine.{k}": str(v) for k, v in {**settings.arguments, **kept}.items()}
    table |= {f"env.{k}": v for k, v in environment.items() if not SECRET.search(k)}
    return table | _input_digests(config, fault)


def _input_digests(config: EngineConfig, fault: Fault | None) -> dict[str, str]:
    """Digests of what stands for the tokenizer, the chat template and the generation config
    files."""
    changed: dict[str, object] = {}
    if fault is not None:
        changed[fault.name] = [fault.value, fault.temperature, fault.top_p]
    return {
        f"{name}.digest": json_digest(name, [config.tokenizer_path, changed.get(kind)])
        for name, kind in (
            ("tokenizer", "other_tokenizer"),
            ("chat_template", "chat_template"),
            ("generation_config", "generation_config"),
        )
    }
