"""Observations made straight from class codes, for what never sees a file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from raytest.compare.observed import Observed, State, Workload, members_of
from raytest.plan import make_plan
from tests.support.make_run import inventory, spec


def observed_of(codes: Any, tokens: Any | None = None, lengths: Any | None = None) -> Observed:
    """One member a row (slots of one node), one request a column; -1 is a missing observation."""
    codes = np.asarray(codes, dtype=np.int64)
    tokens = codes if tokens is None else np.asarray(tokens, dtype=np.int64)
    n_members, n_requests = codes.shape
    made = spec("[trials]\nrepeats = 1\n")
    plan = make_plan(made, inventory(1, max(n_members, 1)))
    members = [replace(m, found=True) for m in members_of(made, plan, 0, "run")][:n_members]
    state = np.where(codes < 0, State.MISSING, State.OK).astype(np.int8)
    return Observed(
        members=tuple(members),
        workload=Workload(
            request_index=list(range(n_requests)),
            request_id=[f"r{i}" for i in range(n_requests)],
            prompt_digest=[bytes([i]) * 16 for i in range(n_requests)],
            sampling=["{}"] * n_requests,
            error=[None] * n_requests,
            reference=[None] * n_requests,
            sampled=np.zeros(n_requests, dtype=np.bool_),
            n_samples=1,
        ),
        state=state,
        bitwise=codes,
        tokens=np.where(codes < 0, -1, tokens),
        payload=codes,
        n_tokens=np.full(codes.shape, 5) if lengths is None else np.asarray(lengths),
        finish=np.zeros(codes.shape, dtype=np.int64),
        finish_reasons=["length"],
        payload_ids=pa.array([], pa.binary(16)),
        counters={},
        problems=(),
        errors=(),
    )
