"""Arrow schemas of the run folder and the vocabulary that every room shares.

Parquet readers take a dataset's schema from its first file and silently cast or drop what differs
in later ones, so every file is written and checked against the schemas here.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
READABLE_SCHEMA_VERSIONS = (1,)


class Axis(StrEnum):
    """What two observations of one request differ in, everything else held equal."""

    REPEAT = "repeat"
    LAUNCH = "launch"
    ARRANGEMENT = "arrangement"
    GPU = "gpu"
    NODE = "node"
    TP = "tp"
    PP = "pp"
    VARIANT = "variant"
    RUN = "run"


class Arrangement(StrEnum):
    """How the requests reach a running engine."""

    BATCH = "batch"
    SOLO = "solo"
    REVERSED = "reversed"
    SHUFFLED = "shuffled"
    PREFIX = "prefix"


class Verdict(StrEnum):
    """What a comparison says of two observations of one request, best to worst."""

    BITWISE = "bitwise"
    TOKENS = "tokens"
    NEAR_TIE = "near-tie"
    SAMPLED_FLIP = "sampled-flip"
    DRIFT = "drift"
    CORRUPT = "corrupt"
    INCOMPARABLE = "incomparable"
    MISSING = "missing"
    ERROR = "error"


class RunVerdict(StrEnum):
    """How a run ended; each has an exit code in :class:`raytest.errors.ExitCode`."""

    PASS = "pass"
    MISMATCH = "mismatch"
    INCONCLUSIVE = "inconclusive"
    NOT_COMPARABLE = "not comparable"


class CellState(StrEnum):
    """Where a cell's launch stands, in events and progress."""

    PLANNED = "planned"
    PLACED = "placed"
    LOADING = "loading"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@cache
def observations_schema() -> pa.Schema:
    """One row per request and sample of one trial. Digests are null where ``error`` is set."""
    import pyarrow as pa

    digest = pa.binary(16)
    return pa.schema(
        [
            # where
            pa.field("run_id", pa.string(), nullable=False),
            pa.field("cell_id", pa.string(), nullable=False),
            pa.field("variant", pa.string(), nullable=False),
            pa.field("tensor_parallel_size", pa.int32(), nullable=False),
            pa.field("pipeline_parallel_size", pa.int32(), nullable=False),
            pa.field("node_id", pa.string(), nullable=False),
            pa.field("hostname", pa.string(), nullable=False),
            pa.field("gpu_uuids", pa.list_(pa.string()), nullable=False),
            pa.field("slot", pa.string(), nullable=False),
            # which pass
            pa.field("launch", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("trial", pa.int32(), nullable=False),
            pa.field("repeat", pa.int32(), nullable=False),
            pa.field("arrangement", pa.string(), nullable=False),
            # most requests that ran together in one engine step of this trial; null if unknown
            pa.field("batch_size", pa.int32()),
            # which request
            pa.field("request_index", pa.int32(), nullable=False),
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("sample_index", pa.int32(), nullable=False),
            pa.field("prompt_digest", digest, nullable=False),
            # for equality
            pa.field("token_digest", digest),
            pa.field("logprob_digest", digest),
            pa.field("top_digest", digest),
            pa.field("payload_id", digest),
            # what came back
            pa.field("n_tokens", pa.int32()),
            pa.field("finish_reason", pa.string()),
            pa.field("stop_reason", pa.string()),
            pa.field("cumulative_logprob", pa.float64()),
            pa.field("n_nan", pa.int32()),
            pa.field("n_inf", pa.int32()),
            pa.field("n_positive_logprob", pa.int32()),
            pa.field("n_out_of_vocabulary", pa.int32()),
            pa.field("n_cached_tokens", pa.int32()),
            pa.field("error_kind", pa.string()),
            pa.field("error", pa.string()),
            # when
            pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
            pa.field("duration_s", pa.float64(), nullable=False),
        ]
    )


@cache
def payloads_schema() -> pa.Schema:
    """One row per distinct (request, digests). ``top_*`` are flat, ``top_k`` entries per
    position."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("payload_id", pa.binary(16), nullable=False),
            pa.field("prompt_digest", pa.binary(16), nullable=False),
            pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
            pa.field("top_k", pa.int32(), nullable=False),
            pa.field("top_token_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("top_logprobs", pa.list_(pa.float32()), nullable=False),
            pa.field("text", pa.string()),
        ]
    )


@cache
def requests_schema() -> pa.Schema:
    """One row per request of the workload; ``error`` is set where the prompt itself is unusable."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("request_index", pa.int32(), nullable=False),
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("prompt_digest", pa.binary(16), nullable=False),
            pa.field("prompt", pa.string()),
            pa.field("prompt_token_ids", pa.list_(pa.int32()), nullable=False),
            pa.field("kind", pa.string()),
            pa.field("reference", pa.string()),
            pa.field("seed", pa.int64()),
            pa.field("sampling", pa.string(), nullable=False),
            pa.field("error", pa.string()),
        ]
    )


@cache
def fingerprints_schema() -> pa.Schema:
    """Long form: one row per process and key. ``rank`` is -1 for the actor itself."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("cell_id", pa.string(), nullable=False),
            pa.field("launch", pa.int32(), nullable=False),
            pa.field("attempt", pa.int32(), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("stage", pa.string(), nullable=False),
            pa.field("key", pa.string(), nullable=False),
            pa.field("value", pa.string(), nullable=False),
        ]
    )


@cache
def verdicts_schema() -> pa.Schema:
    """One row per compared class: a minority class of one request against its majority class."""
    import pyarrow as pa

    digest = pa.binary(16)
    return pa.schema(
        [
            pa.field("axis", pa.string(), nullable=False),
            pa.field("group", pa.string(), nullable=False),
            pa.field("request_index", pa.int32(), nullable=False),
            pa.field("request_id", pa.string(), nullable=False),
            pa.field("sample_index", pa.int32(), nullable=False),
            pa.field("verdict", pa.string(), nullable=False),
            pa.field("reason", pa.string()),
            pa.field("reference_member", pa.string(), nullable=False),
            pa.field("member", pa.string(), nullable=False),
            pa.field("n_reference", pa.int32(), nullable=False),
            pa.field("n_members", pa.int32(), nullable=False),
            pa.field("reference_payload_id", digest),
            pa.field("payload_id", digest),
            pa.field("first_divergence", pa.int32()),
            pa.field("reference_token", pa.int32()),
            pa.field("token", pa.int32()),
            pa.field("margin", pa.float64()),
            pa.field("max_logprob_difference", pa.float64()),
            pa.field("mean_logprob_difference", pa.float64()),
            pa.field("max_ulp_float32", pa.int64()),
        ]
    )
