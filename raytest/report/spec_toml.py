"""A resolved spec as TOML that ``raytest run`` takes, secrets hidden."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from raytest.fingerprint.redact import redact_env

BARE = re.compile(r"[A-Za-z0-9_-]+")


def spec_toml(spec: Mapping[str, Any]) -> str:
    """TOML of ``manifest["spec"]``; what is unset is left out, values of secret variables too."""
    return "\n".join(_table(_without_secrets(spec), ())).strip() + "\n"


def _without_secrets(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        if name == "env":
            return redact_env(value)
        return {k: _without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_secrets(v) for v in value]
    return value


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    inner = {k: v for k, v in table.items() if isinstance(v, Mapping) and v}
    lists = {k: v for k, v in table.items() if _is_tables(v)}
    for key, value in table.items():
        if value is not None and key not in inner and key not in lists:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in inner.items():
        yield f"\n[{'.'.join(map(_key, (*path, key)))}]"
        yield from _table(value, (*path, key))
    for key, values in lists.items():
        for value in values:
            yield f"\n[[{'.'.join(map(_key, (*path, key)))}]]"
            yield from _table(value, (*path, key))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if BARE.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        entries = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    # JSON's string escapes are TOML's, but for DEL
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
