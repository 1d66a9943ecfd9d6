"""Prompts as they were given: the built-in ones, or those of a .txt, .jsonl or .parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raytest import prompts as built_in_prompts
from raytest.errors import UsageError

SETTING = "workload.prompts"
BUILT_IN = "builtin:"
FORMS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class Source:
    """A prompt as it was given: one of ``text``, ``token_ids`` and ``messages``.

    ``where`` names file and line. ``sampling`` holds the line's own parameters, over the
    workload's. ``cut`` asks for a text of so many tokens; a ``built_in`` one may also be cut to
    what the model can hold.
    """

    request_id: str
    kind: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    reference: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    cut: int | None = None
    where: str = ""
    built_in: bool = False


def read_prompts(prompts: str, base_dir: str) -> list[Source]:
    """Every prompt of ``builtin:<name>`` or of a file, relative to ``base_dir``.

    Raises UsageError, naming file and line, for what cannot be read, is no prompt, or has an id
    twice; and for a source without prompts.
    """
    if prompts.startswith(BUILT_IN):
        sources = list(_built_in(prompts))
    else:
        path = Path(base_dir) / Path(prompts).expanduser()
        reader = READERS.get(path.suffix.lower())
        if reader is None:
            raise UsageError(
                f"{SETTING}: {prompts}: expected builtin:mixed, or a .txt, .jsonl or .parquet file"
            )
        sources = list(reader(path))
    if not sources:
        raise UsageError(f"{SETTING}: {prompts}: has no prompts")
    _refuse_duplicates(sources)
    return sources


def _built_in(prompts: str) -> Iterator[Source]:
    name = prompts.removeprefix(BUILT_IN)
    found = built_in_prompts.built_in(name)
    if found is None:
        known = ", ".join(f"{BUILT_IN}{n}" for n in built_in_prompts.names())
        raise UsageError(f"{SETTING}: no {prompts}; there are {known}")
    for i, (kind, text, cut) in enumerate(found):
        request_id = f"builtin/{name}/{i:03d}-{kind}"
        where = f"{SETTING}: {prompts}"
        yield Source(request_id, kind, text=text, cut=cut, where=where, built_in=True)


def _refuse_duplicates(sources: Sequence[Source]) -> None:
    seen: dict[str, Source] = {}
    for source in sources:
        first = seen.setdefault(source.request_id, source)
        if first is not source:
            raise UsageError(
                f"{source.where}: id: {source.request_id!r} appears twice; first at "
                f"{first.where.removeprefix(f'{SETTING}: ')}"
            )


def _lines(path: Path) -> Iterator[tuple[str, str, str]]:
    """Default id, place and text of every line that is not empty."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{SETTING}: {path}: cannot be read: {error.strerror}") from None
    # the mark some editors put before UTF-8 is no part of the first prompt
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        where = f"{SETTING}: {path}:{number}"
        try:
            text = line.decode("utf-8").removesuffix("\r")
        except UnicodeDecodeError:
            raise UsageError(f"{where}: not UTF-8 text") from None
        if text:
            yield f"{path.stem}:{number}", where, text


def _read_text(path: Path) -> Iterator[Source]:
    for default_id, where, line in _lines(path):
        yield Source(default_id, "file", text=line, where=where)


def _read_jsonl(path: Path) -> Iterator[Source]:
    for default_id, where, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_without_repeated_keys)
        # ValueError: also a number of more digits than Python reads, and a repeated key
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise UsageError(
                f"{where}: expected an object with prompt, prompt_token_ids or messages"
            )
        yield _source(row, default_id, where)


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} appears twice")
        found[key] = value
    return found


def _read_parquet(path: Path) -> Iterator[Source]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        rows = table.to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"{SETTING}: {path}: cannot be read: {reason}") from None
    if not any(form in table.column_names for form in FORMS):
        raise UsageError(f"{SETTING}: {path}: has none of the columns {', '.join(FORMS)}")
    for number, row in enumerate(rows, start=1):
        where = f"{SETTING}: {path}: row {number}"
        yield _source(_without_nulls(row), f"{path.stem}:{number}", where)


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """Parquet has every column in every row: null is what JSON leaves out."""
    return {
        key: _without_nulls(value) if key == "sampling" and isinstance(value, dict) else value
        for key, value in row.items()
        if value is not None
    }


READERS = {".txt": _read_text, ".jsonl": _read_jsonl, ".parquet": _read_parquet}


def _source(row: Mapping[str, Any], default_id: str, where: str) -> Source:
    given = [form for form in FORMS if form in row]
    if len(given) != 1:
        raise UsageError(
            f"{where}: expected exactly one of prompt, prompt_token_ids and messages, "
            f"found {', '.join(given) or 'none'}"
        )
    request_id = row.get("id", default_id)
    if not isinstance(request_id, str | int) or isinstance(request_id, bool) or request_id == "":
        raise UsageError(f"{where}: id: expected text or a number, found {request_id!r:.60}")
    reference = row.get("reference")
    sampling = row.get("sampling", {})
    if not isinstance(sampling, dict):
        raise UsageError(f"{where}: sampling: expected an object, found {type(sampling).__name__}")
    made = Source(
        _text(str(request_id), where, "id"),
        _text(row.get("kind", "file"), where, "kind"),
        reference=None if reference is None else _text(reference, where, "reference"),
        sampling=sampling,
        where=where,
    )
    value = row[given[0]]
    if given[0] == "prompt":
        return replace(made, text=_text(value, where, "prompt"))
    if given[0] == "messages":
        return replace(made, messages=_messages(value, where))
    if not isinstance(value, list) or any(type(i) is not int for i in value):
        raise UsageError(f"{where}: prompt_token_ids: expected a list of whole numbers")
    return replace(made, token_ids=tuple(value))


def _text(value: Any, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where}: {key}: expected text, found {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(f"{where}: {key}: has half a character (a lone surrogate)") from None
    return value


def _messages(value: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    ok = isinstance(value, list) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in value
    )
    if not ok or not value:
        raise UsageError(f"{where}: messages: expected a list of objects with role and content")
    for message in value:
        for key in message:
            if isinstance(message[key], str):
                _text(message[key], where, f"messages: {key}")
    return tuple(value)
