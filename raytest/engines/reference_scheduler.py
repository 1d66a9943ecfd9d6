"""Continuous batching in the reference engine: sequences, steps, and the log of both."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raytest.engines.base import Completion, Request, Sampling, StepLog
from raytest.engines.reference_cache import NULL_BLOCK, BlockPool
from raytest.engines.reference_model import Model, Rows
from raytest.engines.reference_numerics import Array, log_softmax
from raytest.engines.reference_sampling import Ids, choose, top_candidates, uniform


@dataclass(slots=True)
class SequenceState:
    """One sample of one request while it runs. With ``forced`` its tokens are given, not chosen."""

    key: int
    request: Request
    sample_index: int
    sampling: Sampling
    prompt: tuple[int, ...]
    limit: int
    seed: int
    forced: tuple[int, ...] | None = None
    blocks: list[int] = field(default_factory=list)
    n_cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[np.float32] = field(default_factory=list)
    top_token_ids: list[Ids] = field(default_factory=list)
    top_logprobs: list[Array] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | None = None

    def completion(self) -> Completion:
        """What the sequence came to."""
        asked = self.sampling.logprobs is not None
        logprobs = np.array(self.logprobs if asked else [], dtype=np.float32)
        return Completion(
            request_id=self.request.request_id,
            sample_index=self.sample_index,
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=logprobs,
            top_k=len(self.top_token_ids[0]) if self.top_token_ids else 0,
            top_token_ids=np.concatenate([np.zeros(0, np.int32), *self.top_token_ids]),
            top_logprobs=np.concatenate([np.zeros(0, np.float32), *self.top_logprobs]),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=float(sum(map(float, self.logprobs))) if asked else None,
            n_cached_tokens=self.n_cached_tokens,
        )


class Scheduler:
    """Runs sequences step by step. A step prefills what is admitted, each prompt in a call of its
    own, and decodes all that run already, one row each, in one call.

    ``before_step`` is called with the number of the step, counted from the engine's start.
    """

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        *,
        max_num_seqs: int,
        eos_token_id: int | None,
        before_step: Callable[[int], None],
    ) -> None:
        self._model = model
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._eos_token_id = eos_token_id
        self._before_step = before_step
        self._step = 0

    def run(self, sequences: Iterable[SequenceState], log: StepLog) -> None:
        """Run ``sequences``, handed over together, to their end."""
        waiting = deque(sequences)
        running: list[SequenceState] = []
        while waiting or running:
            admitted = [
                waiting.popleft()
                for _ in range(min(len(waiting), self._max_num_seqs - len(running)))
            ]
            tokens = len(running)
            self.begin_step()
            if running:
                self._accept(running, self.decode(running))
            for sequence in admitted:
                self._accept([sequence], self.prefill(sequence))
                tokens += len(sequence.prompt) - sequence.n_cached_tokens
            running += admitted
            log.requests.append(len(running))
            log.tokens.append(tokens)
            running = self._unfinished(running)

    def begin_step(self) -> None:
        """Count one step; planted faults of this step act from here on."""
        self._before_step(self._step)
        self._model.planting.step = self._step
        self._step += 1

    def _unfinished(self, running: Sequence[SequenceState]) -> list[SequenceState]:
        for sequence in running:
            if sequence.finish_reason is not None:
                self._pool.release(sequence.blocks)
                sequence.blocks = []
        return [s for s in running if s.finish_reason is None]

    def prefill(self, sequence: SequenceState) -> Array:
        """Fill the cache with the prompt's positions; logits [1, vocabulary] of its last."""
        sequence.blocks = self._pool.cached(sequence.prompt)
        start = len(sequence.blocks) * self._pool.block_size
        sequence.n_cached_tokens = start
        while len(sequence.blocks) * self._pool.block_size < len(sequence.prompt):
            sequence.blocks.append(self._pool.allocate())
        positions = np.arange(start, len(sequence.prompt))
        rows = Rows(
            token_ids=np.array(sequence.prompt[start:], dtype=np.int64),
            positions=positions,
            requests=np.full(len(positions), sequence.request.request_index),
            sequences=np.full(len(positions), sequence.key),
            tables=np.array([sequence.blocks], dtype=np.int64),
            wanted=np.array([len(positions) - 1]),
            decode=False,
        )
        logits = self._model.forward(rows)
        self._pool.remember(sequence.prompt, sequence.blocks)
        return logits

    def decode(self, running: Sequence[SequenceState]) -> Array:
        """Logits [sequences, vocabulary] after each one's newest token."""
        lengths = [len(s.prompt) + len(s.token_ids) for s in running]
        for sequence, length in zip(running, lengths, strict=True):
            if len(sequence.blocks) * self._pool.block_size < length:
                sequence.blocks.append(self._pool.allocate())
        widest = max(len(s.blocks) for s in running)
        padded = [s.blocks + [NULL_BLOCK] * (widest - len(s.blocks)) for s in running]
        rows = Rows(
            token_ids=np.array([s.token_ids[-1] for s in running], dtype=np.int64),
            positions=np.array(lengths, dtype=np.int64) - 1,
            requests=np.array([s.request.request_index for s in running], dtype=np.int64),
            sequences=np.array([s.key for s in running], dtype=np.int64),
            tables=np.array(padded, dtype=np.int64),
            wanted=np.arange(len(running)),
            decode=True,
        )
        return self._model.forward(rows)

    def _accept(self, sequences: Sequence[SequenceState], logits: Array) -> None:
        """Choose each sequence's next token and keep what was asked for."""
        asked = [s.sampling.logprobs for s in sequences]
        logprobs = log_softmax(logits)
        ids, values = top_candidates(logprobs, max((k or 0 for k in asked), default=0))
        for row, (sequence, k) in enumerate(zip(sequences, asked, strict=True)):
            position = len(sequence.token_ids)
            if sequence.forced is not None:
                token = sequence.forced[position]
            else:
                u = uniform(sequence.seed, position)
                token = choose(logits[row], sequence.sampling, u)
            sequence.token_ids.append(token)
            if k is not None:
                sequence.logprobs.append(logprobs[row, token])
            if k:
                sequence.top_token_ids.append(ids[row, :k])
                sequence.top_logprobs.append(values[row, :k])
            self._stop(sequence, token)

    def _stop(self, sequence: SequenceState, token: int) -> None:
        sampling = sequence.sampling
        chosen = sequence.forced is None
        if chosen and token == self._eos_token_id and not sampling.ignore_eos:
            sequence.finish_reason = "stop"
        elif chosen and token in sampling.stop_token_ids:
            sequence.finish_reason, sequence.stop_reason = "stop", str(token)
        elif len(sequence.token_ids) == sequence.limit:
            sequence.finish_reason = "length"
