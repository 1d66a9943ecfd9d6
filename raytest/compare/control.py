"""Planted differences that the analysis must flag; a run whose control was missed says nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from raytest.compare.axes import Group
from raytest.compare.classes import form_classes
from raytest.compare.flat import flat_of
from raytest.compare.observed import Observed
from raytest.compare.pairs import Histogram, compare_pairs
from raytest.digest import logprob_digest, token_digest, top_digest
from raytest.schema import Axis, payloads_schema
from raytest.store import Payload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

    Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ControlResult:
    """One control: what was planted, whether it was flagged, and what was seen."""

    name: str
    planted: str
    caught: bool
    detail: str


def planted_control(observed: Observed, payload: Payload | None) -> tuple[ControlResult, ...]:
    """Plant a flipped lowest mantissa bit and a changed token in copies of one completion, pass
    each copy off as a third member beside two unchanged ones, and run the classes and the
    comparison."""
    import numpy as np

    if payload is None or not len(payload.token_ids):
        return (
            ControlResult("analysis", "nothing", False, "no completion to plant a difference in"),
        )
    at = len(payload.token_ids) // 2
    tokens = payload.token_ids.copy()
    tokens[at] ^= 1
    results = [
        _run("analysis: token", at, observed, payload, replace(payload, token_ids=tokens), True)
    ]
    if len(payload.logprobs) == len(payload.token_ids):
        bits = payload.logprobs.copy().view(np.int32)
        bits[at] ^= 1
        changed = replace(payload, logprobs=bits.view(np.float32))
        results.append(_run("analysis: logprob bit", at, observed, payload, changed, False))
    return tuple(results)


def _run(
    name: str, at: int, observed: Observed, plain: Payload, changed: Payload, token: bool
) -> ControlResult:
    import numpy as np

    planted = f"{'another token' if token else 'the lowest bit of a logprob'} at position {at}"
    codes, by_tokens = _codes([plain, plain, changed])
    copy = replace(
        observed,
        members=observed.members[:1] * 3,
        workload=replace(
            observed.workload, request_id=observed.workload.request_id[:1], n_samples=1
        ),
        state=np.zeros((3, 1), dtype=np.int8),
        bitwise=codes,
        tokens=by_tokens,
        payload=codes,
        n_tokens=np.full((3, 1), len(plain.token_ids), dtype=np.int64),
    )
    group = Group(Axis.GPU, "control", (0, 1, 2), True, False)
    found = form_classes(copy, [group]).divergences
    flagged = found.all_members.tolist() == [2] and bool(found.tokens_equal.all()) != token
    flat = flat_of(_table([plain, changed]))
    index = np.array([0]), np.array([1])
    pair = compare_pairs(
        flat, index[0], flat, index[1], np.zeros(1, np.int64), {0: Histogram.empty()}
    )
    place = int(pair.first[0] if token else pair.first_bits[0])
    caught = flagged and place == at
    seen = f"flagged at position {place}" if flagged else "no class of its own"
    return ControlResult(name, planted, caught, seen)


def _codes(payloads: list[Payload]) -> tuple[Ints, Ints]:
    """Class codes [3, 1] by all digests, and by tokens alone."""
    import numpy as np

    tokens = [token_digest(p.token_ids) for p in payloads]
    full = [
        (t, logprob_digest(p.logprobs), top_digest(p.top_token_ids, p.top_logprobs))
        for t, p in zip(tokens, payloads, strict=True)
    ]
    return (
        np.array([[full.index(f)] for f in full], dtype=np.int64),
        np.array([[tokens.index(t)] for t in tokens], dtype=np.int64),
    )


def _table(payloads: list[Payload]) -> pa.Table:
    import pyarrow as pa

    schema = payloads_schema()

    def lists(name: str) -> pa.Array:
        arrays = [pa.array(getattr(p, name)) for p in payloads]
        offsets = [0]
        for array in arrays:
            offsets.append(offsets[-1] + len(array))
        return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.concat_arrays(arrays))

    columns = {
        "payload_id": pa.array([p.payload_id for p in payloads], pa.binary(16)),
        "prompt_digest": pa.array([p.payload_id for p in payloads], pa.binary(16)),
        "top_k": pa.array([p.top_k for p in payloads], pa.int32()),
        "text": pa.array([p.text for p in payloads], pa.string()),
    }
    return pa.table([columns.get(f.name) or lists(f.name) for f in schema], schema=schema)


def engine_control(table: pa.Table | None) -> ControlResult:
    """The control that ran in an engine: one request, and the same with one prompt token changed,
    passed off as its repeat. Their digests must differ."""
    planted = "one prompt token changed, run as a repeat"
    if table is None:
        return ControlResult("engine", planted, False, "did not run")
    rows = table.select(["token_digest", "logprob_digest", "error"]).to_pylist()
    failed = [r["error"] for r in rows if r["error"]]
    if failed:
        return ControlResult("engine", planted, False, f"failed: {failed[0]}")
    if len(rows) < 2:
        return ControlResult("engine", planted, False, f"{len(rows)} of 2 observations")
    results = {(r["token_digest"], r["logprob_digest"]) for r in rows}
    caught = len(results) > 1
    return ControlResult("engine", planted, caught, f"{len(results)} different results")
