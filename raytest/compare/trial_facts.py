"""What a trial's rows say of all of it: devices, batches, and whether its arrangement formed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raytest.compare.observed import Member
from raytest.schema import Arrangement
from raytest.spec import Spec

if TYPE_CHECKING:
    import pyarrow as pa


def with_facts(
    member: Member, table: pa.Table, same: Mapping[str, Any], spec: Spec, n_requests: int
) -> Member:
    """The member with what its rows say of the whole trial."""
    import pyarrow.compute as pc

    def most(name: str) -> int | None:
        value: int | None = same[name] if name in same else pc.max(table.column(name)).as_py()
        return value

    if not table.num_rows:
        return replace(member, found=True)
    uuids = same["gpu_uuids"] if "gpu_uuids" in same else table.column("gpu_uuids")[0].as_py()
    size = most("batch_size")
    reason = unformed(
        member.trial.arrangement,
        size,
        most("n_cached_tokens"),
        n_requests=n_requests,
        at_once=max(spec.workload.sampling.n, spec.workload.sampling.beam_width),
    )
    return replace(member, found=True, gpu_uuids=tuple(uuids), batch_size=size, unformed=reason)


def unformed(
    arrangement: Arrangement,
    batch_size: int | None,
    n_cached: int | None,
    *,
    n_requests: int,
    at_once: int,
) -> str:
    """Why an arrangement did not form, or ''.

    ``batch_size`` is the most requests that ran in one step, ``at_once`` how many sequences one
    request makes (samples or beams), ``n_cached`` the most prompt tokens that came from the prefix
    cache.
    """
    if batch_size is None:
        return "the batches that formed are unknown"
    if arrangement is Arrangement.SOLO:
        if batch_size > at_once:
            return f"requests ran alone in the plan, but up to {batch_size} ran together"
        return ""
    if n_requests > 1 and batch_size <= 1:
        return "no batch formed: never more than one request ran at a time"
    if arrangement is Arrangement.PREFIX and not n_cached:
        return "the prefix cache was never hit"
    return ""
