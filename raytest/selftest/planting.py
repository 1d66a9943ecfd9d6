"""Random faults of every kind, as published accounts of silent corruption describe them.

About 1% shows as NaN or infinity, fewer than 40% are single-bit flips, and corrupted addresses are
periodic (arXiv 2605.04213): so kinds are examined one by one and never averaged into one rate.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raytest.engines.reference_weights import PRODUCTS, ROW_PARALLEL, ModelShape, base_name

WEIGHTLESS = ("self_attn.attn", "mlp.act_fn")


@dataclass(frozen=True, slots=True)
class Planted:
    """One fault: the engine's ``fault`` mapping, and the module where it must show first ('' where
    it belongs to none)."""

    fault: Mapping[str, Any]
    module: str = ""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault. ``benign``: changes rounding only, and must not be called corrupt.
    ``audited``: what an audit of the processes must find, though results may be equal."""

    name: str
    make: Callable[[random.Random, ModelShape], Planted]
    benign: bool = False
    audited: bool = False


def kinds() -> dict[str, Kind]:
    """Every kind that is examined, by name. Faults that end a process are no part: they are told by
    the run itself (tests/integration/test_faults.py)."""
    made = (
        Kind("weight bit: sign", _bits("weight_bit_flip", 31, 32)),
        Kind("weight bit: exponent", _bits("weight_bit_flip", 23, 31)),
        Kind("weight bit: upper mantissa", _bits("weight_bit_flip", 12, 23)),
        Kind("weight bit: lower mantissa", _bits("weight_bit_flip", 0, 12)),
        Kind("several weight bits", _bits("weight_bits", 12, 31)),
        Kind("activation stripe", _module("activation_stripe")),
        Kind("activation stripe, 1 step in 10", _module("activation_stripe", every=10)),
        Kind("activation stripe, 1 step in 100", _module("activation_stripe", every=100)),
        Kind("activation stripe, 1 step in 1000", _module("activation_stripe", every=1000)),
        Kind("stuck accumulator", _module("stuck_accumulator", PRODUCTS)),
        Kind("all-reduce drops a rank", _module("allreduce_drop", ROW_PARALLEL)),
        Kind("all-reduce doubles a rank", _module("allreduce_double", ROW_PARALLEL)),
        Kind("stale KV block", _stale_block),
        Kind("NaN in one row", _module("nan_row")),
        Kind("wrong seed in one rank", _plain("wrong_seed", rank=True), audited=True),
        Kind("variable unset in one rank", _plain("env_unset", rank=True), True, audited=True),
        Kind("another dtype", _plain("other_dtype"), benign=True),
        Kind("another tokenizer", _plain("other_tokenizer")),
        Kind("another chat template", _plain("chat_template")),
        Kind("generation_config override", _plain("generation_config", temperature=1.5)),
        Kind("swapped outputs", _plain("swapped_outputs")),
        Kind("truncated output", _plain("truncated_output", value=3)),
        Kind("reordered reduction", _plain("reordered_reduction", rank=True), benign=True),
    )
    return {kind.name: kind for kind in made}


Maker = Callable[[random.Random, ModelShape], Planted]


def _rank(rng: random.Random, shape: ModelShape, module: str) -> int:
    tp = shape.tensor_parallel_size
    return shape.stage(module) * tp + rng.randrange(tp)


def _bits(kind: str, lowest: int, end: int) -> Maker:
    """A weight of any module, a bit from ``lowest`` to below ``end`` (float32: 31 is the sign)."""

    def make(rng: random.Random, shape: ModelShape) -> Planted:
        fitting = [m for m in shape.module_names() if base_name(m) not in WEIGHTLESS]
        module = rng.choice(fitting)
        fault = {
            "kind": kind,
            "module": module,
            "rank": _rank(rng, shape, module),
            "bit": rng.randrange(lowest, end),
            "index": rng.randrange(24),  # the smallest shard has 32 elements
        }
        return Planted(fault, module)

    return make


def _module(kind: str, able: tuple[str, ...] = (), every: int = 1) -> Maker:
    def make(rng: random.Random, shape: ModelShape) -> Planted:
        names = shape.module_names()
        module = rng.choice([m for m in names if not able or base_name(m) in able])
        fault: dict[str, Any] = {
            "kind": kind,
            "module": module,
            "rank": _rank(rng, shape, module),
            "step": rng.randrange(max(4, every)),
            "every": every,
        }
        if kind in ("stuck_accumulator", "nan_row"):
            fault["index"] = rng.randrange(4)
        return Planted(fault, module)

    return make


def _stale_block(rng: random.Random, shape: ModelShape) -> Planted:
    layer = rng.randrange(shape.layers)
    module = f"layers.{layer}.self_attn.attn"
    fault = {"kind": "stale_kv_block", "layer": layer, "rank": _rank(rng, shape, module)}
    return Planted({**fault, "index": rng.randrange(2)}, module)


def _plain(kind: str, rank: bool = False, **fixed: Any) -> Maker:
    def make(rng: random.Random, shape: ModelShape) -> Planted:
        where = {"rank": rng.randrange(shape.tensor_parallel_size)} if rank else {}
        return Planted({"kind": kind, **where, **fixed})

    return make
