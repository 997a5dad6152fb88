"""Plain text: printable names, Markdown tables, plots drawn with characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


def one_line(text: str) -> str:
    """The text without line breaks and terminal control characters."""
    return "".join(char if char.isprintable() else " " for char in text)


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
    """Escape characters that would end a Markdown cell."""
    return text.replace("|", "\\|")


WIDTH, HEIGHT = 56, 11


@dataclass(frozen=True, slots=True)
class PlotPoint:
    """A point and the character it is drawn with; the last of several in one place is visible."""

    x: float
    y: float
    sign: str


def tiny_plot(
    marks: Sequence[PlotPoint],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> str:
    """The points in a frame whose corners carry the extreme values."""
    if not marks:
        return ""
    lowest_x, highest_x = _range([mark.x for mark in marks])
    lowest_y, highest_y = _range([mark.y for mark in marks])
    rows = [[" "] * WIDTH for _ in range(HEIGHT)]
    for mark in marks:
        column = round((mark.x - lowest_x) / (highest_x - lowest_x) * (WIDTH - 1))
        row = round((highest_y - mark.y) / (highest_y - lowest_y) * (HEIGHT - 1))
        rows[row][column] = mark.sign
    labels = {0: y_text(highest_y), HEIGHT - 1: y_text(lowest_y)}
    margin = max(len(label) for label in labels.values())
    lines = [f"{labels.get(index, ''):>{margin}} |{''.join(row).rstrip()}" for index, row in enumerate(rows)]
    left, right = x_text(lowest_x), x_text(highest_x)
    axis = " " * margin + " +" + "-" * WIDTH
    foot = " " * (margin + 2) + left + right.rjust(WIDTH - len(left))
    return "\n".join([*lines, axis, foot])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + max(abs(low), 1.0))
