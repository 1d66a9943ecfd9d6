"""A small transformer in numpy that keeps the engine protocol: fast, exact, and able to be at
fault.

It stands in for vLLM where a test needs many engines, a known cause or a planted fault, and only
where a spec says ``backend = "reference"``. TP size, thread count, batch and version change
rounding as they do on a GPU, because they change the order of sums; PP size, repeats and launches
change nothing. See :mod:`raytest.engines.reference_faults` for what can be planted.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from raytest.digest import digest_bytes
from raytest.engines.base import Completion, EngineConfig, Request, StepLog
from raytest.engines.reference_beam import BeamSearch
from raytest.engines.reference_cache import BlockPool
from raytest.engines.reference_faults import Fault, read_fault
from raytest.engines.reference_model import Model
from raytest.engines.reference_parts import parts_of
from raytest.engines.reference_planting import Planting
from raytest.engines.reference_requests import (
    failed,
    handed_over,
    prompt_error,
    seen_prompt,
    seen_sampling,
    token_error,
)
from raytest.engines.reference_scheduler import Scheduler, SequenceState
from raytest.engines.reference_settings import Settings, fingerprint, read_settings
from raytest.engines.reference_trace import ModuleTrace, Recorder
from raytest.engines.reference_weights import make_weights
from raytest.engines.trace import Trace, TraceJob
from raytest.errors import CellError


class _Running:
    """What exists between start and close."""

    def __init__(self, settings: Settings, fault: Fault | None, before_step: _StepHook) -> None:
        shape, arguments = settings.shape, settings.arguments
        planting = Planting(fault, shape)
        self.pool = BlockPool(
            layers=shape.layers,
            ranks=shape.tensor_parallel_size,
            heads=shape.heads // shape.tensor_parallel_size,
            head_size=shape.head_size,
            block_size=arguments["block_size"],
            prefix_caching=arguments["enable_prefix_caching"],
        )
        planting.prepare_cache(self.pool)
        weights = make_weights(shape, arguments["weights_seed"], settings.dtype)
        planting.weights(weights, settings.dtype)
        self.model = Model(
            shape,
            weights,
            self.pool,
            settings.orders,
            settings.dtype,
            planting,
            settings.max_model_len,
        )
        self.scheduler = Scheduler(
            self.model,
            self.pool,
            max_num_seqs=arguments["max_num_seqs"],
            eos_token_id=settings.eos_token_id,
            before_step=before_step,
        )
        self.beams = BeamSearch(self.scheduler, self.pool, settings.eos_token_id)


class _StepHook:
    """The faults that take time or the process with them."""

    def __init__(self, fault: Fault | None) -> None:
        self._fault = fault

    def __call__(self, step: int) -> None:
        fault = self._fault
        if fault is None:
            return
        if fault.name == "slow" and fault.acts(step):
            time.sleep(0.01 if fault.value is None else fault.value)
        if fault.name == "die_in_trial" and step == fault.step and fault.acts_now():
            _die(fault)


class ReferenceEngine:
    """One engine with all its simulated ranks in this process.

    Raises :class:`CellError` from the constructor for a configuration or a fault that makes no
    sense.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._fault = read_fault(config)
        self._settings = read_settings(config, self._fault)
        self._ready: _Running | None = None
        self._next_key = 0

    @property
    def _running(self) -> _Running:
        if self._ready is None:
            raise CellError("the reference engine has not been started, or is closed")
        return self._ready

    def start(self) -> None:
        """Make weights and cache. Planted start faults act here."""
        fault = self._fault
        if fault is not None and fault.name in _START_FAULTS and fault.acts_now():
            _fail_start(fault)
        self._ready = _Running(self._settings, fault, _StepHook(fault))

    def vocabulary_size(self) -> int:
        """Number of token ids."""
        return self._settings.shape.vocabulary

    def module_names(self) -> tuple[str, ...]:
        """Names of the modules that :meth:`trace` reports, in execution order."""
        return self._settings.shape.module_names()

    def generate(self, batches: Sequence[Sequence[Request]]) -> tuple[list[Completion], StepLog]:
        """Run the batches one after the other; see :class:`raytest.engines.base.Engine`."""
        log = StepLog()
        completions: list[Completion] = []
        for batch in batches:
            sequences: list[SequenceState] = []
            for request in batch:
                made = self._sequences(request)
                if isinstance(made, str):
                    completions += [failed(request, i, made) for i in range(_samples(request))]
                else:
                    sequences += made
            completions += self._run(sequences, log)
        indices = {r.request_id: r.request_index for batch in batches for r in batch}
        return handed_over(completions, indices, self._fault), log

    def _run(self, sequences: Sequence[SequenceState], log: StepLog) -> list[Completion]:
        """Continuous batching for all but beam searches, which follow one by one."""
        plain = [s for s in sequences if s.sampling.beam_width == 0 or s.forced is not None]
        beams = [s for s in sequences if s.sampling.beam_width > 0 and s.forced is None]
        with np.errstate(all="ignore"):
            self._running.scheduler.run(plain, log)
            searched = [c for s in beams for c in self._running.beams.run(s, log)]
        return [s.completion() for s in plain] + searched

    def _sequences(self, request: Request) -> list[SequenceState] | str:
        """One sequence per sample (one for a beam search), or what is wrong with the request."""
        prompt = seen_prompt(request, self._fault, self.vocabulary_size())
        problem = prompt_error(prompt, self._settings)
        if problem is None and request.sampling.max_tokens < 1:
            problem = f"max_tokens is {request.sampling.max_tokens}; expected 1 or more"
        if problem is not None:
            return problem
        count = 1 if request.sampling.beam_width > 0 else request.sampling.n
        return [self._sequence(request, prompt, i) for i in range(count)]

    def _sequence(self, request: Request, prompt: tuple[int, ...], sample: int) -> SequenceState:
        self._next_key += 1
        sampling = seen_sampling(request, self._fault)
        offset = self._seed_offset(self._settings.sampling_rank)
        return SequenceState(
            key=self._next_key,
            request=request,
            sample_index=sample,
            sampling=sampling,
            prompt=prompt,
            limit=min(sampling.max_tokens, self._settings.max_model_len - len(prompt)),
            seed=sampling.seed + sample + offset,
        )

    def score(
        self, requests: Sequence[Request], completions: Sequence[Sequence[int]]
    ) -> list[Completion]:
        """Logprobs of given completions, one per request, decoded as one batch like generated
        ones."""
        scored: list[Completion] = []
        sequences: list[SequenceState] = []
        for request, token_ids in zip(requests, completions, strict=True):
            made = self._forced(request, token_ids)
            if isinstance(made, str):
                scored.append(failed(request, 0, made))
            elif made.forced:
                sequences.append(made)
            else:
                scored.append(made.completion())
        return scored + self._run(sequences, StepLog())

    def _forced(self, request: Request, token_ids: Sequence[int]) -> SequenceState | str:
        made = self._sequences(request)
        if isinstance(made, str):
            return made
        sequence, tokens = made[0], tuple(int(t) for t in token_ids)
        problem = token_error(tokens, self.vocabulary_size())
        if problem is not None:
            return f"completion: {problem}"
        total = len(sequence.prompt) + len(tokens)
        if total > self._settings.max_model_len:
            return (
                f"prompt and completion have {total} tokens; max_model_len is "
                f"{self._settings.max_model_len}"
            )
        sequence.forced, sequence.limit = tokens, len(tokens)
        return sequence

    def trace(
        self,
        request: Request,
        completion_token_ids: Sequence[int],
        *,
        modules: Collection[str] = (),
        companions: Sequence[tuple[Request, Sequence[int]]] = (),
    ) -> list[ModuleTrace]:
        """What every module of every rank took in and handed on while ``request`` was decoded with
        the given tokens, alone or in one batch with ``companions`` (which are put before it).

        Position p of a trace is token p of prompt and completion; the last token is not run.
        ``modules`` names those whose tensors are kept. Raises :class:`CellError` for a request, a
        completion or a module that cannot be traced.
        """
        unknown = [m for m in modules if m not in self.module_names()]
        if unknown:
            raise CellError(f"no module {unknown[0]!r} in the reference engine")
        sequences: list[SequenceState] = []
        for one, token_ids in (*companions, (request, completion_token_ids)):
            made = self._forced(one, token_ids)
            if isinstance(made, str) or not made.forced:
                problem = made if isinstance(made, str) else "the completion has no tokens"
                raise CellError(f"request {one.request_id} cannot be traced: {problem}")
            sequences.append(made)
        recorder = Recorder(sequences[-1].key)
        self._running.model.probe = recorder
        try:
            self._run(sequences, StepLog())
        finally:
            self._running.model.probe = None
        return recorder.traces(self._settings.shape, modules)

    def trace_batches(self, job: TraceJob) -> Trace:
        """Generate the batches as :meth:`generate` does and keep the rows of one request in them;
        raises :class:`CellError` for a job without it."""
        self.reset(job.seed)
        recorder: Recorder | None = None
        completions: list[Completion] = []
        for batch in job.batches:
            made = [(r, self._sequences(r)) for r in batch]
            sequences = [s for _, found in made if not isinstance(found, str) for s in found]
            wanted = job.request_id, job.sample_index
            traced = next(
                (s for s in sequences if (s.request.request_id, s.sample_index) == wanted), None
            )
            if traced is not None:
                recorder = Recorder(traced.key)
                self._running.model.probe = recorder
            try:
                completions += self._run(sequences, StepLog())
            finally:
                self._running.model.probe = None
        if recorder is None:
            raise CellError(f"request {job.request_id} is not among those to trace, or is unusable")
        parts = parts_of(recorder, self._settings.shape, self._settings.dtype, job)
        return Trace(parts, [], completions)

    def states_before_load(self) -> list[Mapping[str, str]]:
        """Digests of every rank's generators as the engine's own seed makes them."""
        return [_audit(self._config.seed) for _ in range(self._settings.shape.world_size)]

    def reset(self, seed: int) -> list[Mapping[str, str]]:
        """Drop the cache and seed every rank's own generators; digests of their states."""
        self._running.pool.reset()
        return [
            _audit(seed + self._seed_offset(rank))
            for rank in range(self._settings.shape.world_size)
        ]

    def _seed_offset(self, rank: int) -> int:
        fault = self._fault
        if fault is None or fault.name != "wrong_seed":
            return 0
        at_fault = self._settings.sampling_rank if fault.rank is None else fault.rank
        return (1 if fault.value is None else int(fault.value)) if rank == at_fault else 0

    def rank_fingerprints(self) -> list[Mapping[str, str]]:
        """One flat mapping per rank, in rank order."""
        ranks = range(self._settings.shape.world_size)
        return [fingerprint(self._config, self._settings, self._fault, rank) for rank in ranks]

    def close(self) -> None:
        """Forget weights and cache."""
        self._ready = None


_START_FAULTS = ("hang_on_start", "die_on_start", "out_of_memory")


def _samples(request: Request) -> int:
    return 1 if request.sampling.beam_width > 0 else request.sampling.n


def _fail_start(fault: Fault) -> None:
    while fault.name == "hang_on_start":
        time.sleep(3600)
    if fault.name == "die_on_start":
        _die(fault)
    raise CellError(f"out of memory: rank {fault.rank or 0} could not load the weights (planted)")


def _die(fault: Fault) -> None:
    if fault.value == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(fault.value if isinstance(fault.value, int) else 1)


def _audit(seed: int) -> Mapping[str, str]:
    """State digests of a rank's generators, made from ``seed``; the process' own stay untouched."""
    python = random.Random(seed).getstate()
    bits = np.random.PCG64(seed).state["state"]
    return {
        "reference.random": digest_bytes("random-state", repr(python).encode()).hex(),
        "reference.numpy": digest_bytes("random-state", repr(sorted(bits.items())).encode()).hex(),
    }
