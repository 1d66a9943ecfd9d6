"""What the worker asks of an engine, in plain values.

An engine owns its process' model and answers requests by id. It never decides what to compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from raytest.engines.trace import Trace, TraceJob

# How an engine's owner tells each of its ranks the seed before the rank loads anything.
SEED_VARIABLE = "RAYTEST_RANK_SEED"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters, all explicit: nothing is left to a model's ``generation_config.json``.

    ``seed`` is the request's own (n samples use seed, seed+1, …). ``logprobs`` is k of the top-k
    kept per position; None keeps none, 0 keeps the sampled token's alone. ``beam_width`` > 0 asks
    for beam search, where ``length_penalty`` applies and temperature, top_p, top_k, n and logprobs
    do not.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 64
    seed: int = 0
    n: int = 1
    logprobs: int | None = 5
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam_width: int = 0
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as token ids, with its sampling parameters; known by ``request_id`` alone."""

    request_id: str
    request_index: int
    prompt_token_ids: tuple[int, ...]
    prompt_digest: bytes
    sampling: Sampling


@dataclass(slots=True)
class Completion:
    """One sample of one request, or the error that took its place (then the arrays are empty).

    ``token_ids`` int32 [t]; ``logprobs`` float32 [t] of the sampled tokens (nats; empty if none
    were asked for); ``top_token_ids`` int32 and ``top_logprobs`` float32, flat [t * top_k], each
    position sorted by logprob descending.
    """

    request_id: str
    sample_index: int
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    top_k: int
    top_token_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]
    finish_reason: str | None = None
    stop_reason: str | None = None
    cumulative_logprob: float | None = None
    n_cached_tokens: int | None = None
    text: str | None = None
    error_kind: str | None = None
    error: str | None = None


@dataclass(slots=True)
class StepLog:
    """The batches that really formed: per engine step, requests scheduled and tokens scheduled."""

    requests: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def batch_size(self) -> int | None:
        """Most requests that ran together in one step; None if no step was seen."""
        return max(self.requests, default=None)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One variant as an engine starts it, resolved on the driver and shipped to the worker.

    ``device_uuids`` has one entry per rank in rank order (GPU UUIDs, or ``cpu:<i>``). ``fault``
    plants a known fault (see the engine's own documentation); None in every ordinary run.
    ``trace_replay``: the engine is for scoring alone, and scores on its decode path.
    """

    backend: str
    model_path: str
    tokenizer_path: str
    dtype: str
    max_model_len: int | None
    seed: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    level: int
    profile: str
    device_kind: str
    device_uuids: tuple[str, ...]
    executor: str
    trust_remote_code: bool = False
    warn_only: bool = False
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    logprobs: int | None = 5
    fault: Mapping[str, Any] | None = None
    trace_replay: bool = False


class Engine(Protocol):
    """One running engine. Every method but ``close`` may raise
    :class:`raytest.errors.CellError`."""

    def start(self) -> None:
        """Load the model on every rank; seeds are set by the worker before this and here per
        rank."""

    def states_before_load(self) -> list[Mapping[str, str]]:
        """The seed audit from before the model was loaded, one mapping per rank in rank order
        (generator name -> state digest)."""

    def vocabulary_size(self) -> int:
        """Number of token ids the model can produce."""

    def generate(self, batches: Sequence[Sequence[Request]]) -> tuple[list[Completion], StepLog]:
        """Run each inner batch to its end, one batch after the other; all requests of a batch are
        handed over together. Returns one Completion per request and sample, in any order; a request
        that fails alone comes back with ``error`` set and costs no other."""

    def score(
        self, requests: Sequence[Request], completions: Sequence[Sequence[int]]
    ) -> list[Completion]:
        """Score fixed completions (teacher forcing): logprobs of exactly those tokens."""

    def trace_batches(self, job: TraceJob) -> Trace:
        """Like ``generate``, with hooks on every module: what they took in and handed on while one
        request ran. Results are those of a pass without hooks."""

    def reset(self, seed: int) -> list[Mapping[str, str]]:
        """Before a trial: drop caches, seed every rank; the seed audit, one mapping per rank
        (generator name -> state digest)."""

    def rank_fingerprints(self) -> list[Mapping[str, str]]:
        """Fingerprint of each rank's process (effective environment and configuration), rank
        order."""

    def close(self) -> None:
        """Free devices and child processes; never raises."""
