"""The first module whose output differs between two traces of equal tokens, and what it does.

"First" is in execution order: the earliest forward pass, then the order of modules in it. All that
comes before it was compared and is equal, or is listed as not comparable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

from raytest.engines.trace import Layout
from raytest.explain.growth import (
    Distance,
    Growth,
    distance_of,
    distinct,
    growth_of,
    reduction_holds,
)
from raytest.explain.traces import Compared, Comparison

MOST_POSITIONS = 8
# Class names, bases left out: the first entry that is part of a module's class name says what it
# computes.
OPERATIONS = (
    ("LMHead", "output product"),
    ("LogitsProcessor", "gathering of the logits"),
    ("RowParallel", "row-parallel product"),
    ("ColumnParallel", "column-parallel product"),
    ("QKVParallel", "column-parallel product"),
    ("Linear", "matrix product"),
    ("Norm", "normalisation"),
    ("RotaryEmbedding", "rotary embedding"),
    ("Attention", "attention"),
    ("Embedding", "embedding"),
    ("MoE", "mixture of experts"),
    ("AndMul", "activation"),
    ("GELU", "activation"),
    ("Act", "activation"),
)


class Finding(StrEnum):
    """What two traces say."""

    FOUND = "found"
    EQUAL = "no difference found"
    NOTHING = "nothing to compare"


@dataclass(frozen=True, slots=True)
class Localization:
    """The first difference, or that there is none.

    ``part`` is ``output``, ``partial`` (a term of an all-reduce) or ``input`` (then the cause lies
    between modules, after ``after``). ``ranks`` are tensor-parallel ranks (none at TP=1, or where
    ranks were added up); ``positions`` are the rows of that part that differ, ``step`` is the
    forward pass. ``input_equal`` is None where the input cannot be compared. ``cause`` is
    ``product``, ``all-reduce``, ``all-reduce order``, ``split`` (the product's cut among the
    ranks) or ''. ``distance`` covers the rows that were kept.
    """

    finding: Finding
    module: str = ""
    kind: str = ""
    operation: str = ""
    part: str = ""
    layer: int | None = None
    ranks: tuple[int, ...] = ()
    step: int | None = None
    position: int | None = None
    positions: tuple[int, ...] = ()
    n_rows: int = 0
    input_equal: bool | None = None
    cause: str = ""
    after: str = ""
    distance: Distance | None = None
    growth: tuple[Growth, ...] = ()
    n_modules: int = 0
    n_positions: int = 0
    skipped: Mapping[str, Sequence[str]] | None = None

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        if self.finding is Finding.NOTHING:
            return "Nothing to compare: the two traces have no module and position in common."
        if self.finding is Finding.EQUAL:
            return (
                f"No difference found: {self.n_modules} modules are bitwise equal at "
                f"{self.n_positions} positions."
            )
        if self.part == "input":
            return (
                f"Between {self.after or 'the start'} and {self.module}: what the model computes "
                f"outside its modules is the first to differ, at {self._where()}."
            )
        equal = {
            True: "on equal input",
            False: "though its input differs too",
            None: "on an input that the two sides hold in different pieces",
        }[self.input_equal]
        return (
            f"{self.module} is the first module whose output differs {equal}: "
            f"{self.operation}, {self._where()}.{_CAUSES.get(self.cause, '')}"
        )

    def _where(self) -> str:
        rows = f"{len(self.positions)} of {self.n_rows} rows from position {self.position} on"
        if self.distance is not None:
            d = self.distance
            rows += f", {d.n_different} of {d.n_elements} elements in the rows kept"
        if self.ranks:
            word = "rank" if len(self.ranks) == 1 else "ranks"
            rows += f", on {word} {', '.join(map(str, self.ranks))}"
        return rows


_CAUSES = {
    "product": " The product itself differs, before the all-reduce.",
    "all-reduce": " The ranks' products are equal, so it is the all-reduce.",
    "split": (
        " The all-reduce is the exact sum of the ranks' products; it is the product, cut among "
        "the ranks, that rounds otherwise."
    ),
    "all-reduce order": " The all-reduce is not the sum of the ranks' products in rank order.",
}


def localize(comparison: Comparison) -> Localization:
    """Name the first difference of two traces. With rows kept (see :func:`rows_to_keep`) elements,
    growth and the part of a row-parallel layer are told too."""
    facts: dict[str, Any] = {
        "n_modules": len(comparison.modules()),
        "n_positions": len(comparison.positions()),
        "skipped": comparison.skipped,
    }
    first = comparison.first()
    if first is None:
        finding = Finding.EQUAL if comparison.compared else Finding.NOTHING
        return Localization(finding, **facts)
    found = first.first()
    assert found is not None
    step, _, _, position = found
    members = [c for c in comparison.of(first.module, first.part) if c.different.any()]
    rows = sorted({int(p) for c in members for p in c.positions[c.different]})
    cause = _cause(comparison, first, position)
    return Localization(
        finding=Finding.FOUND,
        module=first.module,
        kind=first.a[0].kind,
        operation=operation(first),
        part=first.part,
        layer=layer_of(first.module),
        ranks=_ranks(members),
        step=step,
        position=position,
        positions=tuple(rows),
        n_rows=len({int(p) for c in members for p in c.positions}),
        input_equal=_input_equal(comparison, first, position),
        cause=cause,
        after=_before(comparison, first) if first.part == "input" else "",
        distance=_distance(members, rows),
        growth=tuple(growth_of(comparison, max(comparison.positions()))),
        **facts,
    )


def rows_to_keep(comparison: Comparison) -> dict[str, tuple[int, ...]]:
    """Module -> positions whose tensors a second pass needs: a few rows of the first module that
    differs, and for the growth the last position of every module that differs there."""
    first = comparison.first()
    if first is None:
        return {}
    last = max(comparison.positions())
    keep: dict[str, set[int]] = {
        c.module: {last}
        for c in comparison.compared
        if c.part == "output" and c.rank is not None and c.differs_at(last)
    }
    rows = {
        int(p) for c in comparison.of(first.module, first.part) for p in c.positions[c.different]
    }
    keep[first.module] = keep.get(first.module, set()) | set(sorted(rows)[:MOST_POSITIONS])
    return {module: tuple(sorted(at)) for module, at in keep.items()}


def operation(compared: Compared) -> str:
    """What the module computes, in words."""
    kind = compared.a[0].kind
    words = next((text for part, text in OPERATIONS if part in kind), kind)
    split = max(p.tensor_parallel_size for p in (*compared.a, *compared.b)) > 1
    if "RowParallel" in kind and split:
        return f"{words} {'before' if compared.part == 'partial' else 'after'} its all-reduce"
    return words


def layer_of(module: str) -> int | None:
    """The layer that a module's name says it is in."""
    parts = module.split(".")
    numbers = [
        int(n)
        for before, n in pairwise(parts)
        if n.isdigit() and before in ("layers", "h", "blocks")
    ]
    return numbers[0] if numbers else None


