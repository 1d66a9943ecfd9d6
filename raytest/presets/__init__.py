"""Specs that ship with raytest, by name."""

from __future__ import annotations

from importlib.resources import files

from raytest.errors import UsageError


def preset_names() -> list[str]:
    """Names of the shipped specs."""
    return sorted(
        p.name.removesuffix(".toml") for p in files(__name__).iterdir() if p.name.endswith(".toml")
    )


def is_preset(name: str) -> bool:
    """Whether ``name`` is a shipped spec."""
    return name in preset_names()


def preset_text(name: str) -> str:
    """The TOML text of a shipped spec. Raises UsageError."""
    if not is_preset(name):
        raise UsageError(f"no preset {name!r}; there are {', '.join(preset_names())}")
    return (files(__name__) / f"{name}.toml").read_text(encoding="utf-8")
