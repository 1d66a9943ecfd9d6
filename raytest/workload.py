"""The workload: prompts from anywhere, tokenised once, each known by an id and never by
position."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytest import prompts as built_in_prompts
from raytest.digest import prompt_digest
from raytest.engines.base import Request, Sampling
from raytest.errors import UsageError
from raytest.schema import Arrangement, requests_schema

if TYPE_CHECKING:
    import pyarrow as pa

# Seeds stay below 2**31, with room for the samples of one request (seed, seed + 1, …).
SEED_RANGE = 2**31 - 64


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as it was given: one of ``text``, ``token_ids`` and ``messages``."""

    request_id: str
    kind: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    reference: str | None = None
    cut: int | None = None


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One request of the workload; ``error`` says why its prompt cannot run (it costs no other)."""

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

    def table(self) -> pa.Table:
        """requests.parquet: every item, the unusable ones too."""
        import pyarrow as pa

        schema = requests_schema()
        rows = [
            {
                "request_index": i.request.request_index,
                "request_id": i.request.request_id,
                "prompt_digest": i.request.prompt_digest,
                "prompt": i.prompt,
                "prompt_token_ids": list(i.request.prompt_token_ids),
                "kind": i.source.kind,
                "reference": i.source.reference,
                "seed": i.request.sampling.seed,
                "sampling": json.dumps(asdict(i.request.sampling), sort_keys=True),
                "error": i.error,
            }
            for i in self.items
        ]
        return pa.Table.from_pylist(rows, schema=schema)


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
    """Read, tokenise and check every prompt. Raises UsageError for a source that cannot be read,
    with file and line; a prompt that cannot run is an item with ``error``."""
    sources = list(_read(prompts, base_dir))
    if not sources:
        raise UsageError(f"workload.prompts: {prompts}: has no prompts")
    _refuse_duplicates(prompts, sources)
    chosen = _spread(sources, limit)
    tokenizer = _Tokenizer(tokenizer_path)
    seeds = _seeds(chosen, sampling, seed_per_request)
    items = []
    for index, source in enumerate(chosen):
        ids = tokenizer.encode(source)
        if prompts.startswith("builtin:") and max_model_len is not None:
            # a shipped prompt is cut to what the model can hold; a user's own is never touched
            ids = ids[: max(1, max_model_len - sampling.max_tokens)]
        request = Request(
            request_id=source.request_id,
            request_index=index,
            prompt_token_ids=tuple(i for i in ids if 0 <= i < 2**31),
            prompt_digest=b"",
            sampling=replace(sampling, seed=seeds[source.request_id]),
        )
        request = replace(request, prompt_digest=prompt_digest(request.prompt_token_ids))
        error = _unusable(ids, sampling.max_tokens, max_model_len, vocabulary_size)
        items.append(WorkItem(source, request, source.text, error))
    return Workload(tuple(items))


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


def derive_seed(base: int, request_id: str, attempt: int = 0) -> int:
    """A request's seed from the spec's seed and its id, never from its position in a batch."""
    text = f"raytest-seed/{base}/{attempt}/{request_id}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % SEED_RANGE


def _seeds(sources: Sequence[Source], sampling: Sampling, mode: str) -> dict[str, int]:
    """Seeds by request id; no two requests' ranges [seed, seed + n) overlap."""
    if mode == "same":
        return {s.request_id: sampling.seed for s in sources}
    taken: set[int] = set()
    seeds: dict[str, int] = {}
    for source in sorted(sources, key=lambda s: s.request_id):
        attempt = 0
        while True:
            seed = derive_seed(sampling.seed, source.request_id, attempt)
            wanted = set(range(seed, seed + sampling.n))
            if not wanted & taken:
                break
            attempt += 1
        taken |= wanted
        seeds[source.request_id] = seed
    return seeds


def _spread(sources: list[Source], limit: int | None) -> list[Source]:
    """At most ``limit`` sources, taken from every kind in turn, in their own order."""
    if limit is None or limit >= len(sources):
        return sources
    by_kind: dict[str, list[int]] = {}
    for i, source in enumerate(sources):
        by_kind.setdefault(source.kind, []).append(i)
    queues = list(by_kind.values())
    chosen: list[int] = []
    while len(chosen) < limit:
        for queue in queues:
            if queue and len(chosen) < limit:
                chosen.append(queue.pop(0))
    return [sources[i] for i in sorted(chosen)]


def _refuse_duplicates(prompts: str, sources: Sequence[Source]) -> None:
    seen: set[str] = set()
    for source in sources:
        if source.request_id in seen:
            raise UsageError(f"workload.prompts: {prompts}: id {source.request_id!r} appears twice")
        seen.add(source.request_id)


def _read(prompts: str, base_dir: str) -> Iterator[Source]:
    if prompts.startswith("builtin:"):
        name = prompts.removeprefix("builtin:")
        found = built_in_prompts.built_in(name)
        if found is None:
            known = ", ".join(f"builtin:{n}" for n in built_in_prompts.names())
            raise UsageError(f"workload.prompts: no {prompts}; there are {known}")
        for i, (kind, text, cut) in enumerate(found):
            yield Source(f"builtin/{i:03d}-{kind}", kind, text=text, cut=cut)
        return
    path = Path(base_dir) / Path(prompts).expanduser()
    readers = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(
            f"workload.prompts: {prompts}: expected builtin:mixed, or a .txt, .jsonl or "
            ".parquet file"
        )
    yield from reader(path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"workload.prompts: {path}: cannot be read: {error.strerror}") from None
    for number, line in enumerate(data.split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            raise UsageError(f"workload.prompts: {path}:{number}: not UTF-8 text") from None
        if text:
            yield number, text


def _read_text(path: Path) -> Iterator[Source]:
    for number, line in _lines(path):
        yield Source(f"{path.stem}:{number}", "file", text=line)


def _read_jsonl(path: Path) -> Iterator[Source]:
    for number, line in _lines(path):
        where = f"workload.prompts: {path}:{number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(
                f"{where}: expected an object with prompt, prompt_token_ids or messages"
            )
        yield _source(row, f"{path.stem}:{number}", where)


