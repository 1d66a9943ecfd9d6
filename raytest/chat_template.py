"""A model's chat template, rendered as transformers renders it, but never with today's date."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raytest.errors import UsageError

Render = Callable[[Sequence[Mapping[str, Any]]], str]

# What a template's own expressions raise on messages that its author did not think of.
_TEMPLATE_FAULTS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)


class ChatTemplateError(UsageError):
    """These messages cannot be rendered; others may."""


def find_template(folder: Path) -> str | None:
    """The template of a model's folder: its own file first, as in transformers; None without."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        pass
    found = _tokenizer_config(folder).get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def special_tokens(folder: Path) -> dict[str, str]:
    """Text of ``bos_token``, ``eos_token`` and the like, which templates name."""
    tokens = {}
    for key, value in _tokenizer_config(folder).items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def renderer(template: str, tokens: Mapping[str, str]) -> Render:
    """A function from messages to the prompt's text, up to where the assistant answers.

    Raises UsageError for a template that does not parse; the function raises ChatTemplateError for
    messages that the template refuses. ``strftime_now`` is left undefined on purpose: templates
    fall back to a fixed date, and the same work gives the same prompt tomorrow.
    """
    from jinja2 import TemplateError

    try:
        compiled = _environment().from_string(template)
    except TemplateError as error:
        raise UsageError(f"chat template: {error}") from None

    def render(messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            text = compiled.render(
                messages=[dict(m) for m in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **tokens,
            )
        except (TemplateError, *_TEMPLATE_FAULTS) as error:
            raise ChatTemplateError(f"chat template: {error}") from None
        return str(text)

    return render


def _environment() -> Any:
    """The sandbox, options, filters and tags of transformers' own renderer."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training: here its body alone."""

        tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
