"""Faults that can be planted in the reference engine, and what each is known to do.

A fault is ``EngineConfig.fault``, a mapping with ``kind`` and the parameters that the kind takes.
Every kind also takes ``device`` (only the rank that holds it is at fault; an engine without it is
healthy) and ``when_env`` (healthy unless all these variables have these values in the process).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytest.engines.base import EngineConfig
from raytest.errors import CellError

ALWAYS = ("device", "when_env")
PLACE = ("rank", "layer", "module")
WHEN = ("step", "every")
START = ("rank", "once")


@dataclass(frozen=True, slots=True)
class FaultKind:
    """What a kind of fault does; ``benign`` ones change rounding only and must not count as wrong.

    ``parameters`` are the keys it takes beside :data:`ALWAYS`. ``visible`` says where it shows:
    ``outputs``, ``fingerprint`` (both may), ``start`` or ``trial`` (the engine fails there), or
    ``duration``.
    """

    name: str
    description: str
    parameters: tuple[str, ...]
    visible: tuple[str, ...] = ("outputs",)
    benign: bool = False


_KINDS = (
    FaultKind(
        "weight_bit_flip",
        "Bit `bit` (0 is the lowest; default: the highest exponent bit but one) of element "
        "`index` of the rank's shard of a weight is flipped after loading.",
        (*PLACE, "bit", "index"),
    ),
    FaultKind(
        "weight_bits",
        "`value` neighbouring elements (default 8) from `index` on have bit `bit` flipped.",
        (*PLACE, "bit", "index", "value"),
    ),
    FaultKind(
        "activation_stripe",
        "32 neighbouring elements, the `index`-th such stripe, of a module's output are "
        "multiplied by `value` (default 0.5) in every row, or in those of request `request`, at "
        "the steps hit.",
        (*PLACE, *WHEN, "index", "value", "request"),
    ),
    FaultKind(
        "stuck_accumulator",
        "Column `index` of the rank's matrix product is `value` (default 1.0) before any "
        "reduction.",
        (*PLACE, *WHEN, "index", "value", "request"),
    ),
    FaultKind(
        "allreduce_drop",
        "The rank's contribution is left out of a row-parallel module's all-reduce.",
        (*PLACE, *WHEN),
    ),
    FaultKind(
        "allreduce_double",
        "The rank's contribution is counted twice in a row-parallel module's all-reduce.",
        (*PLACE, *WHEN),
    ),
    FaultKind(
        "stale_kv_block",
        "Block `index` of each request's KV cache is not written in one layer of the rank: it "
        "keeps what the block held before (zeros after a reset).",
        ("rank", "layer", *WHEN, "index", "request"),
    ),
    FaultKind(
        "nan_row",
        "Row `index` of the decode batch, or every row of request `request`, of a module's output "
        "is NaN on the rank.",
        (*PLACE, *WHEN, "index", "request"),
    ),
    FaultKind(
        "wrong_seed",
        "The rank's generators start from the seed plus `value` (default 1); on the rank that "
        "samples (the default: the first of the last stage) the seeds of requests are off by as "
        "much.",
        ("rank", "value"),
        ("outputs", "fingerprint"),
    ),
    FaultKind(
        "env_unset",
        "The variable `variable` (default OMP_NUM_THREADS) does not reach the rank. Without "
        "OMP_NUM_THREADS it takes `value` threads (default 4).",
        ("rank", "variable", "value"),
        ("outputs", "fingerprint"),
        benign=True,
    ),
    FaultKind(
        "other_dtype",
        "The engine runs in dtype `value` (default: bfloat16, or float32 where that was asked "
        "for).",
        ("value",),
        ("outputs", "fingerprint"),
    ),
    FaultKind(
        "other_tokenizer",
        "Prompt token ids are shifted by `value` (default 1), modulo the vocabulary.",
        ("value",),
        ("outputs", "fingerprint"),
    ),
    FaultKind(
        "chat_template",
        "The token ids `value` (default [1]) are put before each prompt.",
        ("value",),
        ("outputs", "fingerprint"),
    ),
    FaultKind(
        "generation_config",
        "The model's own `temperature` (default 1.0) and `top_p` (default: as asked) override "
        "those of the request.",
        ("temperature", "top_p"),
        ("outputs", "fingerprint"),
    ),
    FaultKind(
        "swapped_outputs",
        "Where the requests with index `index` (default 0) and `value` (default 1) are in one "
        "call, each gets the other's completions.",
        ("index", "value"),
    ),
    FaultKind(
        "truncated_output",
        "Completions of the request with index `index` (default 0) lose all but their first "
        "`value` tokens (default: half), and keep their finish reason.",
        ("index", "value"),
    ),
    FaultKind(
        "reordered_reduction",
        "The rank adds the blocks of its matrix products in reverse order, and ranks are reduced "
        "in reverse order.",
        ("rank",),
        benign=True,
    ),
    FaultKind("hang_on_start", "The start never returns.", START, ("start",)),
    FaultKind(
        "die_on_start",
        "The process is gone in the start: exit code `value` (default 1), or SIGKILL for 'kill'.",
        (*START, "value"),
        ("start",),
    ),
    FaultKind(
        "die_in_trial",
        "The process is gone at engine step `step` (default 1), as by die_on_start.",
        (*START, "step", "value"),
        ("trial",),
    ),
    FaultKind("out_of_memory", "The start raises: no memory left on the rank.", START, ("start",)),
    FaultKind(
        "slow",
        "Each step takes `value` seconds more (default 0.01).",
        (*WHEN, "value"),
        ("duration",),
        benign=True,
    ),
)

FAULT_KINDS: Mapping[str, FaultKind] = {kind.name: kind for kind in _KINDS}


@dataclass(frozen=True, slots=True)
class Fault:
    """A planted fault that applies to this engine. ``rank`` is global (stage * TP size + TP rank).

    It acts at the steps ``step``, ``step + every``, ... counted from the engine's start; with
    ``every`` 0 at ``step`` alone.
    """

    kind: FaultKind
    rank: int | None = None
    layer: int | None = None
    module: str | None = None
    step: int = 0
    every: int = 1
    bit: int | None = None
    index: int = 0
    request: int | None = None
    value: Any = None
    variable: str = "OMP_NUM_THREADS"
    temperature: float = 1.0
    top_p: float | None = None
    once: str | None = None
    device: str | None = None
    when_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind's name."""
        return self.kind.name

    def acts(self, step: int) -> bool:
        """Whether the fault acts at engine step ``step`` (from 0)."""
        since = step - self.step
        return since == 0 if self.every == 0 else since >= 0 and since % self.every == 0

    def acts_now(self) -> bool:
        """With ``once``, a file: true for the process that creates it, and never again."""
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        except OSError as error:
            raise CellError(f"fault.once: cannot create {self.once!r}: {error.strerror}") from None
        return True


