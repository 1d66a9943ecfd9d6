"""The workload: prompts from anywhere, tokenised once, each known by an id and never by
position."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from raytest.arrangement import arrange
from raytest.chat_template import ChatTemplateError
from raytest.digest import digest_bytes, prompt_digest
from raytest.engines.base import Request, Sampling
from raytest.errors import UsageError
from raytest.prompt_file import Source, read_prompts
from raytest.request_seeds import assign_seeds, derive_seed
from raytest.schema import requests_schema
from raytest.tokenizer import Tokenizer

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = [
    "WorkItem",
    "Workload",
    "arrange",
    "decode_tokens",
    "derive_seed",
    "load_workload",
    "requests_table",
    "token_decoder",
]

# vLLM keeps this many candidates at most unless an engine is started for more.
LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of the workload; ``error`` says why its prompt cannot run (it costs no other).

    ``prompt`` is the text that the token ids stand for; None where only ids were given.
    """

    source: Source
    request: Request
    prompt: str | None
    error: str | None


@dataclass(frozen=True, slots=True)
class Workload:
    """All items, in order of ``request_index``."""

    items: tuple[WorkItem, ...]

    def requests(self) -> list[Request]:
        """The requests that can run."""
        return [i.request for i in self.items if i.error is None]

    @property
    def has_references(self) -> bool:
        """Whether any prompt came with a reference answer."""
        return any(i.source.reference is not None for i in self.items)

    def table(self) -> pa.Table:
        """requests.parquet: every item, the unusable ones too."""
        import pyarrow as pa

        return pa.Table.from_pylist([_row(i) for i in self.items], schema=requests_schema())


def requests_table(
    requests: Sequence[Request], errors: Mapping[int, str] | None = None
) -> pa.Table:
    """requests.parquet of requests that came from no source; ``errors`` by request index."""
    import pyarrow as pa

    errors = errors or {}
    rows = [
        {
            "request_index": r.request_index,
            "request_id": r.request_id,
            "prompt_digest": r.prompt_digest,
            "prompt_token_ids": list(r.prompt_token_ids),
            "seed": r.sampling.seed,
            "sampling": json.dumps(asdict(r.sampling), sort_keys=True),
            "error": errors.get(r.request_index),
        }
        for r in requests
    ]
    return pa.Table.from_pylist(rows, schema=requests_schema())


def load_workload(
    prompts: str,
    sampling: Sampling,
    *,
    tokenizer_path: str,
    limit: int | None,
    seed_per_request: str,
    max_model_len: int | None,
    vocabulary_size: int | None,
    base_dir: str,
) -> Workload:
    """Read, tokenise and check every prompt.

    ``sampling.seed`` is the base of the requests' own seeds, or with ``seed_per_request`` "same"
    the seed of them all. Raises UsageError for a source that cannot be read, with file and line; a
    prompt that cannot run is an item with ``error``.
    """
    sources = read_prompts(prompts, base_dir)
    samplings = {s.request_id: _sampling(s, sampling) for s in sources}
    fixed = {s.request_id: samplings[s.request_id].seed for s in sources if "seed" in s.sampling}
    if seed_per_request == "same":
        seeds = {request_id: own.seed for request_id, own in samplings.items()}
    else:
        # of all sources, so that a limit changes no request's seed
        seeds = assign_seeds(samplings, fixed)
    tokenizer = Tokenizer(tokenizer_path)
    items = []
    for index, source in enumerate(_spread(sources, limit)):
        own = replace(samplings[source.request_id], seed=seeds[source.request_id])
        items.append(_item(index, source, own, tokenizer, max_model_len, vocabulary_size))
    return Workload(tuple(items))


def token_decoder(tokenizer_path: str) -> Callable[[Sequence[int]], str]:
    """:func:`decode_tokens` for many calls: the tokenizer is read once. Raises UsageError."""
    return Tokenizer(tokenizer_path).decode


def decode_tokens(tokenizer_path: str, token_ids: Sequence[int]) -> str:
    """Text of token ids, for reports. Raises UsageError where the tokenizer cannot be read."""
    return Tokenizer(tokenizer_path).decode(token_ids)


