"""Templates to HTML: everything is escaped, and no text can reach past its place."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from raytest.report.facts import percent
from raytest.report.table import printable

if TYPE_CHECKING:
    from jinja2 import Environment


def render(template: str, **values: Any) -> str:
    """The template with ``page.css`` inside. Only the style sheet and the charts, which are ours,
    are marked safe in the templates; every other value is text."""
    css = (files("raytest.report") / "templates" / "page.css").read_text(encoding="utf-8")
    return _environment().get_template(template).render(css=css, **values)


def shown(text: object, most: int = 300) -> str:
    """Text with control and format characters as escapes, cut with a note."""
    value = str(text)
    lines = "\n".join(printable(line) for line in value[:most].split("\n"))
    return lines if len(value) <= most else f"{lines}… ({len(value) - most} more characters)"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("raytest.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = shown
    environment.filters["percent"] = percent
    return environment
