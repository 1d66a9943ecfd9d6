"""What one vLLM rank holds of a module's tensors, told from the module's class and settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytest.engines.row_digest import slice_columns
from raytest.engines.trace import Layout

WHOLE_KINDS = {"ReplicatedLinear", "VocabParallelEmbedding", "LogitsProcessor"}
PARALLEL_KINDS = {"RowParallelLinear", "ColumnParallelLinear"}
NORMS = {"RMSNorm", "GemmaRMSNorm", "LayerNorm"}


@dataclass(frozen=True, slots=True)
class Held:
    """A layout; for a slice also whose it is and how wide each partition is on one rank."""

    layout: Layout
    rank: int = 0
    size: int = 1
    partitions: tuple[int, ...] = ()

    def places(self, columns: int) -> npt.NDArray[np.uint64]:
        """Column numbers that the digest counts by, uint64 [columns]."""
        if self.layout is Layout.SLICE:
            return slice_columns(self.rank, self.size, self.partitions)
        return np.arange(columns, dtype=np.uint64)


def kinds_of(module: Any) -> set[str]:
    """Names of the module's class and its bases: subclasses count as what they specialise."""
    return {c.__name__ for c in type(module).__mro__}


def held(module: Any, part: str, columns: int, hidden_size: int) -> Held:
    """What the rank holds of ``part`` (as in :class:`raytest.engines.trace.Part`) of ``module``."""
    kinds = kinds_of(module)
    if part == "partial":
        return Held(Layout.SUMMAND)
    if "ParallelLMHead" in kinds:
        return Held(Layout.WHOLE if part == "input" else Layout.SHARD)
    if "RowParallelLinear" in kinds:
        return _row_parallel(module, part, columns)
    if "ColumnParallelLinear" in kinds and part == "output" and not module.gather_output:
        return _columns(module, columns)
    if kinds & (WHOLE_KINDS | PARALLEL_KINDS):
        return Held(Layout.WHOLE)
    if kinds & NORMS and columns == hidden_size:
        return Held(Layout.WHOLE)
    return Held(Layout.UNKNOWN)


def _row_parallel(module: Any, part: str, columns: int) -> Held:
    if part == "input" and module.input_is_parallel:
        return Held(Layout.SLICE, int(module.tp_rank), int(module.tp_size), (columns,))
    if part == "output" and module.tp_size > 1 and not module.reduce_results:
        return Held(Layout.SUMMAND)
    return Held(Layout.WHOLE)


def _columns(module: Any, columns: int) -> Held:
    """Merged projections are cut each on its own; heads that several ranks share add up to more
    than the whole."""
    widths = tuple(int(w) for w in module.output_partition_sizes)
    if sum(widths) != columns or getattr(module, "num_kv_head_replicas", 1) != 1:
        return Held(Layout.SHARD)
    return Held(Layout.SLICE, int(module.tp_rank), int(module.tp_size), widths)
