"""A small causal transformer on simulated ranks, for whole steps at a time.

Activations are [ranks, rows, columns]: every tensor-parallel rank has its own copy of what is
replicated, so a fault on one rank stays on that rank until something is reduced. Pipeline stages
follow one another and change no number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raytest.engines.reference_cache import BlockPool
from raytest.engines.reference_numerics import (
    ELEMENTS_AT_ONCE,
    Array,
    SumOrder,
    add_along_first,
    exp,
    fold_sum,
    product,
    round_to,
)
from raytest.engines.reference_planting import Planting
from raytest.engines.reference_weights import REPLICATED, ModelShape, base_name

Indices = npt.NDArray[np.int64]
# What a probe is told after the name of a module whose product is yet to be reduced.
PARTIAL = ":partial"
EPSILON = np.float32(1e-6)
ROPE_BASE = 10000.0


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one call. ``tables`` is [rows, blocks], or [1, blocks] for a prefill, whose rows
    are positions of one sequence. ``wanted`` are the rows whose logits are needed."""

    token_ids: Indices
    positions: Indices
    requests: Indices
    sequences: Indices
    tables: Indices
    wanted: Indices
    decode: bool


Probe = Callable[[str, Array, Array, Rows, Indices], None]


class Model:
    """Weights, cache and the order of every sum. ``orders`` has one entry per global rank.

    ``probe``, where set, is called with each module's name, input, output, and the rows they are
    of.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: dict[str, Array],
        pool: BlockPool,
        orders: Sequence[SumOrder],
        dtype: str,
        planting: Planting,
        max_positions: int,
    ) -> None:
        self.shape = shape
        self.pool = pool
        self.planting = planting
        self.probe: Probe | None = None
        self._weights = weights
        self._orders = orders
        self._dtype = dtype
        self._cos, self._sin = _rope_tables(max_positions, shape.head_size)

    def forward(self, rows: Rows) -> Array:
        """Logits, float32 [wanted rows, vocabulary], as the sampling rank gathers them."""
        hidden = self._embed(rows)
        residual: Array | None = None
        for layer in range(self.shape.layers):
            name = f"layers.{layer}."
            x, residual = self._norm(name + "input_layernorm", hidden, residual, rows)
            x = self._column_parallel(name + "self_attn.qkv_proj", x, rows)
            x = self._attention(layer, x, rows)
            x = self._row_parallel(name + "self_attn.o_proj", x, rows)
            x, residual = self._norm(name + "post_attention_layernorm", x, residual, rows)
            x = self._column_parallel(name + "mlp.gate_up_proj", x, rows)
            x = self._activation(name + "mlp.act_fn", x, rows)
            hidden = self._row_parallel(name + "mlp.down_proj", x, rows)
        x, _ = self._norm("norm", hidden, residual, rows)
        logits = self._lm_head(x, rows)
        gathered: Array = np.concatenate(list(logits), axis=-1)[:, : self.shape.vocabulary]
        return gathered

    def _finish(
        self, module: str, x: Array, out: Array, rows: Rows, of: Indices | None = None
    ) -> Array:
        selected = np.arange(len(rows.positions)) if of is None else of
        self.planting.output(module, out, rows.requests[selected], decode=rows.decode)
        if self.probe is not None:
            self.probe(module, x, out, rows, selected)
        return out

    def _embed(self, rows: Rows) -> Array:
        table = self._weights["embed_tokens"]
        owner, local = np.divmod(rows.token_ids, self.shape.vocabulary_shard)
        looked_up = table[owner, local]
        out: Array = np.repeat(looked_up[None], table.shape[0], axis=0)
        ids = rows.token_ids.astype(np.float32)[None, :, None]
        return self._finish("embed_tokens", np.repeat(ids, table.shape[0], axis=0), out, rows)

    def _norm(
        self, module: str, x: Array, residual: Array | None, rows: Rows
    ) -> tuple[Array, Array]:
        residual = x if residual is None else round_to(x + residual, self._dtype)
        mean = fold_sum(residual * residual) / np.float32(self.shape.hidden)
        scaled = residual / np.sqrt(mean + EPSILON)[..., None]
        out = round_to(scaled * self._weights[module][:, None, :], self._dtype)
        return self._finish(module, residual, out, rows), residual

    def _products(self, module: str, x: Array) -> Array:
        """The product on every rank of the module's stage, each in its own order."""
        weights = self._weights[module]
        tp = self.shape.tensor_parallel_size
        first = self.shape.stage(module) * tp
        orders = self._orders[first : first + tp]
        if len(set(orders)) == 1:
            return product(x, weights, orders[0])
        shards = [product(x[r : r + 1], weights[r : r + 1], orders[r]) for r in range(tp)]
        return np.concatenate(shards)

    def _column_parallel(self, module: str, x: Array, rows: Rows) -> Array:
        out = round_to(self._products(module, x), self._dtype)
        self.planting.accumulator(module, out, rows.requests)
        return self._finish(module, x, out, rows)

    def _row_parallel(self, module: str, x: Array, rows: Rows) -> Array:
        partial = round_to(self._products(module, x), self._dtype)
        self.planting.accumulator(module, partial, rows.requests)
        if self.probe is not None and partial.shape[0] > 1:
            self.probe(module + PARTIAL, x, partial, rows, np.arange(len(rows.positions)))
        total = np.zeros_like(partial[0])
        for rank in self.planting.contributions(module, partial):
            total = total + partial[rank]
        reduced = np.repeat(round_to(total, self._dtype)[None], partial.shape[0], axis=0)
        return self._finish(module, x, reduced, rows)

    def _activation(self, module: str, x: Array, rows: Rows) -> Array:
        half = x.shape[-1] // 2
        gate, up = x[..., :half], x[..., half:]
        silu = round_to(gate / (np.float32(1.0) + exp(-gate)), self._dtype)
        return self._finish(module, x, round_to(silu * up, self._dtype), rows)

    def _lm_head(self, x: Array, rows: Rows) -> Array:
        x = x[:, rows.wanted]
        out = round_to(self._products("lm_head", x), self._dtype)
        self.planting.accumulator("lm_head", out, rows.requests[rows.wanted])
        return self._finish("lm_head", x, out, rows, rows.wanted)

    def _attention(self, layer: int, qkv: Array, rows: Rows) -> Array:
        ranks, n, _ = qkv.shape
        heads = self.shape.heads // self.shape.tensor_parallel_size
        module = f"layers.{layer}.self_attn.attn"
        q, k, v = qkv.reshape(ranks, n, 3, heads, self.shape.head_size).transpose(2, 0, 1, 3, 4)
        q, k = self._rotate(q, rows.positions), self._rotate(k, rows.positions)
        self._write(module, layer, k, v, rows)
        keys = self.pool.keys[layer][:, rows.tables]
        values = self.pool.values[layer][:, rows.tables]
        out = np.empty_like(q)
        at_once = max(1, ELEMENTS_AT_ONCE // (keys[:, 0].size or 1)) if len(rows.tables) == 1 else n
        for row in range(0, n, at_once):
            some = slice(row, row + at_once)
            out[:, some] = attend(q[:, some], keys, values, rows.positions[some])
        out = round_to(out, self._dtype)
        return self._finish(module, qkv, out.reshape(ranks, n, -1), rows)

    def _rotate(self, x: Array, positions: Indices) -> Array:
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        half = x.shape[-1] // 2
        first, second = x[..., :half], x[..., half:]
        turned = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        return round_to(turned, self._dtype)

    def _write(self, module: str, layer: int, k: Array, v: Array, rows: Rows) -> None:
        size = self.pool.block_size
        tables = np.broadcast_to(rows.tables, (len(rows.positions), rows.tables.shape[1]))
        blocks = tables[np.arange(len(rows.positions)), rows.positions // size]
        offsets = rows.positions % size
        stale = self.planting.stale_rows(module, rows.positions, rows.requests, size)
        for rank in range(k.shape[0]):
            write = np.ones(len(blocks), dtype=np.bool_)
            if stale is not None and rank == self.planting.tp_rank:
                write = ~stale
            at, offset = blocks[write], offsets[write]
            self.pool.keys[layer][rank, at, :, :, offset] = k[rank, write]
            self.pool.values[layer][rank, at, :, offset] = v[rank, write]


def attend(q: Array, keys: Array, values: Array, positions: Indices) -> Array:
    """Causal attention of ``q`` [ranks, rows, heads, size] over ``keys`` [ranks, rows or 1, blocks,
    heads, size, block] and ``values`` [.., blocks, heads, block, size]; the same shape as ``q``.

    A row's sums run inside each block, then over the blocks, so a longer table that pads the row
    (with zeros) changes none of its bits.
    """
    size = q.shape[-1]
    n_blocks, block = keys.shape[2], keys.shape[-1]
    scores = np.add.reduce(q[:, :, None, :, :, None] * keys, axis=-2)
    scores *= np.float32(1.0 / math.sqrt(size))
    at = np.arange(n_blocks * block).reshape(n_blocks, 1, block)
    seen = at <= positions[:, None, None, None]
    top = np.where(seen, scores, np.float32(-np.inf)).max(axis=(2, 4), keepdims=True)
    p = np.where(seen, exp(scores - top), np.float32(0.0))
    weighted = np.add.reduce(p[..., None] * values, axis=-2)
    total = add_along_first(weighted.transpose(2, 0, 1, 3, 4))
    weight = add_along_first(fold_sum(p).transpose(2, 0, 1, 3))
    quotient: Array = total / weight[..., None]
    return quotient


def is_replicated(module: str) -> bool:
    """Whether every rank of the stage holds the module's whole output."""
    return base_name(module) in REPLICATED


def _rope_tables(positions: int, head_size: int) -> tuple[Array, Array]:
    angles = [
        [p * ROPE_BASE ** (-2.0 * i / head_size) for i in range(head_size // 2)]
        for p in range(positions)
    ]
    cos = np.array([[math.cos(a) for a in row] for row in angles], dtype=np.float32)
    sin = np.array([[math.sin(a) for a in row] for row in angles], dtype=np.float32)
    return cos, sin
