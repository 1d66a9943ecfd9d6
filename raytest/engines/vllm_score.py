"""Fixed tokens through vLLM: on the prefill path (``prompt_logprobs``), or on the decode path where
this vLLM can force the tokens that it decodes (trace replay)."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from raytest.engines.base import Completion, Request
from raytest.engines.vllm import completion_of, failed, sort_candidates
from raytest.errors import CellError


def require_trace_replay() -> None:
    """Raise CellError where this vLLM has no trace replay. Asked of its interface, not its version;
    whether an engine can do it (it takes the second-generation model runner) vLLM says itself."""
    from vllm import EngineArgs, SamplingParams

    for what, name in ((EngineArgs, "enable_trace_replay"), (SamplingParams, TRACE)):
        if name not in inspect.signature(what).parameters:
            raise CellError(
                f"decode-path replay is not available: this vLLM's {what.__name__} has no {name}"
            )


TRACE = "trace_decode_token_ids"
Prompts = tuple[list[dict[str, list[int]]], list[Any]]


def prefill(requests: Sequence[Request], completions: Sequence[Sequence[int]]) -> Prompts:
    """Prompts and parameters that score the completions as the end of a prompt."""
    from vllm import SamplingParams

    prompts = [
        {"prompt_token_ids": [*r.prompt_token_ids, *tokens]}
        for r, tokens in zip(requests, completions, strict=True)
    ]
    params = [
        SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=r.sampling.logprobs or 0,
            flat_logprobs=True,
            detokenize=False,
            seed=r.sampling.seed,
        )
        for r in requests
    ]
    return prompts, params


def decode(requests: Sequence[Request], completions: Sequence[Sequence[int]]) -> Prompts:
    """Prompts and parameters that decode the completions token by token."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(r.prompt_token_ids)} for r in requests]
    params = [
        SamplingParams(
            # else replay ends after the 16 tokens of the default
            max_tokens=len(tokens),
            temperature=0.0,
            logprobs=r.sampling.logprobs or 0,
            flat_logprobs=True,
            detokenize=False,
            seed=r.sampling.seed,
            **{TRACE: list(tokens)},
        )
        for r, tokens in zip(requests, completions, strict=True)
    ]
    return prompts, params


def decoded(request: Request, tokens: Sequence[int], output: Any) -> Completion:
    """The scores of forced tokens; an error where vLLM decoded others."""
    found = completion_of(request, output, output.outputs[0])
    if found.token_ids.tolist() != list(tokens):
        n = len(found.token_ids)
        return failed(request, "replay", f"replay gave {n} tokens that are not the {len(tokens)}")
    return found


def prefilled(request: Request, tokens: Sequence[int], output: Any) -> Completion:
    """The scores of the end of a prompt."""
    import numpy as np

    flat = output.prompt_logprobs
    first = len(request.prompt_token_ids)
    logprobs, top_ids, top_values = [], [], []
    k = request.sampling.logprobs or 0
    for i in range(first, first + len(tokens)):
        start, end = flat.start_indices[i], flat.end_indices[i]
        logprobs.append(flat.logprobs[start])
        ids = np.asarray([flat.token_ids[start + 1 : end]], dtype=np.int32)
        values = np.asarray([flat.logprobs[start + 1 : end]], dtype=np.float64).astype(np.float32)
        ids, values = sort_candidates(ids, values)
        top_ids.append(ids[0])
        top_values.append(values[0])
    return Completion(
        request_id=request.request_id,
        sample_index=0,
        token_ids=np.asarray(tokens, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float64).astype(np.float32),
        top_k=k,
        top_token_ids=np.concatenate(top_ids) if k else np.empty(0, dtype=np.int32),
        top_logprobs=np.concatenate(top_values) if k else np.empty(0, dtype=np.float32),
        finish_reason="scored",
    )
