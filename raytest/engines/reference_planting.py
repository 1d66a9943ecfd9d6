"""Planted faults at work inside the reference engine's arithmetic.

Each method is the identity unless the engine's fault is of the kind it plants, at that module, rank
and step; nothing before the module named can differ.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from raytest.engines.reference_cache import BlockPool
from raytest.engines.reference_faults import Fault
from raytest.engines.reference_numerics import Array, dtype_bits, flip_bit
from raytest.engines.reference_weights import PRODUCTS, ROW_PARALLEL, ModelShape, base_name
from raytest.errors import CellError

STRIPE = 32
DEFAULT_MODULE = "mlp.down_proj"
WEIGHT_KINDS = ("weight_bit_flip", "weight_bits")


class Planting:
    """Where in the model the fault sits. Raises :class:`CellError` for a place that doesn't
    exist."""

    def __init__(self, fault: Fault | None, shape: ModelShape) -> None:
        self._fault = fault
        self._shape = shape
        self.step = 0
        self.module: str | None = None
        self.tp_rank = 0
        if fault is not None:
            self._locate(fault)

    def _locate(self, fault: Fault) -> None:
        rank = fault.rank or 0
        if rank >= self._shape.world_size:
            raise CellError(
                f"fault.rank: {rank}, but the last rank is {self._shape.world_size - 1}"
            )
        stage, self.tp_rank = divmod(rank, self._shape.tensor_parallel_size)
        if "layer" not in fault.kind.parameters:
            return
        names = self._shape.module_names()
        default = "self_attn.attn" if fault.name == "stale_kv_block" else DEFAULT_MODULE
        module = fault.module or default
        if module not in names:
            module = f"layers.{self._layer(fault, stage)}.{module}"
        if module not in names:
            near = difflib.get_close_matches(
                str(fault.module), [*names, *map(base_name, names)], n=1
            )
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise CellError(f"fault.module: no module {fault.module!r}{hint}")
        if self._shape.stage(module) != stage:
            raise CellError(
                f"fault: {module} is on stage {self._shape.stage(module)}, not on rank {rank}"
            )
        self.module = module
        self._check_kind(fault)

    def _layer(self, fault: Fault, stage: int) -> int:
        if fault.layer is None:
            return next(
                i for i in range(self._shape.layers) if self._shape.stage(f"layers.{i}.") == stage
            )
        if fault.layer >= self._shape.layers:
            raise CellError(f"fault.layer: {fault.layer}, but the last is {self._shape.layers - 1}")
        return fault.layer

    def _check_kind(self, fault: Fault) -> None:
        name = base_name(self.module or "")
        if fault.name.startswith("allreduce") and name not in ROW_PARALLEL:
            raise CellError(
                f"fault.module: {name} has no all-reduce; {' and '.join(ROW_PARALLEL)} have"
            )
        if fault.name == "stuck_accumulator" and name not in PRODUCTS:
            raise CellError(
                f"fault.module: {name} is no matrix product; expected {', '.join(PRODUCTS)}"
            )

    def _here(self, kind: str, module: str) -> Fault | None:
        fault = self._fault
        if (
            fault is None
            or fault.name != kind
            or module != self.module
            or not fault.acts(self.step)
        ):
            return None
        return fault

    def weights(self, weights: Mapping[str, Array], dtype: str) -> None:
        """Flip bits of the loaded weights, in place."""
        fault = self._fault
        if fault is None or fault.name not in WEIGHT_KINDS:
            return
        if self.module is None or self.module not in weights:
            raise CellError(f"fault.module: {self.module} has no weights")
        shard = weights[self.module][self.tp_rank]
        bit = dtype_bits(dtype) - 3 if fault.bit is None else fault.bit
        count = 1
        if fault.name == "weight_bits":
            count = 8 if fault.value is None else fault.value
        if bit >= dtype_bits(dtype):
            raise CellError(f"fault.bit: {bit}, but {dtype} has {dtype_bits(dtype)} bits")
        if count < 1 or fault.index + count > shard.size:
            raise CellError(
                f"fault.index: elements {fault.index} to {fault.index + count - 1}, "
                f"but the shard has {shard.size}"
            )
        for index in range(fault.index, fault.index + count):
            flip_bit(shard, index, bit, dtype)

    def accumulator(self, module: str, out: Array, requests: npt.NDArray[np.int64]) -> None:
        """A column of a product is stuck. ``out`` [ranks, rows, columns], in place."""
        fault = self._here("stuck_accumulator", module)
        if fault is not None:
            rows = _rows_of(fault, requests)
            column = fault.index % out.shape[2]
            out[self.tp_rank, rows, column] = 1.0 if fault.value is None else fault.value

    def contributions(self, module: str, partial: Array) -> list[int]:
        """The ranks whose partial sums are added in an all-reduce, in order."""
        ranks = list(range(partial.shape[0]))
        if self._here("allreduce_drop", module):
            ranks.remove(self.tp_rank)
        if self._here("allreduce_double", module):
            ranks.insert(self.tp_rank, self.tp_rank)
        if self._fault is not None and self._fault.name == "reordered_reduction":
            ranks.reverse()
        return ranks

    def output(
        self, module: str, out: Array, requests: npt.NDArray[np.int64], *, decode: bool
    ) -> None:
        """What a module hands on, on one rank. ``out`` [ranks, rows, columns], in place."""
        fault = self._here("activation_stripe", module)
        if fault is not None:
            start = fault.index * STRIPE % max(STRIPE, out.shape[2] // STRIPE * STRIPE)
            rows = _rows_of(fault, requests)
            factor = np.float32(0.5 if fault.value is None else fault.value)
            out[self.tp_rank, rows, start : start + STRIPE] *= factor
        fault = self._here("nan_row", module)
        if fault is not None and fault.request is not None:
            out[self.tp_rank, _rows_of(fault, requests)] = np.nan
        elif fault is not None and decode and fault.index < out.shape[1]:
            out[self.tp_rank, fault.index] = np.nan

    def prepare_cache(self, pool: BlockPool) -> None:
        """Let the blocks of the faulty layer and rank keep what they held."""
        if self._fault is not None and self._fault.name == "stale_kv_block" and self.module:
            pool.kept_dirty = (int(self.module.split(".")[1]), self.tp_rank)

    def stale_rows(
        self,
        module: str,
        positions: npt.NDArray[np.int64],
        requests: npt.NDArray[np.int64],
        block_size: int,
    ) -> npt.NDArray[np.bool_] | None:
        """Rows whose keys and values the rank does not write; None for none."""
        fault = self._here("stale_kv_block", module)
        if fault is None:
            return None
        stale: npt.NDArray[np.bool_] = positions // block_size == fault.index
        return stale & _rows_of(fault, requests)


def _rows_of(fault: Fault, requests: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    if fault.request is None:
        return np.ones(len(requests), dtype=np.bool_)
    hit: npt.NDArray[np.bool_] = requests == fault.request
    return hit
