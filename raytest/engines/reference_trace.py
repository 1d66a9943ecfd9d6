"""What each module of the reference engine took in and handed on, for localisation."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from raytest.digest import array_digest
from raytest.engines.reference_model import Indices, Rows, is_replicated
from raytest.engines.reference_numerics import Array
from raytest.engines.reference_weights import ModelShape


@dataclass(frozen=True, slots=True)
class ModuleTrace:
    """One module on one global rank, over the positions of one sequence in order.

    Digests are hex: of all rows together, and per position. ``replicated`` outputs are the same on
    every rank of a healthy stage and comparable across TP sizes; others are the rank's shard.
    ``inputs`` and ``outputs`` are float32 [positions, columns] where the module was asked for.
    """

    name: str
    rank: int
    replicated: bool
    positions: tuple[int, ...]
    input_digest: str
    output_digest: str
    input_digests: tuple[str, ...]
    output_digests: tuple[str, ...]
    inputs: Array | None = None
    outputs: Array | None = None


class Recorder:
    """A probe for :class:`raytest.engines.reference_model.Model` that keeps one sequence's rows."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._seen: dict[str, list[tuple[Indices, Array, Array]]] = {}

    def __call__(self, module: str, x: Array, out: Array, rows: Rows, selected: Indices) -> None:
        """Keep what belongs to the sequence; ``selected`` are the rows that ``x`` and ``out``
        hold."""
        mine = np.flatnonzero(rows.sequences[selected] == self._sequence)
        if len(mine):
            positions = rows.positions[selected[mine]]
            kept = (positions, x[:, mine].copy(), out[:, mine].copy())
            self._seen.setdefault(module, []).append(kept)

    @property
    def seen(self) -> dict[str, list[tuple[Indices, Array, Array]]]:
        """Module -> its calls: positions [rows], input and output [ranks, rows, columns]."""
        return self._seen

    def traces(self, shape: ModelShape, modules: Collection[str]) -> list[ModuleTrace]:
        """Module by module in execution order, rank by rank; tensors only for ``modules``."""
        found = []
        for name in shape.module_names():
            calls = self._seen.get(name, [])
            if not calls:
                continue
            positions = np.concatenate([c[0] for c in calls])
            inputs = np.concatenate([c[1] for c in calls], axis=1)
            outputs = np.concatenate([c[2] for c in calls], axis=1)
            first = shape.stage(name) * shape.tensor_parallel_size
            for r in range(outputs.shape[0]):
                keep = name in modules
                found.append(_trace(name, first + r, positions, inputs[r], outputs[r], keep=keep))
        return found


def _trace(
    name: str, rank: int, positions: Indices, inputs: Array, outputs: Array, *, keep: bool
) -> ModuleTrace:
    return ModuleTrace(
        name=name,
        rank=rank,
        replicated=is_replicated(name),
        positions=tuple(int(p) for p in positions),
        input_digest=array_digest("activation", inputs).hex(),
        output_digest=array_digest("activation", outputs).hex(),
        input_digests=tuple(array_digest("activation", row).hex() for row in inputs),
        output_digests=tuple(array_digest("activation", row).hex() for row in outputs),
        inputs=inputs if keep else None,
        outputs=outputs if keep else None,
    )
