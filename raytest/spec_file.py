"""Reads a spec file. Every mistake is refused before anything starts, one line each: the file, the
key, what was found and what would be accepted.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from raytest.errors import UsageError
from raytest.fingerprint.redact import redact_text
from raytest.spec import Spec, closest


def load_spec(path: str | Path, overrides: tuple[str, ...] = ()) -> Spec:
    """Read a spec file, apply ``KEY=VALUE`` overrides, check everything.

    Raises UsageError with one line per mistake, each with file and key.
    """
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise UsageError(f"{file}: no such spec; 'raytest init {file}' writes one") from None
    except IsADirectoryError:
        raise UsageError(f"{file}: is a folder, expected a spec file (.toml)") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    return parse_spec(text, str(file), overrides)


def parse_spec(text: str, source: str, overrides: tuple[str, ...] = ()) -> Spec:
    """Parse TOML ``text``; ``source`` names it in errors. Raises UsageError."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{source}: not valid TOML: {error}") from None
    for override in overrides:
        _apply_override(data, override)
    return validate_spec(data, source)


def validate_spec(data: dict[str, Any], source: str) -> Spec:
    """Check plain data as a spec. Raises UsageError with one line per mistake."""
    try:
        return Spec.model_validate(data)
    except ValidationError as error:
        errors = [dict(e) for e in error.errors()]
        lines = list(dict.fromkeys(_error_line(source, e) for e in errors if not _echo(e, errors)))
        raise UsageError("\n".join(lines)) from None


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, sep, text = override.partition("=")
    if not sep or not key.strip():
        raise UsageError(f"--set {override!r}: expected KEY=VALUE, such as trials.repeats=3")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: --set model.path=synthetic:tiny
    target: Any = data
    *parents, last = key.strip().split(".")
    for part in parents:
        target = _descend(target, part, override)
    if isinstance(target, list):
        target[_list_index(target, last, override)] = value
    else:
        target[last] = value


def _descend(target: Any, part: str, override: str) -> Any:
    if isinstance(target, list):
        return target[_list_index(target, part, override)]
    child = target.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise UsageError(f"--set {override!r}: {part!r} holds a value, not a table")
    return child


def _list_index(target: list[Any], part: str, override: str) -> int:
    """An element by number, or by its ``name`` (``variants.tp2.env.X=1``)."""
    for i, element in enumerate(target):
        if part == str(i) or (isinstance(element, dict) and element.get("name") == part):
            return i
    raise UsageError(f"--set {override!r}: no element {part!r} in the list")


def _echo(error: dict[str, Any], errors: list[dict[str, Any]]) -> bool:
    """pydantic also calls a list too short when an element of it is wrong: once is enough."""
    loc = error["loc"]
    return error["type"] == "too_short" and any(
        len(e["loc"]) > len(loc) and e["loc"][: len(loc)] == loc for e in errors
    )


def _error_line(source: str, error: dict[str, Any]) -> str:
    loc = tuple(p for p in error["loc"] if not _is_union_tag(p))
    key = ".".join(str(p) for p in loc)
    where = f"{source}: {key}" if key else source
    kind, found = error["type"], error.get("input")
    if kind == "extra_forbidden":
        return f"{where}: unknown key{closest(str(loc[-1]), _fields_at(loc[:-1]))}"
    if kind == "missing":
        return f"{where}: required, but not set"
    message = error["msg"].removeprefix("Value error, ")
    message = message.replace("Input should", "should", 1)
    if isinstance(found, dict | list | tuple) and kind == "value_error":
        return f"{where}: {message}"
    hint = ""
    if isinstance(found, str) and kind in ("literal_error", "enum"):
        options = str(error["ctx"]["expected"]).replace(" or ", ", ").split(", ")
        hint = closest(found, [o.strip("' ") for o in options])
        hint = hint if "did you mean" in hint else ""
    return f"{where}: {message}, found {_short(found)}{hint}"


def _is_union_tag(part: Any) -> bool:
    """pydantic names the member of a union in ``loc``; a person only wants the key."""
    return isinstance(part, str) and (
        part in ("Thresholds", "int", "str", "none") or part.startswith(("literal[", "tuple["))
    )


def _short(value: Any, limit: int = 60) -> str:
    text = redact_text(repr(value))
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _fields_at(loc: tuple[Any, ...]) -> list[str]:
    """Names that are accepted at a place in the spec, for the closest-match hint."""
    model: type[BaseModel] = Spec
    for part in loc:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = _model_in(field.annotation) if field is not None else None
        if inner is None:
            return []
        model = inner
    return [*model.model_fields]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for arg in get_args(annotation):
        found = _model_in(arg)
        if found is not None:
            return found
    return None
