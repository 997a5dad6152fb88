"""What words of a command line mean where several commands take them."""

from __future__ import annotations

from collections.abc import Sequence


def work_of(words: Sequence[str]) -> str | tuple[str, ...] | None:
    """What to train: one word that names a file or a function is an entry, anything else a command."""
    if len(words) == 1 and (":" in words[0] or words[0].endswith(".py")):
        return words[0]
    return tuple(words) or None