def _read_parquet(path: Path) -> Iterator[Source]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"workload.prompts: {path}: cannot be read: {reason}") from None
    keys = ("prompt", "prompt_token_ids", "messages")
    if not any(k in table.column_names for k in keys):
        raise UsageError(f"workload.prompts: {path}: has none of the columns {', '.join(keys)}")
    for number, row in enumerate(table.to_pylist(), start=1):
        given = {k: v for k, v in row.items() if v is not None}
        yield _source(given, f"{path.stem}:{number}", f"workload.prompts: {path}: row {number}")


def _source(row: Mapping[str, Any], default_id: str, where: str) -> Source:
    given = [k for k in ("prompt", "prompt_token_ids", "messages") if k in row]
    if len(given) != 1:
        raise UsageError(
            f"{where}: expected exactly one of prompt, prompt_token_ids and messages, "
            f"found {', '.join(given) or 'none'}"
        )
    request_id = row.get("id", default_id)
    if not isinstance(request_id, str | int) or isinstance(request_id, bool):
        raise UsageError(f"{where}: id: expected text or a number")
    reference = row.get("reference")
    if reference is not None and not isinstance(reference, str):
        raise UsageError(f"{where}: reference: expected text")
    made = Source(str(request_id), str(row.get("kind", "file")), reference=reference)
    value = row[given[0]]
    if given[0] == "prompt":
        return replace(made, text=_text(value, where))
    if given[0] == "messages":
        return replace(made, messages=_messages(value, where))
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise UsageError(f"{where}: prompt_token_ids: expected a list of whole numbers")
    return replace(made, token_ids=tuple(value))


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: prompt: expected text, found {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{where}: prompt: has half a character (a lone surrogate)") from None
    return value


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    ok = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not ok or not value:
        raise UsageError(f"{where}: messages: expected a list of objects with role and content")
    for message in value:
        _text(message["content"], where)
    return tuple(value)


class _Tokenizer:
    """A model's tokenizer: the fast one from tokenizer.json, else whatever transformers makes of
    it."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._fast: Any = None
        self._slow: Any = None
        file = self._path / "tokenizer.json"
        try:
            if file.is_file():
                from tokenizers import Tokenizer

                self._fast = Tokenizer.from_file(str(file))
            else:
                from transformers import AutoTokenizer

                self._slow = AutoTokenizer.from_pretrained(path)
        except ImportError as error:
            raise UsageError(f"{error.name} is needed to tokenise; install raytest[cpu]") from None
        # the tokenizers library raises a bare Exception for a file that it cannot parse
        except Exception as error:  # noqa: BLE001
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UsageError(f"{path}: its tokenizer cannot be read: {reason}") from None

    def encode(self, source: Source) -> list[int]:
        """Token ids of a source, as vLLM would make them of the same text."""
        if source.token_ids is not None:
            return list(source.token_ids)
        if source.messages is not None:
            return self._ids(self._render(source.messages), special=False)
        ids = self._ids(source.text or "", special=True)
        return ids if source.cut is None else ids[: source.cut]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens shown."""
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=False))
        return str(self._slow.decode(list(ids)))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        if self._fast is not None:
            return list(self._fast.encode(text, add_special_tokens=special).ids)
        return list(self._slow.encode(text, add_special_tokens=special))

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The model's chat template, in the sandbox that transformers uses."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        template = self._chat_template()
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=True,
                bos_token="",
                eos_token="",
            )
        except TemplateError as error:
            raise UsageError(f"{self._path}: chat template: {error}") from None

    def _chat_template(self) -> str:
        for name, key in (
            ("chat_template.jinja", None),
            ("tokenizer_config.json", "chat_template"),
        ):
            try:
                text = (self._path / name).read_text(encoding="utf-8")
                found = text if key is None else json.loads(text).get(key)
            except (OSError, ValueError):
                continue
            if isinstance(found, str):
                return found
        raise UsageError(f"{self._path}: has no chat template, which messages need")


def token_decoder(tokenizer_path: str) -> Callable[[Sequence[int]], str]:
    """:func:`decode_tokens` for many calls: the tokenizer is read once. Raises UsageError."""
    return _Tokenizer(tokenizer_path).decode


def decode_tokens(tokenizer_path: str, token_ids: Sequence[int]) -> str:
    """Text of token ids, for reports. Raises UsageError where the tokenizer cannot be read."""
    return _Tokenizer(tokenizer_path).decode(token_ids)


def arrange(
    requests: Sequence[Request], arrangement: Arrangement, seed: int
) -> list[list[Request]]:
    """The batches, run one after the other, that hand ``requests`` to an engine."""
    ordered = list(requests)
    if arrangement is Arrangement.SOLO:
        return [[r] for r in ordered]
    if arrangement is Arrangement.REVERSED:
        return [ordered[::-1]]
    if arrangement is Arrangement.SHUFFLED:
        random.Random(f"raytest-shuffle/{seed}").shuffle(ordered)
    if arrangement is Arrangement.PREFIX:
        # neighbours in token order share the longest prefixes
        ordered.sort(key=lambda r: r.prompt_token_ids)
    return [ordered]
