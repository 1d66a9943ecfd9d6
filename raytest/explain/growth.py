"""How far two tensors are apart: elements, units in the last place, and how that grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raytest.engines.trace import Layout, Part, decoded
from raytest.explain.traces import Compared, Comparison

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FLOATS = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True, slots=True)
class Distance:
    """Two sets of rows, element by element.

    ``max_ulp`` and ``mean_ulp`` are units in the last place of the tensors' own dtype, NaN where an
    element is NaN on one side alone; None for integers and for two dtypes. ``relative`` is
    ||a - b|| / ||a||, the size of the difference whatever the size of single elements.
    """

    n_elements: int
    n_different: int
    max_ulp: float | None
    mean_ulp: float | None
    max_abs: float
    relative: float


@dataclass(frozen=True, slots=True)
class Growth:
    """The distance of one module's output at one position; ``index`` counts the modules that were
    compared, in execution order."""

    index: int
    module: str
    position: int
    distance: Distance


def distance_of(pairs: Sequence[tuple[Part, Part, Sequence[int]]]) -> Distance | None:
    """The distance over all (part, part, positions); None where no pair has those rows."""
    import numpy as np

    found = [d for a, b, at in pairs if (d := _distance(a, b, at)) is not None]
    if not found:
        return None
    ulps = [d for d in found if d.max_ulp is not None]
    elements = sum(d.n_elements for d in found)
    return Distance(
        n_elements=elements,
        n_different=sum(d.n_different for d in found),
        max_ulp=float(np.max([float(d.max_ulp or 0) for d in ulps])) if ulps else None,
        mean_ulp=(
            sum(float(d.mean_ulp or 0) * d.n_elements for d in ulps) / elements if ulps else None
        ),
        max_abs=float(np.max([d.max_abs for d in found])),
        relative=float(np.max([d.relative for d in found])),
    )


def growth_of(comparison: Comparison, position: int) -> list[Growth]:
    """Module by module in execution order, the distance of outputs at ``position``. Where digests
    are equal it is 0; modules whose rows were not kept are left out."""
    grown: list[Growth] = []
    outputs = [c for c in comparison.compared if c.part == "output" and position in c.positions]
    modules = list(dict.fromkeys(c.module for c in outputs))
    by_module = {m: [c for c in outputs if c.module == m] for m in modules}
    for index, module in enumerate(modules):
        members = by_module[module]
        if any(c.differs_at(position) for c in members):
            pairs = [(c.a[0], c.b[0], (position,)) for c in distinct(members)]
            distance = distance_of(pairs)
        else:
            columns = sum(c.a[0].columns for c in distinct(members))
            distance = Distance(columns, 0, 0.0, 0.0, 0.0, 0.0)
        if distance is not None:
            grown.append(Growth(index, module, position, distance))
    return grown


def distinct(members: Sequence[Compared]) -> list[Compared]:
    """Those whose elements count: of a tensor that every rank holds whole one rank's (one that
    differs, where any does), of others every rank's; none where ranks were added up."""
    ranks = [c for c in members if c.rank is not None]
    whole = [c for c in ranks if c.a[0].layout is Layout.WHOLE]
    whole.sort(key=lambda c: not c.different.any())
    return whole[:1] or ranks


def _distance(a: Part, b: Part, positions: Sequence[int]) -> Distance | None:
    import numpy as np

    if a.value_positions is None or b.value_positions is None:
        return None
    at = [p for p in positions if p in a.value_positions and p in b.value_positions]
    if not at:
        return None
    rows_a = [int(np.flatnonzero(a.value_positions == p)[0]) for p in at]
    rows_b = [int(np.flatnonzero(b.value_positions == p)[0]) for p in at]
    x, y = decoded(a)[rows_a], decoded(b)[rows_b]
    same = a.dtype == b.dtype and a.values is not None and b.values is not None
    different = a.values[rows_a] != b.values[rows_b] if same else x != y  # type: ignore[index]
    with np.errstate(all="ignore"):
        delta = np.where(different, np.abs(x - y), 0.0)
        norm = float(np.linalg.norm(x))
        relative = float(np.linalg.norm(delta)) / norm if norm else float(np.any(different))
    ulp: npt.NDArray[np.float64] | None = None
    if same and a.dtype in FLOATS:
        ulp = ulps(a.values[rows_a], b.values[rows_b])  # type: ignore[index]
    return Distance(
        n_elements=int(different.size),
        n_different=int(different.sum()),
        max_ulp=None if ulp is None else float(ulp.max()),
        mean_ulp=None if ulp is None else float(ulp.mean()),
        max_abs=float(delta.max()),
        relative=relative,
    )


def ulps(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Steps between representable numbers from ``a`` to ``b``, given the bits as unsigned
    integers; -0.0 lies one step below 0.0."""
    import numpy as np

    signed = np.dtype(f"i{a.dtype.itemsize}")
    ordered = []
    for bits in (a, b):
        i = np.ascontiguousarray(bits).view(signed)
        top = np.iinfo(signed).max
        ordered.append(np.where(i < 0, i ^ signed.type(top), i).astype(np.float64))
    return np.abs(ordered[0] - ordered[1])


def reduction_holds(summands: Sequence[Part], total: Part) -> bool | None:
    """Whether an all-reduce's result is the sum of the ranks' terms in rank order, rounded once or
    after each term; None where the rows of one are not there."""
    import numpy as np

    if total.values is None or any(s.values is None for s in summands):
        return None
    assert total.value_positions is not None
    common = set(total.value_positions.tolist())
    for s in summands:
        assert s.value_positions is not None
        common &= set(s.value_positions.tolist())
    if not common or len(summands) < summands[0].tensor_parallel_size:
        return None
    at = sorted(common)
    terms = [_rows_at(s, at) for s in summands]
    with np.errstate(all="ignore"):
        once = rounded(np.sum(terms, axis=0, dtype=np.float32), total.dtype)
        each = terms[0]
        for term in terms[1:]:
            each = rounded(each + term, total.dtype)
    found = _rows_at(total, at)
    return any(np.array_equal(found, s, equal_nan=True) for s in (once, each))


def _rows_at(part: Part, positions: Sequence[int]) -> npt.NDArray[np.float32]:
    import numpy as np

    assert part.value_positions is not None
    where = [int(np.flatnonzero(part.value_positions == p)[0]) for p in positions]
    return decoded(part)[where].astype(np.float32)


def rounded(values: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    """float32 values rounded to ``dtype`` (to nearest, ties to even), as float32."""
    import numpy as np

    if dtype == "float16":
        return values.astype(np.float16).astype(np.float32)
    if dtype != "bfloat16":
        return values
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    up = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nearest = ((bits + up) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), values, nearest)
