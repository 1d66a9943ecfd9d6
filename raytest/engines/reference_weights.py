"""The reference engine's model: its size, its modules in execution order, and its weights from a
seed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from raytest.digest import digest_bytes
from raytest.engines.reference_numerics import Array, round_to
from raytest.errors import CellError

LAYER_MODULES = (
    "input_layernorm",
    "self_attn.qkv_proj",
    "self_attn.attn",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up_proj",
    "mlp.act_fn",
    "mlp.down_proj",
)
ROW_PARALLEL = ("self_attn.o_proj", "mlp.down_proj")
PRODUCTS = (
    "self_attn.qkv_proj",
    "self_attn.o_proj",
    "mlp.gate_up_proj",
    "mlp.down_proj",
    "lm_head",
)
# Modules whose output every rank of a stage holds in full.
REPLICATED = (
    "embed_tokens",
    "input_layernorm",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.down_proj",
    "norm",
)
# Standard deviation of the logits: wide enough that most top-1/top-2 margins exceed rounding.
LOGIT_SCALE = 3.0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of the model and how it is cut. ``heads`` have ``hidden // heads`` elements each."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    intermediate: int = 128
    vocabulary: int = 512
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    def __post_init__(self) -> None:
        tp = self.tensor_parallel_size
        if self.hidden % (2 * self.heads):
            raise CellError(
                f"hidden_size {self.hidden} cannot be cut into {self.heads} attention heads "
                "of even size"
            )
        for name, value in (
            ("num_attention_heads", self.heads),
            ("intermediate_size", self.intermediate),
        ):
            if value % tp:
                raise CellError(f"tensor_parallel_size {tp} does not divide {name} {value}")
        if self.pipeline_parallel_size > self.layers:
            raise CellError(
                f"pipeline_parallel_size {self.pipeline_parallel_size} is more than "
                f"num_hidden_layers {self.layers}"
            )

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def vocabulary_shard(self) -> int:
        """Token ids per rank; the last rank's shard is padded."""
        return -(-self.vocabulary // self.tensor_parallel_size)

    @property
    def world_size(self) -> int:
        """Ranks: stage * TP size + TP rank."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def stage(self, module: str) -> int:
        """The pipeline stage that holds ``module``."""
        if module == "embed_tokens":
            return 0
        if not module.startswith("layers."):
            return self.pipeline_parallel_size - 1
        return int(module.split(".")[1]) * self.pipeline_parallel_size // self.layers

    def module_names(self) -> tuple[str, ...]:
        """Every module, in execution order."""
        layers = (f"layers.{i}.{name}" for i in range(self.layers) for name in LAYER_MODULES)
        return ("embed_tokens", *layers, "norm", "lm_head")


def base_name(module: str) -> str:
    """``mlp.down_proj`` of ``layers.1.mlp.down_proj``; others as they are."""
    return module.split(".", 2)[2] if module.startswith("layers.") else module


def make_weights(shape: ModelShape, seed: int, dtype: str) -> dict[str, Array]:
    """Weights by module, cut by rank: [ranks, in, out] (embedding: [ranks, ids, hidden]; norms:
    [ranks, hidden]), rounded to ``dtype``. The full tensors depend on the seed and the sizes
    alone."""
    tp, hidden, inner = shape.tensor_parallel_size, shape.hidden, shape.intermediate
    weights: dict[str, Array] = {}
    for module in shape.module_names():
        name = base_name(module)
        if name.endswith("norm"):
            full = 1.0 + 0.1 * _uniform(seed, module, (hidden,), 1.0)
            cut = np.repeat(full[None], tp, axis=0)
        elif name == "embed_tokens":
            cut = _vocabulary_rows(shape, _uniform(seed, module, (shape.vocabulary, hidden), 1.0))
        elif name == "lm_head":
            std = LOGIT_SCALE / math.sqrt(hidden)
            full = _uniform(seed, module, (shape.vocabulary, hidden), std)
            cut = _vocabulary_rows(shape, full).transpose(0, 2, 1)
        elif name == "self_attn.qkv_proj":
            full = _uniform(seed, module, (hidden, 3, hidden), 1.0 / math.sqrt(hidden))
            cut = _columns(full, tp)
        elif name == "mlp.gate_up_proj":
            full = _uniform(seed, module, (hidden, 2, inner), 1.0 / math.sqrt(hidden))
            cut = _columns(full, tp)
        elif name in ROW_PARALLEL:
            k = hidden if name == "self_attn.o_proj" else inner
            cut = _uniform(seed, module, (k, hidden), 1.0 / math.sqrt(k)).reshape(
                tp, k // tp, hidden
            )
        else:
            continue
        weights[module] = round_to(np.ascontiguousarray(cut, dtype=np.float32), dtype).copy()
    return weights


def _uniform(seed: int, module: str, shape: tuple[int, ...], std: float) -> Array:
    """Uniform values from PCG64's raw stream, which numpy guarantees (its distributions it
    doesn't)."""
    key = digest_bytes("reference-weights", str(seed).encode(), module.encode())
    raw = np.random.PCG64(int.from_bytes(key[:8], "little")).random_raw(math.prod(shape))
    unit = (raw >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-22) - np.float32(1.0)
    scaled: Array = unit.reshape(shape) * np.float32(std * math.sqrt(3.0))
    return scaled


def _columns(full: Array, tp: int) -> Array:
    """[in, parts, out] -> [ranks, in, parts * out / ranks]: each rank has its share of every
    part."""
    k, parts, out = full.shape
    cut = full.reshape(k, parts, tp, out // tp).transpose(2, 0, 1, 3)
    return cut.reshape(tp, k, parts * out // tp)


def _vocabulary_rows(shape: ModelShape, full: Array) -> Array:
    padded = np.zeros(
        (shape.tensor_parallel_size * shape.vocabulary_shard, shape.hidden), np.float32
    )
    padded[: shape.vocabulary] = full
    return padded.reshape(shape.tensor_parallel_size, shape.vocabulary_shard, shape.hidden)
