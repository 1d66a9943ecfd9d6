"""What the modules of an engine took in and handed on while one request ran, as plain values.

Every engine fills the same :class:`Part`; who compares two traces need not know which engine made
them. A row is one position of the traced request: token p of its prompt and completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from raytest.engines.base import Completion, Request

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Layout(StrEnum):
    """What a rank holds of a tensor.

    WHOLE: all of it, the same on every rank of a healthy stage. SLICE: its own columns, digested
    at their places in the whole, so that the ranks' digests add up to the whole's. SHARD: its own
    columns, numbered from 0. SUMMAND: a term that an all-reduce has yet to add. UNKNOWN: the module
    is of no known kind; its width and its ranks' agreement must tell.
    """

    WHOLE = "whole"
    SLICE = "slice"
    SHARD = "shard"
    SUMMAND = "summand"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor that a module took in or handed on, on one rank.

    ``part`` is ``input``, ``partial`` (before an all-reduce) or ``output``, with ``.1``, ``.2``, …
    for the further tensors of a tuple. ``order`` numbers what happens in one forward pass of the
    stage. ``positions`` and ``steps`` are int32 [rows], ascending by position; ``steps`` counts
    the forward passes. ``digests`` is uint64 [rows, 2]. ``values`` holds the bits of the rows
    ``value_positions`` as unsigned integers [kept rows, columns], where they were asked for.
    """

    module: str
    kind: str
    part: str
    rank: int
    tensor_parallel_rank: int
    tensor_parallel_size: int
    stage: int
    order: int
    layout: Layout
    dtype: str
    columns: int
    positions: npt.NDArray[np.int32]
    steps: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint64]
    value_positions: npt.NDArray[np.int32] | None = None
    values: npt.NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """All parts of one pass, and what the hooks had to leave out (``notes``).

    ``completions`` are what the traced pass returned: hooks must not have changed them.
    """

    parts: list[Part]
    notes: list[str] = field(default_factory=list)
    completions: list[Completion] = field(default_factory=list)

    def positions(self) -> set[int]:
        """Positions of the request that at least one module saw."""
        return {int(p) for part in self.parts for p in part.positions}


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One traced pass: the batches as the arrangement makes them, and whose rows to keep.

    ``token_ids`` are prompt and completion of the traced sample as far as both sides agree; rows
    past them are left out. ``keep`` names, by module, the positions whose tensors come back whole.
    ``limit_bytes`` bounds what one rank holds of them.
    """

    batches: tuple[tuple[Request, ...], ...]
    request_id: str
    token_ids: tuple[int, ...]
    seed: int
    keep: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    limit_bytes: int = 64 * 1024 * 1024
    sample_index: int = 0

    def options(self) -> dict[str, Any]:
        """What a rank must know, in plain values."""
        return {
            "token_ids": list(self.token_ids),
            "keep": {module: list(at) for module, at in self.keep.items()},
            "limit_bytes": self.limit_bytes,
        }


def trace_of(ranks: Sequence[Mapping[str, Any]], completions: list[Completion]) -> Trace:
    """The trace that the ranks' replies (``parts`` and ``notes``, plain values) make up."""
    notes = sorted({note for rank in ranks for note in rank["notes"]})
    return Trace([part_from_reply(p) for rank in ranks for p in rank["parts"]], notes, completions)


def part_from_reply(reply: Mapping[str, Any]) -> Part:
    """A part as a rank sends it (numbers, text and little-endian bytes) as arrays."""
    import numpy as np

    rows: dict[str, Any] = {
        "positions": np.frombuffer(reply["positions"], dtype="<i4"),
        "steps": np.frombuffer(reply["steps"], dtype="<i4"),
        "digests": np.frombuffer(reply["digests"], dtype="<u8").reshape(-1, 2),
    }
    value_positions = values = None
    if reply["values"]:
        value_positions = np.frombuffer(reply["value_positions"], dtype="<i4")
        width = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}[int(reply["element_bytes"])]
        values = np.frombuffer(reply["values"], dtype=width).reshape(len(value_positions), -1)
    names = (
        "module", "kind", "part", "rank", "tensor_parallel_rank", "tensor_parallel_size", "stage",
        "order", "dtype", "columns",
    )  # fmt: skip
    return Part(
        **{n: reply[n] for n in names},
        layout=Layout(reply["layout"]),
        **rows,
        value_positions=value_positions,
        values=values,
    )


def decoded(part: Part) -> npt.NDArray[np.float64]:
    """The kept rows as numbers, float64 [kept rows, columns]; exact for every float dtype."""
    import numpy as np

    assert part.values is not None
    bits = part.values
    if part.dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    kinds = {"float32": np.float32, "float16": np.float16, "float64": np.float64}
    if part.dtype in kinds:
        return bits.view(kinds[part.dtype]).astype(np.float64)
    return bits.astype(np.float64)


def missing_positions(trace: Trace, token_ids: Sequence[int]) -> list[int]:
    """Positions of the traced request that no module saw (the cache held them, or the replay took
    another way)."""
    seen = trace.positions()
    return [p for p in range(len(token_ids)) if p not in seen]