def _ranks(members: Sequence[Compared]) -> tuple[int, ...]:
    sizes = {p.tensor_parallel_size for c in members for p in (*c.a, *c.b)}
    return tuple(sorted({c.rank for c in members if c.rank is not None})) if max(sizes) > 1 else ()


def _input_equal(comparison: Comparison, first: Compared, position: int) -> bool | None:
    """Up to ``position``: an attention layer's input is every row before it too."""
    inputs = comparison.of(first.module, "input")
    if not inputs:
        return None
    return not any(c.differs_up_to(position) for c in inputs)


def _before(comparison: Comparison, first: Compared) -> str:
    """The last module that finished before ``first`` happened."""
    done = [c for c in comparison.compared if c.part == "output" and c.place < first.place]
    return done[-1].module if done else ""


def _cause(comparison: Comparison, first: Compared, position: int) -> str:
    if "RowParallel" not in first.a[0].kind or first.part == "input":
        return ""
    if first.part == "partial":
        return "product"
    partial = comparison.of(first.module, "partial")
    if partial:
        return "" if any(c.differs_up_to(position) for c in partial) else "all-reduce"
    return _split(comparison, first)


def _split(comparison: Comparison, first: Compared) -> str:
    """TP sizes differ: whether each side's all-reduce adds up what its ranks computed."""
    held = [
        reduction_holds(terms, total)
        for total, terms in (
            (first.a[0], comparison.partials_a.get(first.module, ())),
            (first.b[0], comparison.partials_b.get(first.module, ())),
        )
        if terms and total.layout is Layout.WHOLE
    ]
    if not held or None in held:
        return ""
    return "split" if all(held) else "all-reduce order"


def _distance(members: Sequence[Compared], rows: Sequence[int]) -> Distance | None:
    return distance_of([(c.a[0], c.b[0], rows) for c in distinct(members)])
