"""Rows of text as Markdown that reads well as it is."""

from __future__ import annotations

from collections.abc import Sequence


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """A table with the first `left` columns flush left and the others flush right."""
    clean = [[_in_cell(text) for text in row] for row in rows]
    widths = [max(len(row[i]) for row in [heading, *clean]) for i in range(len(heading))]
    rule = ["-" * width if index < left else "-" * (width - 1) + ":" for index, width in enumerate(widths)]
    lines = [heading, rule, *clean]
    return "\n".join("| " + " | ".join(_aligned(line, widths, left)) + " |" for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    return [
        text.ljust(width) if index < left else text.rjust(width)
        for index, (text, width) in enumerate(zip(line, widths, strict=True))
    ]


def _in_cell(text: str) -> str:
    """Without characters that end a Markdown cell."""
    return text.replace("|", "\\|")
