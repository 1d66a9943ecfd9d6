"""verdicts.parquet: one row per minority class, for anyone's queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from raytest.compare.axis_result import AxisData
from raytest.compare.observed import Observed
from raytest.compare.verdicts import REASONS, SEVERITY
from raytest.schema import verdicts_schema

if TYPE_CHECKING:
    import pyarrow as pa


def verdicts_table(data: Sequence[AxisData], observed: Observed) -> pa.Table:
    """All divergences of all axes, with ``members`` (every member of the class) beside the schema's
    columns; metrics are null where they do not exist."""
    import pyarrow as pa

    schema = verdicts_schema().append(pa.field("members", pa.list_(pa.string()), nullable=False))
    tables = [_axis_table(entry, observed, schema) for entry in data]
    return pa.concat_tables([schema.empty_table(), *tables])


def _axis_table(entry: AxisData, observed: Observed, schema: pa.Schema) -> pa.Table:
    import numpy as np
    import pyarrow as pa

    d, m, judged = entry.classes.divergences, entry.metrics, entry.judged
    names = pa.array([x.name for x in observed.members], pa.string())
    request = observed.request_of(d.unit)
    flip = m.first >= 0
    position = np.where(flip, m.first, m.first_bits)
    with_logprobs = m.positions > 0

    def known(values: object, mask: object, kind: pa.DataType) -> pa.Array:
        return pa.array(np.asarray(values), type=kind, mask=~np.asarray(mask))

    ids = observed.payload_ids
    workload = observed.workload
    columns = {
        "axis": pa.array([entry.axis.value] * len(request), pa.string()),
        "group": pa.array([g.name for g in entry.grouping.groups], pa.string()).take(
            pa.array(d.group)
        ),
        "request_index": pa.array(np.asarray(workload.request_index, dtype=np.int32)[request]),
        "request_id": pa.array(workload.request_id, pa.string()).take(pa.array(request)),
        "sample_index": pa.array((d.unit % workload.n_samples).astype(np.int32)),
        "verdict": pa.array([v.value for v in SEVERITY]).take(pa.array(judged.verdict)),
        "reason": pa.array(REASONS, pa.string()).take(pa.array(judged.reason)),
        "reference_member": names.take(pa.array(d.reference)),
        "member": names.take(pa.array(d.member)),
        "n_reference": pa.array(d.n_reference.astype(np.int32)),
        "n_members": pa.array(d.n_members.astype(np.int32)),
        "reference_payload_id": ids.take(pa.array(observed.payload[d.reference, d.unit])),
        "payload_id": ids.take(pa.array(observed.payload[d.member, d.unit])),
        "first_divergence": known(position.astype(np.int32), position >= 0, pa.int32()),
        "reference_token": known(m.token_a.astype(np.int32), m.token_a >= 0, pa.int32()),
        "token": known(m.token_b.astype(np.int32), m.token_b >= 0, pa.int32()),
        "margin": known(judged.margin, ~np.isnan(judged.margin), pa.float64()),
        "max_logprob_difference": known(m.max_abs, with_logprobs, pa.float64()),
        "mean_logprob_difference": known(
            m.sum_abs / np.maximum(m.positions, 1), with_logprobs, pa.float64()
        ),
        "max_ulp_float32": known(m.max_ulp, with_logprobs, pa.int64()),
        "members": pa.ListArray.from_arrays(
            pa.array(d.offsets.astype(np.int32)), names.take(pa.array(d.all_members))
        ),
    }
    return pa.table([columns[f.name] for f in schema], schema=schema)