def _item(
    index: int,
    source: Source,
    sampling: Sampling,
    tokenizer: Tokenizer,
    max_model_len: int | None,
    vocabulary_size: int | None,
) -> WorkItem:
    room = None if max_model_len is None else max(1, max_model_len - sampling.max_tokens)
    try:
        prompt, ids = _encode(source, tokenizer, room)
        error = _unusable(ids, sampling.max_tokens, max_model_len, vocabulary_size)
    except ChatTemplateError as refusal:
        prompt, ids, error = None, [], str(refusal)
    if all(0 <= i < 2**31 for i in ids):
        digest = prompt_digest(ids)
    else:
        # no token ids, so nothing that a prompt's digest could be equal to
        digest = digest_bytes("no-prompt", json.dumps(ids).encode())
        ids = []
    request = Request(source.request_id, index, tuple(ids), digest, sampling)
    return WorkItem(source, request, prompt, error)


def _encode(source: Source, tokenizer: Tokenizer, room: int | None) -> tuple[str | None, list[int]]:
    """A source's text and token ids. A shipped prompt is cut to ``room`` tokens, and to the length
    it asks for; a user's own is never touched."""
    if source.token_ids is not None:
        return None, list(source.token_ids)
    if source.messages is not None:
        return tokenizer.encode_messages(source.messages)
    text = source.text or ""
    ids = tokenizer.encode(text)
    lengths = [n for n in (source.cut, room if source.built_in else None) if n is not None]
    if not lengths or len(ids) <= min(lengths):
        return text, ids
    ids = ids[: min(lengths)]
    return tokenizer.decode(ids), ids


def _unusable(
    ids: Sequence[int], max_tokens: int, max_model_len: int | None, vocabulary_size: int | None
) -> str | None:
    """Why a prompt cannot run, or None."""
    if not ids:
        return "the prompt is empty"
    if min(ids) < 0 or max(ids) >= 2**31:
        return f"token id {min(ids) if min(ids) < 0 else max(ids)} is no token id"
    if vocabulary_size is not None and max(ids) >= vocabulary_size:
        return f"token id {max(ids)} is out of the vocabulary of {vocabulary_size}"
    if max_model_len is not None and len(ids) + max_tokens > max_model_len:
        return (
            f"the prompt has {len(ids)} tokens; with max_tokens {max_tokens} that is more than "
            f"max_model_len {max_model_len}"
        )
    return None


def _sampling(source: Source, base: Sampling) -> Sampling:
    """The workload's sampling with what the source's line changes. Raises UsageError."""
    if not source.sampling:
        return base
    from pydantic import ValidationError

    from raytest.spec import SamplingSpec

    where = f"{source.where}: sampling"
    try:
        merged = SamplingSpec.model_validate({**asdict(base), **source.sampling})
    except ValidationError as error:
        raise UsageError(_complaint(where, dict(error.errors()[0]))) from None
    most = max(LOGPROBS, base.logprobs or 0)
    if (merged.logprobs or 0) > most:
        raise UsageError(
            f"{where}.logprobs: at most {most} beside the workload's own {base.logprobs}, "
            f"found {merged.logprobs}"
        )
    return merged.resolve(base.seed)


def _complaint(where: str, error: Mapping[str, Any]) -> str:
    """One line for pydantic's finding about a line's own sampling."""
    from raytest.spec import SamplingSpec, closest

    key = ".".join([where, *(str(part) for part in error["loc"])])
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{closest(str(error['loc'][-1]), [*SamplingSpec.model_fields])}"
    if error["type"] == "value_error":
        return f"{key}: {error['msg'].removeprefix('Value error, ')}"
    message = error["msg"].replace("Input should", "should", 1)
    return f"{key}: {message}, found {error['input']!r:.60}"


def _spread(sources: list[Source], limit: int | None) -> list[Source]:
    """At most ``limit`` sources, taken from every kind in turn, in their own order."""
    if limit is None or limit >= len(sources):
        return sources
    by_kind: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        by_kind.setdefault(source.kind, []).append(i)
    turns = sorted((turn, i) for queue in by_kind.values() for turn, i in enumerate(queue))
    return [sources[i] for i in sorted(i for _, i in turns[:limit])]


def _row(item: WorkItem) -> Mapping[str, Any]:
    request = item.request
    return {
        "request_index": request.request_index,
        "request_id": request.request_id,
        "prompt_digest": request.prompt_digest,
        "prompt": item.prompt,
        "prompt_token_ids": list(request.prompt_token_ids),
        "kind": item.source.kind,
        "reference": item.source.reference,
        "seed": request.sampling.seed,
        "sampling": json.dumps(asdict(request.sampling), sort_keys=True),
        "error": item.error,
    }
