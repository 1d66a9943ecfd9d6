"""Completions -> Arrow: the observation and payload rows that a worker hands over after a trial."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from raytest.digest import digest_bytes, logprob_digest, token_digest, top_digest
from raytest.engines.base import Completion, Request
from raytest.schema import observations_schema, payloads_schema

if TYPE_CHECKING:
    import pyarrow as pa

# A logprob is at most 0; rounding in log_softmax can leave a certain token a hair above it.
POSITIVE_LOGPROB = 1e-6


def observations_table(
    requests: Sequence[Request],
    completions: Sequence[Completion],
    *,
    where: Mapping[str, Any],
    batch_size: int | None,
    started_at: datetime,
    duration_s: float,
    vocabulary_size: int,
) -> tuple[pa.Table, pa.Table]:
    """Observations (one row per request and sample, in request order) and their distinct payloads.

    ``where`` has the columns that are the same for the whole trial. A request without a completion
    gets a row whose error says so: a missing result is never an absent row.
    """
    import pyarrow as pa

    by_request: dict[str, list[Completion]] = {}
    for completion in completions:
        by_request.setdefault(completion.request_id, []).append(completion)
    rows: list[dict[str, Any]] = []
    payloads: dict[bytes, tuple[bytes, Completion]] = {}
    for request in requests:
        found = by_request.get(request.request_id)
        samples = sorted(found, key=lambda c: c.sample_index) if found else [None]
        for sample in samples:
            row = {
                "request_index": request.request_index,
                "request_id": request.request_id,
                "prompt_digest": request.prompt_digest,
                **_result_columns(request, sample, vocabulary_size),
            }
            if row["payload_id"] is not None and sample is not None:
                payloads.setdefault(row["payload_id"], (request.prompt_digest, sample))
            rows.append(row)
    shared = {
        **where,
        "batch_size": batch_size,
        "started_at": started_at,
        "duration_s": duration_s,
    }
    schema = observations_schema()
    table = pa.table(
        {
            f.name: pa.array(
                [shared[f.name]] * len(rows) if f.name in shared else [r[f.name] for r in rows],
                type=f.type,
            )
            for f in schema
        },
        schema=schema,
    )
    return table, _payloads_table(payloads)


def with_text(payloads: pa.Table, decode: Callable[[Sequence[int]], str] | None) -> pa.Table:
    """The payloads with the text of their tokens, where ``decode`` gives it."""
    import pyarrow as pa

    if decode is None:
        return payloads
    texts = [decode(tokens) for tokens in payloads.column("token_ids").to_pylist()]
    at = payloads.column_names.index("text")
    return payloads.set_column(at, "text", pa.array(texts, pa.string()))


def _result_columns(
    request: Request, sample: Completion | None, vocabulary_size: int
) -> dict[str, Any]:
    import numpy as np

    row: dict[str, Any] = dict.fromkeys(
        (
            "token_digest",
            "logprob_digest",
            "top_digest",
            "payload_id",
            "n_tokens",
            "finish_reason",
            "stop_reason",
            "cumulative_logprob",
            "n_nan",
            "n_inf",
            "n_positive_logprob",
            "n_out_of_vocabulary",
            "n_cached_tokens",
            "error_kind",
            "error",
        )
    )
    if sample is None:
        return {
            **row,
            "sample_index": 0,
            "error_kind": "missing",
            "error": "the engine returned nothing for this request",
        }
    row["sample_index"] = sample.sample_index
    if sample.error is not None:
        return {**row, "error_kind": sample.error_kind or "error", "error": sample.error}
    tokens = token_digest(sample.token_ids)
    has_logprobs = request.sampling.logprobs is not None
    logprobs = logprob_digest(sample.logprobs) if has_logprobs else None
    top = top_digest(sample.top_token_ids, sample.top_logprobs) if has_logprobs else None
    values = np.concatenate([sample.logprobs, sample.top_logprobs])
    ids = np.concatenate([sample.token_ids, sample.top_token_ids])
    finish = (sample.finish_reason or "").encode()
    return {
        **row,
        "token_digest": tokens,
        "logprob_digest": logprobs,
        "top_digest": top,
        "payload_id": digest_bytes(
            "payload", request.prompt_digest, tokens, logprobs or b"", top or b"", finish
        ),
        "n_tokens": len(sample.token_ids),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "cumulative_logprob": sample.cumulative_logprob,
        "n_nan": int(np.isnan(values).sum()),
        "n_inf": int(np.isposinf(values).sum() + np.isneginf(sample.logprobs).sum()),
        "n_positive_logprob": int((values > POSITIVE_LOGPROB).sum()),
        "n_out_of_vocabulary": int(((ids < 0) | (ids >= vocabulary_size)).sum()),
        "n_cached_tokens": sample.n_cached_tokens,
    }


def _payloads_table(payloads: Mapping[bytes, tuple[bytes, Completion]]) -> pa.Table:
    import pyarrow as pa

    items = [(pid, prompt, c) for pid, (prompt, c) in payloads.items()]
    schema = payloads_schema()
    return pa.table(
        [
            pa.array([i[0] for i in items], pa.binary(16)),
            pa.array([i[1] for i in items], pa.binary(16)),
            _lists([c.token_ids for _, _, c in items], pa.int32()),
            _lists([c.logprobs for _, _, c in items], pa.float32()),
            pa.array([c.top_k for _, _, c in items], pa.int32()),
            _lists([c.top_token_ids for _, _, c in items], pa.int32()),
            _lists([c.top_logprobs for _, _, c in items], pa.float32()),
            pa.array([c.text for _, _, c in items], pa.string()),
        ],
        schema=schema,
    )


def _lists(arrays: Sequence[Any], kind: pa.DataType) -> pa.ListArray:
    """A list column from numpy arrays, without passing through Python floats."""
    import numpy as np
    import pyarrow as pa

    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(a) for a in arrays], out=offsets[1:])
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype=kind.to_pandas_dtype())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))
