"""Names that users chose, made fit to print."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Without line breaks and without characters that steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text)
