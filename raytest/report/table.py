"""Plain text tables: whole cells, no cutting, readable in a pipe."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence


def table_lines(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, two spaces between, no trailing blanks."""
    table = [[printable(c) for c in row] for row in (header, *rows)]
    widths = [max(_width(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        padded = [c + " " * (w - _width(c)) for c, w in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return lines


def printable(text: str) -> str:
    """``text`` without what could move a terminal's cursor, change its colours or turn its lines
    around: control and format characters are shown as escapes."""
    return "".join(
        c if unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Zl", "Zp") else _escape(c)
        for c in text
    )


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) > 0xFF else f"\\x{ord(character):02x}"


def _width(text: str) -> int:
    """Terminal columns: wide East Asian characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
