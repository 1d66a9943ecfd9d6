"""Beam search in the reference engine, with vLLM's rules."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from raytest.engines.base import Completion, StepLog
from raytest.engines.reference_cache import BlockPool
from raytest.engines.reference_numerics import Array, log_softmax
from raytest.engines.reference_scheduler import Scheduler, SequenceState


@dataclass(frozen=True, slots=True)
class Finished:
    """A beam that ended, with its log-probability in nats."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float
    finish_reason: str


def beam_score(
    n_prompt: int, beam: Finished, eos_token_id: int | None, length_penalty: float
) -> float:
    """Log-probability over length to the power of ``length_penalty``. The length counts the prompt
    and leaves out a final end-of-sequence token (vLLM ``get_beam_search_score``, after
    transformers)."""
    length = n_prompt + len(beam.token_ids)
    if beam.token_ids[-1] == eos_token_id:
        length -= 1
    return beam.cumulative_logprob / float(max(length, 1) ** length_penalty)


class BeamSearch:
    """Beams of one request at a time; they are the rows of each step."""

    def __init__(self, scheduler: Scheduler, pool: BlockPool, eos_token_id: int | None) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._eos_token_id = eos_token_id

    def run(self, first: SequenceState, log: StepLog) -> list[Completion]:
        """The ``beam_width`` best completions of ``first``'s prompt, best first."""
        sampling = first.sampling
        self._scheduler.begin_step()
        logits = self._scheduler.prefill(first)
        log.requests.append(1)
        log.tokens.append(len(first.prompt) - first.n_cached_tokens)
        n_cached_tokens = first.n_cached_tokens
        ended: list[Finished] = []
        beams, scores = [first], [0.0]
        for length in range(1, first.limit + 1):
            beams, scores = self._extend(beams, scores, logits, ended)
            if not beams or length == first.limit:
                break
            self._scheduler.begin_step()
            logits = self._scheduler.decode(beams)
            log.requests.append(len(beams))
            log.tokens.append(len(beams))
        for beam, score in zip(beams, scores, strict=True):
            ended.append(Finished(tuple(beam.token_ids), score, "length"))
            self._pool.release(beam.blocks)
        penalty, n_prompt = sampling.length_penalty, len(first.prompt)
        ended.sort(key=lambda b: -beam_score(n_prompt, b, self._eos_token_id, penalty))
        best = ended[: sampling.beam_width]
        return [_completion(first, i, beam, n_cached_tokens) for i, beam in enumerate(best)]

    def _extend(
        self,
        beams: list[SequenceState],
        scores: list[float],
        logits: Array,
        ended: list[Finished],
    ) -> tuple[list[SequenceState], list[float]]:
        """Every beam with every token; those that end leave, the best ``beam_width`` others
        stay."""
        totals = log_softmax(logits).astype(np.float64) + np.array(scores)[:, None]
        sampling = beams[0].sampling
        if self._eos_token_id is not None and not sampling.ignore_eos:
            for beam, total in zip(beams, totals[:, self._eos_token_id], strict=True):
                ended.append(Finished((*beam.token_ids, self._eos_token_id), float(total), "stop"))
            totals[:, self._eos_token_id] = -np.inf
        flat = totals.reshape(-1)
        order = np.argsort(-flat, kind="stable")[: sampling.beam_width]
        chosen = [int(i) for i in order if flat[i] != -np.inf]
        vocabulary = totals.shape[1]
        extended = [self._child(beams[i // vocabulary], i % vocabulary) for i in chosen]
        for beam in beams:
            self._pool.release(beam.blocks)
        return extended, [float(flat[i]) for i in chosen]

    def _child(self, beam: SequenceState, token: int) -> SequenceState:
        blocks = self._pool.fork(beam.blocks)
        return replace(beam, token_ids=[*beam.token_ids, token], blocks=blocks)


def _completion(
    first: SequenceState, index: int, beam: Finished, n_cached_tokens: int
) -> Completion:
    return Completion(
        request_id=first.request.request_id,
        sample_index=index,
        token_ids=np.array(beam.token_ids, dtype=np.int32),
        logprobs=np.zeros(0, np.float32),
        top_k=0,
        top_token_ids=np.zeros(0, np.int32),
        top_logprobs=np.zeros(0, np.float32),
        finish_reason=beam.finish_reason,
        cumulative_logprob=beam.cumulative_logprob,
        n_cached_tokens=n_cached_tokens,
    )
