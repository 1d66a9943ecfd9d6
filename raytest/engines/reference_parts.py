"""The reference engine's probe as the parts of a trace, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raytest.engines.reference_model import PARTIAL, Indices, is_replicated
from raytest.engines.reference_numerics import Array
from raytest.engines.reference_trace import Recorder
from raytest.engines.reference_weights import ROW_PARALLEL, ModelShape, base_name
from raytest.engines.row_digest import row_digests, slice_columns
from raytest.engines.trace import Layout, Part, TraceJob

# Class names of the modules in vLLM that the reference engine's stand for.
KINDS = {
    "embed_tokens": "VocabParallelEmbedding",
    "self_attn.qkv_proj": "QKVParallelLinear",
    "self_attn.attn": "Attention",
    "self_attn.o_proj": "RowParallelLinear",
    "mlp.gate_up_proj": "MergedColumnParallelLinear",
    "mlp.act_fn": "SiluAndMul",
    "mlp.down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
# How many tensors, each cut among the ranks on its own, lie side by side in a part.
MERGED = {
    ("self_attn.qkv_proj", "output"): 3,
    ("self_attn.attn", "input"): 3,
    ("mlp.gate_up_proj", "output"): 2,
    ("mlp.act_fn", "input"): 2,
}


def parts_of(recorder: Recorder, shape: ModelShape, dtype: str, job: TraceJob) -> list[Part]:
    """What ``recorder`` saw of the job's request, in execution order.

    A prompt is one forward pass, each later position one more.
    """
    requests = {r.request_id: r for batch in job.batches for r in batch}
    n_prompt = len(requests[job.request_id].prompt_token_ids)
    parts: list[Part] = []
    for index, module in enumerate(shape.module_names()):
        for place, (name, part) in enumerate(
            ((module, "input"), (module + PARTIAL, "partial"), (module, "output"))
        ):
            calls = recorder.seen.get(name, [])
            if not calls:
                continue
            positions = np.concatenate([c[0] for c in calls])
            tensor = np.concatenate([c[1 if part == "input" else 2] for c in calls], axis=1)
            known = np.flatnonzero(positions < len(job.token_ids))
            # token ids are no numbers of the engine's dtype
            ids = (module, part) == ("embed_tokens", "input")
            seen = _Seen(module, part, 3 * index + place, "float32" if ids else dtype,
                         positions[known], n_prompt)  # fmt: skip
            keep = job.keep.get(module, ())
            parts += [_part(shape, seen, r, rows[known], keep) for r, rows in enumerate(tensor)]
    return parts


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the ranks' parts have in common."""

    module: str
    part: str
    order: int
    dtype: str
    positions: Indices
    n_prompt: int


def _part(shape: ModelShape, seen: _Seen, rank: int, rows: Array, keep: tuple[int, ...]) -> Part:
    size, stage = shape.tensor_parallel_size, shape.stage(seen.module)
    bits = _bits(rows, seen.dtype)
    name = base_name(seen.module)
    layout = _layout(name, seen.part)
    columns = None
    if layout is Layout.SLICE:
        count = MERGED.get((name, seen.part), 1)
        columns = slice_columns(rank, size, [bits.shape[1] // count] * count)
    kept = np.flatnonzero(np.isin(seen.positions, keep))
    return Part(
        module=seen.module,
        kind=KINDS.get(name, "RMSNorm"),
        part=seen.part,
        rank=stage * size + rank,
        tensor_parallel_rank=rank,
        tensor_parallel_size=size,
        stage=stage,
        order=seen.order,
        layout=layout,
        dtype=seen.dtype,
        columns=bits.shape[1],
        positions=seen.positions.astype(np.int32),
        steps=np.maximum(seen.positions - seen.n_prompt + 1, 0).astype(np.int32),
        digests=row_digests(bits, columns),
        value_positions=seen.positions[kept].astype(np.int32) if len(kept) else None,
        values=bits[kept] if len(kept) else None,
    )


def _layout(name: str, part: str) -> Layout:
    if part == "partial":
        return Layout.SUMMAND
    if name == "lm_head":
        return Layout.WHOLE if part == "input" else Layout.SHARD
    if part == "output":
        return Layout.WHOLE if is_replicated(name) else Layout.SLICE
    cut = (*ROW_PARALLEL, "self_attn.attn", "mlp.act_fn")
    return Layout.SLICE if name in cut else Layout.WHOLE


def _bits(rows: Array, dtype: str) -> npt.NDArray[Any]:
    """The engine keeps every dtype's numbers in float32; a trace holds the dtype's own bits."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(rows).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype == "float16":
        return rows.astype(np.float16).view(np.uint16)
    return np.ascontiguousarray(rows).view(np.uint32)
