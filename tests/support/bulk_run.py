"""Large run folders for benchmarks, written a worker at a time from arrays."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from raytest.plan import make_plan, plan_to_json
from raytest.schema import observations_schema, payloads_schema
from raytest.store import RunFolder
from raytest.workload import requests_table
from tests.support.make_run import STARTED, VOCABULARY, RunMaker, inventory, spec

Shape = Literal["equal", "some", "one", "all"]
SHAPES: tuple[Shape, ...] = ("equal", "some", "one", "all")
DIVERGENT_REQUESTS = 0.05


@dataclass(frozen=True)
class Bulk:
    """``workers`` x ``requests`` x ``tokens`` with ``top_k`` candidates.

    equal: all the same. some: 5% of the requests differ on a quarter of the workers. one: a worker
    differs everywhere. all: every worker differs in every logprob of every request, and flips a
    token in a third of them; no payload is shared.
    """

    shape: Shape
    workers: int = 64
    requests: int = 1000
    tokens: int = 1024
    top_k: int = 0
    per_node: int = 8

    def write(self, results: Path, run_id: str) -> RunFolder:
        made = spec("[trials]\nrepeats = 1\n")
        nodes = max(1, self.workers // self.per_node)
        where = inventory(nodes, self.workers // nodes)
        plan = make_plan(made, where)
        folder = RunFolder.create(
            results,
            run_id,
            {
                "spec": made.model_dump(mode="json"),
                "plan": plan_to_json(plan),
                "vocabulary_size": VOCABULARY,
            },
        )
        requests = RunMaker(made, where, n_requests=self.requests).requests()
        folder.write_requests(requests_table(requests, {}))
        prompts = np.frombuffer(b"".join(r.prompt_digest for r in requests), dtype="V16")
        rng = np.random.default_rng(7)
        base = _Arrays.random(rng, self.requests, self.tokens, self.top_k)
        for w, launch in enumerate(plan.launches()):
            own = self._divergent(w, np.random.default_rng([7, w]))
            arrays = base.changed(own, w) if own.any() else base
            cell = launch.cell
            shared: dict[str, Any] = {
                "run_id": run_id,
                "cell_id": cell.cell_id,
                "variant": cell.variant,
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "node_id": cell.slot.node,
                "hostname": cell.slot.node,
                "gpu_uuids": [d.uuid for d in cell.slot.devices],
                "slot": cell.slot.name,
                "launch": 0,
                "attempt": 0,
                "trial": 0,
                "repeat": 0,
                "arrangement": "batch",
                "batch_size": self.requests,
                "finish_reason": "length",
                "started_at": STARTED,
                "duration_s": 1.0,
            }
            table = _observations(arrays, prompts, [r.request_id for r in requests], shared)
            fresh = np.ones(self.requests, dtype=np.bool_) if w == 0 else own
            payloads = arrays.payloads(prompts).filter(pa.array(fresh))
            folder.write_trial((cell.cell_id, 0, 0), table, payloads)
        RunMaker(made, where)._write_control(
            folder, next(plan.launches()), plan.trials[0], requests[0]
        )
        return folder

    def _divergent(self, worker: int, rng: np.random.Generator) -> np.ndarray:
        if self.shape == "all":
            return np.full(self.requests, worker > 0)
        if self.shape == "one":
            return np.full(self.requests, worker == self.workers - 1)
        if self.shape == "some":
            chosen = np.arange(self.requests) < max(1, int(DIVERGENT_REQUESTS * self.requests))
            return chosen & (rng.random(self.requests) < 0.25) & (worker > 0)
        return np.zeros(self.requests, dtype=np.bool_)


@dataclass(frozen=True)
class _Arrays:
    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    digests: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, requests: int, tokens: int, k: int) -> _Arrays:
        ids = (rng.zipf(1.3, size=(requests, tokens)) % VOCABULARY).astype(np.int32)
        logprobs = -rng.exponential(0.4, size=(requests, tokens)).astype(np.float32)
        steps = np.arange(k, dtype=np.float32)
        return cls(
            ids,
            logprobs,
            ((ids[..., None] + np.arange(k)) % VOCABULARY).astype(np.int32),
            (logprobs[..., None] - steps).astype(np.float32),
            _digests(rng, requests),
        )

    def changed(self, rows: np.ndarray, worker: int) -> _Arrays:
        rng = np.random.default_rng([11, worker])
        n, length = int(rows.sum()), self.tokens.shape[1]
        noise = rng.normal(0, 1e-3, size=(n, length)).astype(np.float32)
        tokens, logprobs = self.tokens.copy(), self.logprobs.copy()
        top_ids, top = self.top_ids.copy(), self.top_logprobs.copy()
        logprobs[rows] = np.minimum(logprobs[rows] + noise, 0)
        top[rows] += noise[..., None]
        at = rng.integers(0, length, size=n)
        flips = np.flatnonzero(rng.random(n) < 0.34)
        which = np.flatnonzero(rows)[flips]
        tokens[which, at[flips]] = (tokens[which, at[flips]] + 1) % VOCABULARY
        digests = self.digests.copy()
        digests[rows] = _digests(rng, n)
        return _Arrays(tokens, logprobs, top_ids, top, digests)

    def payloads(self, prompts: np.ndarray) -> pa.Table:
        n, length = self.tokens.shape
        k = self.top_ids.shape[2]

        def lists(values: np.ndarray, width: int) -> pa.Array:
            offsets = pa.array(np.arange(n + 1, dtype=np.int32) * width)
            return pa.ListArray.from_arrays(offsets, pa.array(values.reshape(-1)))

        return pa.table(
            [
                _binary(self.digests[:, 0]),
                _binary(prompts),
                lists(self.tokens, length),
                lists(self.logprobs, length),
                pa.array(np.full(n, k, dtype=np.int32)),
                lists(self.top_ids, length * k),
                lists(self.top_logprobs, length * k),
                pa.nulls(n, pa.string()),
            ],
            schema=payloads_schema(),
        )


def _digests(rng: np.random.Generator, n: int) -> np.ndarray:
    """Payload, token, logprob and candidate digests [n, 4] of results that nothing else shares."""
    return np.frombuffer(rng.bytes(16 * n * 4), dtype="V16").reshape(n, 4).copy()


def _binary(values: np.ndarray) -> pa.Array:
    data = np.ascontiguousarray(values)
    return pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(data), [None, pa.py_buffer(data.tobytes())]
    )


def _observations(
    arrays: _Arrays, prompts: np.ndarray, ids: list[str], shared: dict[str, Any]
) -> pa.Table:
    n, length = arrays.tokens.shape
    digest = dict(
        zip(("payload_id", "token_digest", "logprob_digest", "top_digest"), range(4), strict=True)
    )
    numbers = {
        "request_index": np.arange(n),
        "sample_index": np.zeros(n),
        "n_tokens": np.full(n, length),
        "n_nan": np.zeros(n),
        "n_inf": np.zeros(n),
        "n_positive_logprob": np.zeros(n),
        "n_out_of_vocabulary": np.zeros(n),
        "n_cached_tokens": np.zeros(n),
    }
    columns = []
    schema = observations_schema()
    for f in schema:
        if f.name in digest:
            columns.append(_binary(arrays.digests[:, digest[f.name]]))
        elif f.name == "prompt_digest":
            columns.append(_binary(prompts))
        elif f.name == "request_id":
            columns.append(pa.array(ids))
        elif f.name in numbers:
            columns.append(pa.array(numbers[f.name].astype(np.int32)))
        elif f.name in shared:
            columns.append(pa.array([shared[f.name]] * n, f.type))
        else:
            columns.append(pa.nulls(n, f.type))
    return pa.table(columns, schema=schema)
