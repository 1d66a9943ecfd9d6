"""What goes into the reference engine and what comes out, with the faults that sit at that edge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raytest.engines.base import Completion, Request, Sampling
from raytest.engines.reference_faults import Fault
from raytest.engines.reference_settings import Settings

INVALID = "invalid_request"


def failed(request: Request, sample_index: int, error: str) -> Completion:
    """The completion of a request that could not run."""
    none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
    return Completion(
        request_id=request.request_id,
        sample_index=sample_index,
        token_ids=none_i,
        logprobs=none_f,
        top_k=0,
        top_token_ids=none_i,
        top_logprobs=none_f,
        error_kind=INVALID,
        error=error,
    )


def seen_prompt(request: Request, fault: Fault | None, vocabulary: int) -> tuple[int, ...]:
    """The token ids that the model is given."""
    prompt = request.prompt_token_ids
    if fault is not None and fault.name == "chat_template" and prompt:
        return (*(fault.value or (1,)), *prompt)
    if fault is not None and fault.name == "other_tokenizer":
        shift = 1 if fault.value is None else fault.value
        return tuple((t + shift) % vocabulary if 0 <= t < vocabulary else t for t in prompt)
    return prompt


def seen_sampling(request: Request, fault: Fault | None) -> Sampling:
    """The sampling parameters that the engine applies."""
    sampling = request.sampling
    if fault is not None and fault.name == "generation_config":
        top_p = sampling.top_p if fault.top_p is None else fault.top_p
        return replace(sampling, temperature=float(fault.temperature), top_p=float(top_p))
    return sampling


def prompt_error(prompt: Sequence[int], settings: Settings) -> str | None:
    """Why a prompt cannot run, or None."""
    if not prompt:
        return "the prompt has no tokens"
    if len(prompt) >= settings.max_model_len:
        return f"the prompt has {len(prompt)} tokens; max_model_len is {settings.max_model_len}"
    return token_error(prompt, settings.shape.vocabulary)


def token_error(token_ids: Sequence[int], vocabulary: int) -> str | None:
    """Names the first token id outside the vocabulary, or None."""
    for token in token_ids:
        if not 0 <= token < vocabulary:
            return f"token id {token} is out of the vocabulary of {vocabulary}"
    return None


def handed_over(
    completions: list[Completion], indices: Mapping[str, int], fault: Fault | None
) -> list[Completion]:
    """Completions as the engine returns them; ``indices`` are the request indices by request id."""
    if fault is None:
        return completions
    if fault.name == "truncated_output":
        return [
            _truncated(c, fault.value) if indices[c.request_id] == fault.index else c
            for c in completions
        ]
    if fault.name == "swapped_outputs":
        pair = (fault.index, 1 if fault.value is None else fault.value)
        ids = {i: name for name, i in indices.items() if i in pair}
        if len(ids) == 2:
            other = {ids[pair[0]]: ids[pair[1]], ids[pair[1]]: ids[pair[0]]}
            return [
                replace(c, request_id=other.get(c.request_id, c.request_id)) for c in completions
            ]
    return completions


def _truncated(completion: Completion, kept: int | None) -> Completion:
    n = len(completion.token_ids) // 2 if kept is None else kept
    return replace(
        completion,
        token_ids=completion.token_ids[:n],
        logprobs=completion.logprobs[:n],
        top_token_ids=completion.top_token_ids[: n * completion.top_k],
        top_logprobs=completion.top_logprobs[: n * completion.top_k],
    )