_TYPES: Mapping[str, tuple[type, ...]] = {
    "rank": (int,),
    "layer": (int,),
    "module": (str,),
    "step": (int,),
    "every": (int,),
    "bit": (int,),
    "index": (int,),
    "request": (int,),
    "variable": (str,),
    "temperature": (int, float),
    "top_p": (int, float),
    "once": (str,),
    "device": (str,),
    "when_env": (Mapping,),
}

_VALUES: Mapping[str, tuple[tuple[type, ...], str]] = {
    "weight_bits": ((int,), "a count of elements"),
    "activation_stripe": ((int, float), "a factor"),
    "stuck_accumulator": ((int, float), "a number"),
    "wrong_seed": ((int,), "an offset"),
    "env_unset": ((int,), "a number of threads"),
    "other_dtype": ((str,), "a dtype"),
    "other_tokenizer": ((int,), "an offset"),
    "chat_template": ((list, tuple), "a list of token ids"),
    "swapped_outputs": ((int,), "a request index"),
    "truncated_output": ((int,), "a number of tokens"),
    "die_on_start": ((int, str), "an exit code or 'kill'"),
    "die_in_trial": ((int, str), "an exit code or 'kill'"),
    "slow": ((int, float), "seconds"),
}


def read_fault(config: EngineConfig) -> Fault | None:
    """The fault of ``config`` where it applies to this engine and process, else None.

    Raises :class:`CellError` for an unknown kind, a parameter it does not take, or a bad value.
    """
    if config.fault is None:
        return None
    table = dict(config.fault)
    kind = _kind(table.pop("kind", None))
    for key, value in table.items():
        _check(kind, key, value)
    if kind.name == "die_in_trial":
        table.setdefault("step", 1)
    fault = Fault(kind=kind, **table)
    if any(os.environ.get(k, config.env.get(k)) != v for k, v in fault.when_env.items()):
        return None
    if fault.device is None:
        return fault
    if fault.device not in config.device_uuids:
        return None
    table["rank"] = config.device_uuids.index(fault.device)
    return Fault(kind=kind, **table)


def _kind(name: object) -> FaultKind:
    if isinstance(name, str) and name in FAULT_KINDS:
        return FAULT_KINDS[name]
    raise CellError(
        f"fault.kind: {name!r} is no kind of fault{_hint(str(name), list(FAULT_KINDS))}"
    )


def _check(kind: FaultKind, key: str, value: object) -> None:
    accepted = (*kind.parameters, *ALWAYS)
    if key not in accepted:
        raise CellError(f"fault.{key}: {kind.name} takes no such parameter{_hint(key, accepted)}")
    types, meaning = (
        _VALUES[kind.name] if key == "value" else (_TYPES[key], _TYPES[key][0].__name__)
    )
    if not isinstance(value, types) or isinstance(value, bool):
        raise CellError(f"fault.{key}: expected {meaning}, found {value!r}")
    if isinstance(value, int) and value < 0 and key != "value":
        raise CellError(f"fault.{key}: expected 0 or more, found {value}")


def _hint(word: str, options: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; expected one of {', '.join(options)}"
